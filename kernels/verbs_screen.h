// The quantised head (quantised_head.h): sums of 6-bit and 2-bit codes, and the bounds of exact logits.
#pragma once
#include "verbs_rows.h"

namespace {

using namespace bitnet;

// The four fields of a step of 6-bit codes: low 4 bits in two planes of 64 bytes, high 2 bits in a third.
BITNET_INLINE void load_fields6(const uint8_t* w, Bytes* fields) {
    const Bytes low = load_bytes(w), middle = load_bytes(w + 64), high = load_bytes(w + 128);
    fields[0] = mask_or(low, 15, mask_or(shift_left<4>(high), 48, no_bytes()));
    fields[1] = mask_or(shift_right<4>(low), 15, mask_or(shift_left<2>(high), 48, no_bytes()));
    fields[2] = mask_or(middle, 15, mask_or(high, 48, no_bytes()));
    fields[3] = mask_or(shift_right<4>(middle), 15, mask_or(shift_right<2>(high), 48, no_bytes()));
}

BITNET_INLINE void load_fields2(const uint8_t* w, Bytes* fields) {
    const Bytes x = load_bytes(w);
    fields[0] = mask_or(x, 3, no_bytes());
    fields[1] = mask_or(shift_right<2>(x), 3, no_bytes());
    fields[2] = mask_or(shift_right<4>(x), 3, no_bytes());
    fields[3] = mask_or(shift_right<6>(x), 3, no_bytes());
}

// V vectors, and C chains of sums for each, which hide the latency of a product.
template <int StepBytes, int V>
void head_sums(const uint8_t* w, const int8_t* codes, int steps, int32_t* acc) {
    constexpr int C = V <= 2 ? 4 : V <= 4 ? 2 : 1;
    Sums sums[C][V];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[c][v] = no_sums();
    for (int s = 0; s < steps; s++, w += StepBytes, codes += 16 * V) {
#pragma GCC unroll 3
        for (int line = 0; line < StepBytes; line += 64) fetch_ahead(w + line);
        Bytes fields[4];
        if constexpr (StepBytes == kHeadBytes6)
            load_fields6(w, fields);
        else
            load_fields2(w, fields);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[p % C][v] = dot(sums[p % C][v], fields[p], codes + 4 * (p * V + v));
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
        if constexpr (C == 4) sums[0][v] = add_sums(add_sums(sums[0][v], sums[1][v]), add_sums(sums[2][v], sums[3][v]));
        if constexpr (C == 2) sums[0][v] = add_sums(sums[0][v], sums[1][v]);
        store_sums(acc + 16 * v, sums[0][v]);
    }
}

template <int StepBytes>
void head_sums(const uint8_t* w, const int8_t* codes, int steps, int vectors, int32_t* acc) {
    switch (vectors) {
        case 1:
            return head_sums<StepBytes, 1>(w, codes, steps, acc);
        case 2:
            return head_sums<StepBytes, 2>(w, codes, steps, acc);
        case 3:
            return head_sums<StepBytes, 3>(w, codes, steps, acc);
        case 4:
            return head_sums<StepBytes, 4>(w, codes, steps, acc);
        case 5:
            return head_sums<StepBytes, 5>(w, codes, steps, acc);
        case 6:
            return head_sums<StepBytes, 6>(w, codes, steps, acc);
        case 7:
            return head_sums<StepBytes, 7>(w, codes, steps, acc);
        default:
            return head_sums<StepBytes, 8>(w, codes, steps, acc);
    }
}

void head_scores(const HeadScores& t, float* scores) {
    for (int r = 0; r < kHeadRows; r++)
        scores[r] = t.half_scale[r] * (t.high * float(t.high_sums[r]) + t.low * float(t.low_sums[r]));
}

bool head_bounds(const HeadScores& t, const HeadErrors& e, float least, float* upper, float* lower) {
    float scores[kHeadRows];
    head_scores(t, scores);
    bool any = false;
    for (int r = 0; r < kHeadRows; r++) {
        // Up by three roundings of the bound itself and one of each end.
        const float bound = (e.error[r] * e.error_factor + e.size[r] * e.size_factor) * 1.000001f +
                            std::fabs(scores[r]) * 1.2e-7f + std::numeric_limits<float>::min();
        upper[r] = scores[r] + bound;
        lower[r] = scores[r] - bound;
    }
    for (int r = 0; r < kHeadRows; r++) any |= !(upper[r] < least);
    return any;
}

}  // namespace
