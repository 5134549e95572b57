// The quantised head (quantised_head.h): sums of 6-bit and 8-bit codes, and the bounds of exact logits.
#pragma once
#include "tile_parts.h"
#include "verbs_rows.h"

namespace {

using namespace bitnet;

// The four fields of a step of 6-bit codes: low 4 bits in two planes of 64 bytes, high 2 bits in a third.
BITNET_INLINE void load_fields6(const uint8_t* w, Bytes* fields) {
    const Bytes low = load_bytes(w), middle = load_bytes(w + 64), high = load_bytes(w + 128);
    fields[0] = mask_or(low, 15, masked(shift_left<4>(high), 48));
    fields[1] = mask_or(shift_right<4>(low), 15, masked(shift_left<2>(high), 48));
    fields[2] = mask_or(middle, 15, masked(high, 48));
    fields[3] = mask_or(shift_right<4>(middle), 15, masked(shift_right<2>(high), 48));
}

// The same of 2-bit codes.
BITNET_INLINE void load_fields2(const uint8_t* w, Bytes* fields) {
    const Bytes x = load_bytes(w);
    fields[0] = masked(x, 3);
    fields[1] = masked(shift_right<2>(x), 3);
    fields[2] = masked(shift_right<4>(x), 3);
    fields[3] = masked(shift_right<6>(x), 3);
}

// Both as whole bytes.
BITNET_INLINE void load_fields8(const uint8_t* w6, const uint8_t* w2, Bytes* fields) {
    const Bytes low = load_bytes(w6), middle = load_bytes(w6 + 64), high = load_bytes(w6 + 128), x = load_bytes(w2);
    constexpr uint8_t top = 192, inner = 60;
    fields[0] = choose_bits(shift_left<2>(low), inner, choose_bits(shift_left<6>(high), top, x));
    fields[1] = choose_bits(shift_right<2>(low), inner, choose_bits(shift_left<4>(high), top, shift_right<2>(x)));
    fields[2] = choose_bits(shift_left<2>(middle), inner, choose_bits(shift_left<2>(high), top, shift_right<4>(x)));
    fields[3] = choose_bits(shift_right<2>(middle), inner, choose_bits(high, top, shift_right<6>(x)));
}

// Of two tiles that share the activations: the registers have room for so many vectors' sums. 0: for none.
constexpr int kSharedVectors = kTileSums > 8 ? 8 : 0;

// R tiles from this one on, all V vectors, and C chains of sums for each, which hide the latency of a product.
template <int Bits, int R, int V>
void head_sums(const HeadTask& t, int tile) {
    constexpr int C = R * V <= 2 ? 4 : R * V <= 4 ? 2 : 1;
    const uint8_t* w6 = t.weights6 + tile * t.steps * kHeadBytes6;
    const uint8_t* w2 = t.weights2 + tile * t.steps * kHeadBytes2;
    const int8_t* codes = t.codes;
    const bool fetches = !(Bits == 6 && R == 1 && V <= 2 && reads_on);
    Sums sums[C][R][V];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
#pragma GCC unroll 2
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) sums[c][r][v] = no_sums();
    for (int s = 0; s < t.steps; s++, w6 += kHeadBytes6, w2 += kHeadBytes2, codes += 16 * V) {
        Bytes fields[R][4];
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) {
            const uint8_t* of6 = w6 + r * t.steps * kHeadBytes6;
            const uint8_t* of2 = w2 + r * t.steps * kHeadBytes2;
            const int64_t beside = (R - 1) * t.steps;  // what is read side by side was fetched before
            if constexpr (Bits != 2)
#pragma GCC unroll 3
                for (int line = 0; line < kHeadBytes6; line += 64)
                    if (fetches) fetch_ahead(of6 + beside * kHeadBytes6 + line);
            if constexpr (Bits != 6) fetch_ahead(of2 + beside * kHeadBytes2);
            if constexpr (Bits == 8)
                load_fields8(of6, of2, fields[r]);
            else
                Bits == 6 ? load_fields6(of6, fields[r]) : load_fields2(of2, fields[r]);
        }
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++)
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) {
                const int8_t* four = codes + 4 * (p * V + v);
#pragma GCC unroll 2
                for (int r = 0; r < R; r++) sums[p % C][r][v] = dot(sums[p % C][r][v], fields[r][p], four);
            }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) {
            Sums sum = sums[0][r][v];
#pragma GCC unroll 3
            for (int c = 1; c < C; c++) sum = add_sums(sum, sums[c][r][v]);
            store_sums(t.acc + ((tile + r) * kHeadTaskVectors + v) * kHeadRows, sum);
        }
}

