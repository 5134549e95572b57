// A tile of tokens in parts that fit into the registers of a smaller instruction set.
#pragma once
#include "kernels.h"

namespace {

// Calls Tile::run<T> for T = tokens, 1 to Most.
template <class Tile, int Most>
void run_part(const uint8_t* w, const int8_t* a, int steps, int tokens, int stride, int32_t* acc) {
    if constexpr (Most > 1)
        if (tokens < Most) return run_part<Tile, Most - 1>(w, a, steps, tokens, stride, acc);
    Tile::template run<Most>(w, a, steps, stride, acc);
}

// Kernels::ternary_tile, in parts of at most Most tokens, as evenly as possible.
template <class Tile, int Most>
void tile_in_parts(const uint8_t* w, const int8_t* a, int steps, int tokens, int32_t* acc) {
    const int parts = (tokens + Most - 1) / Most;
    for (int i = 0; i < parts; i++) {
        const int first = tokens * i / parts, last = tokens * (i + 1) / parts;
        run_part<Tile, Most>(w, a + 4 * first, steps, last - first, tokens, acc + first * bitnet::kGroupRows);
    }
}

}  // namespace
