// Numbers of tokens that the compiler knows, and a tile in parts that fit into the registers of a smaller instruction
// set.
#pragma once
#include "fetch.h"
#include "kernels.h"

namespace {

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls f with a Count of n, from 1 to Most.
template <int Most, class F>
inline void with_count(int n, const F& f) {
    if constexpr (Most > 1)
        if (n < Most) return with_count<Most - 1>(n, f);
    f(Count<Most>());
}

// Calls f with the first token of each tile, how many it has, and which one it is.
template <class F>
BITNET_INLINE void each_tile(const bitnet::ManyTask& t, const F& f) {
    for (int i = t.first_tile; i < t.last_tile; i++) {
        const int first = int(int64_t(t.tokens) * i / t.tiles);
        f(first, int(int64_t(t.tokens) * (i + 1) / t.tiles) - first, i - t.first_tile);
    }
}

// So many steps or blocks of a group's weights, of so many bytes each.
struct Share {
    int begin, count, all, unit_bytes;
};

// With every tile a part of what comes next is fetched: where its sums will go, and by what is returned, line by line,
// the weights behind a share. All of it at once would keep the tile waiting.
BITNET_INLINE Ahead fetch_beside(const bitnet::ManyTask& t, const Share& share, int tile, int first, int tokens) {
    const int end = share.begin + share.count;
    if (t.out)
        fetch_outputs(t.out + first * t.out_stride, t.out_stride, tokens * share.begin / share.all,
                      tokens * end / share.all);
    const uint8_t* next = t.weights + end * share.unit_bytes;
    const int lines = share.count * share.unit_bytes / 64, tiles = t.last_tile - t.first_tile;
    return {next + lines * tile / tiles * 64, next + lines * (tile + 1) / tiles * 64};
}

// Kernels::ternary_tile, in parts of at most Most tokens, as evenly as possible.
template <class Tile, int Most>
void tile_in_parts(const uint8_t* w, const int8_t* a, int steps, int tokens, int32_t* acc) {
    const int parts = (tokens + Most - 1) / Most;
    for (int i = 0; i < parts; i++) {
        const int first = tokens * i / parts, last = tokens * (i + 1) / parts;
        with_count<Most>(last - first, [&](auto t) {
            Tile::template run<t.value>(w, a + 4 * first, steps, tokens, acc + first * bitnet::kGroupRows);
        });
    }
}

}  // namespace