template <int Bits>
void head_sums(const HeadTask& t) {
    with_count<kHeadVectors>(t.vectors, [&](auto v) {
        if constexpr (v.value <= kSharedVectors)
            if (t.tiles == 2) return head_sums<Bits, 2, v.value>(t, 0);
        for (int tile = 0; tile < t.tiles; tile++) head_sums<Bits, 1, v.value>(t, tile);
    });
}

// Where products take no whole bytes.
template <void (*Sums6)(const HeadTask&), void (*Sums2)(const HeadTask&)>
void head_sums8_in_parts(const HeadTask& t) {
    int32_t fine[2 * kHeadTaskVectors * kHeadRows];
    HeadTask low = t;
    low.acc = fine;
    Sums6(t);
    Sums2(low);
    for (int tile = 0; tile < t.tiles; tile++)
        for (int i = 0, at = tile * kHeadTaskVectors * kHeadRows; i < t.vectors * kHeadRows; i++, at++)
            t.acc[at] = 4 * t.acc[at] + fine[at];
}

BITNET_INLINE Lanes head_scores(const HeadScores& t, int i) {
    const HeadInput& input = t.inputs[i];
    const auto sums = [&](int vector, int32_t total) {
        const int at = i * t.vectors_each + vector;
        if (t.scaled_sums) return load(t.scaled_sums + at * kGroupRows);
        const int32_t minus = int32_t(t.offset * uint32_t(total));  // what leaves int32 comes back: modulo 2^32
        return to_lanes(scale_sums(load_sums(t.sums + at * kHeadRows), t.shift, minus));
    };
    Lanes scores = mul(set1(input.high), sums(0, input.high_total));
    if (t.vectors_each == 2) scores = add(scores, mul(set1(input.low), sums(1, input.low_total)));
    return t.scaled_sums ? scores : mul(load(t.half_scale), scores);
}

void head_scores(const HeadScores& t, float* scores) {
    for (int i = 0; i < t.count; i++) store(scores + i * kHeadRows, head_scores(t, i));
}

// Up by three roundings.
BITNET_INLINE Lanes head_errors(const HeadErrors& e, const HeadInput& input) {
    const Lanes errors = add(mul(load(e.error), set1(input.error_factor)), mul(load(e.size), set1(input.size_factor)));
    return mul(errors, set1(1.000001f));
}

uint32_t head_bounds(const HeadScores& t, const HeadErrors& e, const HeadEnds& ends) {
    const Lanes infinite = set1(std::numeric_limits<float>::infinity());
    uint32_t higher = 0;
    for (int i = 0; i < t.count; i++) {
        const Lanes scores = head_scores(t, i);
        // Up by one rounding of each end, and by what underflow has lost.
        const Lanes bound = add(add(head_errors(e, t.inputs[i]), mul(abs(scores), set1(1.2e-7f))),
                                set1(8 * std::numeric_limits<float>::min()));
        const Lanes up = add(scores, bound), down = sub(scores, bound);
        store(ends.upper + i * ends.upper_stride, up);
        store(ends.lower + i * kHeadRows, down);
        ends.most[i * ends.most_stride] = reduce_max(below(up, infinite, infinite, up));
        higher |= uint32_t(any_below(set1(ends.least[i]), down)) << i;
    }
    return higher;
}

void head_refine(const HeadScores& low, const HeadErrors& of6, const HeadErrors& of8, float* upper) {
    const HeadInput& input = *low.inputs;
    const Lanes up = load(upper), scores = head_scores(low, 0);
    const Lanes errors6 = head_errors(of6, input), errors8 = head_errors(of8, input);
    const Lanes rest = add(errors8, mul(load(of6.size), set1(2 * input.rounding)));
    // Up by 8 roundings of these and of what they were made of.
    const Lanes terms = add(add(abs(up), errors6), add(abs(scores), rest));
    const Lanes slack = add(mul(terms, set1(1e-6f)), set1(std::numeric_limits<float>::min()));
    const Lanes refined = add(add(sub(up, errors6), scores), add(rest, slack));
    store(upper, below(refined, up, up, refined));
}

}  // namespace
