// The float verbs, written once over 16 lanes and compiled by every instruction set: what makes them equal to the bit.
//
// The order of every sum is fixed here: lane l takes elements 16 i + l in ascending i by fused multiply-add, then the
// lanes are added as reduce_add says. Element-wise loops are plain C++: without -ffast-math and without contraction a
// compiler may vectorise them, but not change a bit of them.
// Everything is in an unnamed namespace: a function shared between objects with different flags would be linked once,
// with the instructions of whichever object came first.
#pragma once
#include "verbs_attention.h"
#include "verbs_products.h"
#include "verbs_rows.h"

namespace {

constexpr Kernels make_kernels(const char* name, void (*tile)(const uint8_t*, const int8_t*, int, int, int32_t*),
                               int64_t (*peak)(int64_t)) {
    return {name,   tile,     ternary_store, embed,   row,     dense,   rope, cache_write,
            attend, add_rows, screen,        nullptr, nullptr, nullptr, peak, read_memory};
}

}  // namespace
