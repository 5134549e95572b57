// Ternary products whose scales change every few columns.
#pragma once
#include "verbs_rows.h"

namespace {

using namespace bitnet;

// The fields of 16 rows. In place, fields 1 and 3 are four times as large as their codes, and two shifts fewer.
template <bool in_place>
BITNET_INLINE void split_fields(const uint8_t* w, Bytes* fields) {
    const Bytes x = load_bytes(w), y = shift_right<4>(x);
    fields[0] = mask_or(x, 3, no_bytes());
    fields[1] = in_place ? mask_or(x, 12, no_bytes()) : mask_or(shift_right<2>(x), 3, no_bytes());
    fields[2] = mask_or(y, 3, no_bytes());
    fields[3] = in_place ? mask_or(y, 12, no_bytes()) : mask_or(shift_right<6>(x), 3, no_bytes());
}

// T tokens from `first` on and H times 16 rows from row 16 * half on. Two chains of sums, C = 2, hide the latency of a
// product: one of the fields 0 and 2, and one of the fields 1 and 3, which stay in place.
template <int T, int H, int C>
void group_rows(const GroupTask& task, int half, int first) {
    const uint8_t* w = task.weights + 64 * half;
    const float* scales = task.scales + 16 * half;
    const int8_t* codes = task.codes + 4 * first;
    const int32_t* minus_sums = task.minus_sums + first * task.sums_stride;
    // Where all tokens fit into one part the compiler knows how far apart their codes are.
    const int64_t stride = kTileSums < kMaxTileTokens ? task.tokens : T;
    Lanes totals[H][T];
#pragma GCC unroll 2
    for (int h = 0; h < H; h++)
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) totals[h][t] = set1(0.0f);
    for (int s = 0; s < task.steps; scales += kGroupRows, minus_sums++) {
        const int stop = s + task.group_steps < task.steps ? s + task.group_steps : task.steps;
        Sums sums[C][H][T];
#pragma GCC unroll 12
        for (int t = 0; t < T; t++)
#pragma GCC unroll 2
            for (int h = 0; h < H; h++) {
                sums[0][h][t] = set_sums(minus_sums[t * task.sums_stride]);
                if constexpr (C > 1) sums[1][h][t] = no_sums();
            }
        for (; s < stop; s++, w += kStepBytes, codes += 16 * stride) {
            Bytes fields[H][4];
#pragma GCC unroll 2
            for (int h = 0; h < H; h++) {
                __builtin_prefetch(w + 4096 + 64 * h, 0, 2);
                split_fields<(C > 1)>(w + 64 * h, fields[h]);
            }
#pragma GCC unroll 4
            for (int p = 0; p < 4; p++)
#pragma GCC unroll 12
                for (int t = 0; t < T; t++)
#pragma GCC unroll 2
                    for (int h = 0; h < H; h++)
                        sums[p % C][h][t] = dot(sums[p % C][h][t], fields[h][p], codes + 4 * (p * stride + t));
        }
#pragma GCC unroll 2
        for (int h = 0; h < H; h++) {
            __builtin_prefetch(scales + 16 * h + 8 * kGroupRows, 0, 2);
            const Lanes scale = load(scales + 16 * h);
#pragma GCC unroll 12
            for (int t = 0; t < T; t++) {
                Sums sum = sums[0][h][t];
                if constexpr (C > 1) sum = add_sums(sum, quarter_sums(sums[1][h][t]));
                totals[h][t] = fma(to_lanes(sum), scale, totals[h][t]);
            }
        }
    }
#pragma GCC unroll 2
    for (int h = 0; h < H; h++)
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) store(task.totals + (first + t) * kGroupRows + 16 * (half + h), totals[h][t]);
}

// T = tokens, 1 to kTileSums.
template <int T>
void group_part(const GroupTask& task, int first, int tokens) {
    if constexpr (T > 1)
        if (tokens < T) return group_part<T - 1>(task, first, tokens);
    constexpr int H = 2 * T <= kTileSums ? 2 : 1, C = 2 * H * T <= kTileSums ? 2 : 1;
    for (int half = 0; half < 2; half += H) group_rows<T, H, C>(task, half, first);
}

void group_tile(const GroupTask& task) {
    const int parts = (task.tokens + kTileSums - 1) / kTileSums;
    for (int i = 0; i < parts; i++) {
        const int first = task.tokens * i / parts, last = task.tokens * (i + 1) / parts;
        group_part<kTileSums>(task, first, last - first);
    }
}

void group_add(const int32_t* acc, int tokens, const float* scales, const int32_t* minus_sums, int64_t sums_stride,
               float* totals) {
    const Lanes scale[2] = {load(scales), load(scales + 16)};
    for (int t = 0; t < tokens; t++, acc += kGroupRows, totals += kGroupRows, minus_sums += sums_stride) {
        const Sums minus = set_sums(*minus_sums);
        for (int h = 0; h < 2; h++) {
            const Lanes sums = to_lanes(add_sums(load_sums(acc + 16 * h), minus));
            store(totals + 16 * h, fma(sums, scale[h], load(totals + 16 * h)));
        }
    }
}

void group_store(const float* totals, int tokens, int rows, const float* inverse_scale, float* out, int64_t out_stride,
                 const float* residual, int64_t residual_stride) {
    for (int i = 0; i < tokens; i++, totals += kGroupRows, out += out_stride) {
        const float by = inverse_scale[i];
        if (residual)
            for (int r = 0; r < rows; r++) out[r] = residual[i * residual_stride + r] + totals[r] * by;
        else
            for (int r = 0; r < rows; r++) out[r] = totals[r] * by;
    }
}

void group_sums(const int8_t* codes, int lane_stride, int steps, int group_steps, int32_t* minus_sums) {
    const Bytes ones = set_bytes(1);
    for (int s = 0; s < steps;) {
        const int stop = s + group_steps < steps ? s + group_steps : steps;
        Sums sum = no_sums();
        for (; s < stop; s++)
            for (int p = 0; p < 4; p++, codes += 4 * lane_stride) sum = dot(sum, ones, codes);
        int32_t lanes[16];  // all of them are the sum
        store_sums(lanes, sum);
        *minus_sums++ = -lanes[0];
    }
}

}  // namespace
