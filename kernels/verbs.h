// The float verbs, written once over 16 lanes and compiled by every instruction set: what makes them equal to the bit.
//
// The order of every sum is fixed here: lane l takes elements 16 i + l in ascending i by fused multiply-add, then the
// lanes are added as reduce_add says. Element-wise loops are plain C++: without -ffast-math and without contraction a
// compiler may vectorise them, but not change a bit of them.
// Everything is in an unnamed namespace: a function shared between objects with different flags would be linked once,
// with the instructions of whichever object came first.
#pragma once
#include "verbs_attention.h"
#include "verbs_cache.h"
#include "verbs_groups.h"
#include "verbs_products.h"
#include "verbs_rows.h"
#include "verbs_screen.h"

namespace {

constexpr Kernels make_kernels(const char* name, void (*tile)(const uint8_t*, const int8_t*, int, int, int32_t*),
                               int64_t (*peak)(int64_t)) {
    Kernels kernels{};
    kernels.name = name;
    kernels.ternary_tile = tile;
    kernels.ternary_store = ternary_store;
    kernels.group_tile = group_tile;
    kernels.group_add = group_add;
    kernels.group_store = group_store;
    kernels.group_sums = group_sums;
    kernels.group_row = group_row;
    kernels.embed = embed;
    kernels.row = row;
    kernels.dense = dense;
    kernels.rope = rope;
    kernels.cache_write = cache_write;
    kernels.attend = attend_in<InVectors>;
    kernels.attend_merge = attend_merge;
    kernels.add = add_rows;
    kernels.head_sums2 = head_sums<2>;
    kernels.head_sums6 = head_sums<6>;
    kernels.head_sums8 = kWholeBytes ? head_sums<8> : head_sums8_in_parts<head_sums<6>, head_sums<2>>;
    kernels.whole_bytes = kWholeBytes;
    kernels.head_vectors = kHeadVectors;
    kernels.rough_inputs = 4;
    kernels.head_scores = head_scores;
    kernels.head_bounds = head_bounds;
    kernels.head_refine = head_refine;
    kernels.int8_peak = peak;
    kernels.read_memory = read_memory;
    kernels.cost_of_help = 20'000'000;
    return kernels;
}

}  // namespace
