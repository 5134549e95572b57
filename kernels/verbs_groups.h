// Ternary products whose scales change every few columns.
#pragma once
#include "fetch.h"
#include "verbs_rows.h"

namespace {

using namespace bitnet;

// The fields of 16 rows for C chains of sums. In place, fields are 4, 16 and 64 times as large as their codes, and
// there are fewer shifts: with two chains fields 1 and 3 are 4 times as large, with four each has a chain of its own. M
// is the mask of a code: of those of one bit its high bit alone.
template <int C, int M>
BITNET_INLINE void split_fields(const Bytes& x, Bytes* fields) {
    fields[0] = masked(x, M);
    if constexpr (C == 4) {
        for (int p = 1; p < 4; p++) fields[p] = masked(x, uint8_t(M << 2 * p));
        return;
    }
    const Bytes y = shift_right<4>(x);
    fields[1] = C > 1 ? masked(x, M << 2) : masked(shift_right<2>(x), M);
    fields[2] = masked(y, M);
    fields[3] = C > 1 ? masked(y, M << 2) : masked(shift_right<6>(x), M);
}

BITNET_INLINE const uint8_t* scales_at(const ScaleLines& scales, int64_t index) {
    return scales.data + index * (scales.is_half ? 2 : 4);
}

BITNET_INLINE Lanes load_scales(const ScaleLines& scales, int64_t index) {
    const uint8_t* p = scales_at(scales, index);
    return scales.is_half ? load_f16((const uint16_t*)p) : load((const float*)p);
}

// The chains together, each in turn a quarter of the next.
template <int C>
BITNET_INLINE Sums joined(const Sums* chains) {
    Sums sum = chains[C - 1];
#pragma GCC unroll 3
    for (int c = C - 1; c > 0; c--) sum = add_sums(chains[c - 1], quarter_sums(sum));
    return sum;
}

// T tokens from `first` on and H times 16 rows from row 16 * half on, S steps a line. Several chains of sums hide the
// latency of a product.
template <int T, int H, int C, int S>
void group_rows(const GroupTask& task, int half, int first) {
    const uint8_t* w = task.weights + 64 * half;
    const int8_t* codes = task.codes + 4 * first;
    const int32_t* minus_sums = task.minus_sums + first * task.sums_stride;
    // Where all tokens fit into one part the compiler knows how far apart their codes are.
    const int64_t stride = kTileSums < kMaxTileTokens ? task.tokens : T;
    Lanes totals[H][T];
#pragma GCC unroll 2
    for (int h = 0; h < H; h++)
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) totals[h][t] = set1(0.0f);
    int64_t at = 16 * half;  // of the scales
    for (int s = 0; s < task.steps; at += kGroupRows, minus_sums++) {
        const int stop = s + task.group_steps < task.steps ? s + task.group_steps : task.steps;
        Sums sums[C][H][T];
#pragma GCC unroll 12
        for (int t = 0; t < T; t++)
#pragma GCC unroll 2
            for (int h = 0; h < H; h++) {
                sums[0][h][t] = set_sums(minus_sums[t * task.sums_stride]);
#pragma GCC unroll 3
                for (int c = 1; c < C; c++) sums[c][h][t] = no_sums();
            }
        for (; s < stop; s += S, w += kStepBytes) {
            Bytes lines[H];
#pragma GCC unroll 2
            for (int h = 0; h < H; h++) {
                fetch_ahead(w + 64 * h);
                lines[h] = load_bytes(w + 64 * h);
            }
#pragma GCC unroll 2
            for (int k = 0; k < S; k++, codes += 16 * stride) {
                Bytes fields[H][4];
#pragma GCC unroll 2
                for (int h = 0; h < H; h++)
                    split_fields<C, (S == 2 ? 2 : 3)>(k ? shift_left<1>(lines[h]) : lines[h], fields[h]);
#pragma GCC unroll 4
                for (int p = 0; p < 4; p++)
#pragma GCC unroll 12
                    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
                        for (int h = 0; h < H; h++)
                            sums[p % C][h][t] = dot(sums[p % C][h][t], fields[h][p], codes + 4 * (p * stride + t));
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < H; h++) {
            __builtin_prefetch(scales_at(task.scales, at + 16 * h + 8 * kGroupRows), 0, 2);
            const Lanes scale = load_scales(task.scales, at + 16 * h);
#pragma GCC unroll 12
            for (int t = 0; t < T; t++) {
                Sums chains[C];
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) chains[c] = sums[c][h][t];
                totals[h][t] = fma(to_lanes(joined<C>(chains)), scale, totals[h][t]);
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
    constexpr int H = 2 * T <= kTileSums ? 2 : 1, sums = H * T;
    constexpr int C = kWholeBytes && 4 * sums <= kTileSums ? 4 : 2 * sums <= kTileSums ? 2 : 1;
    for (int half = 0; half < 2; half += H)
        (task.one_bit ? group_rows<T, H, C, 2> : group_rows<T, H, C, 1>)(task, half, first);
}

void group_tile(const GroupTask& task) {
    const int parts = (task.tokens + kTileSums - 1) / kTileSums;
    for (int i = 0; i < parts; i++) {
        const int first = task.tokens * i / parts, last = task.tokens * (i + 1) / parts;
        group_part<kTileSums>(task, first, last - first);
    }
}

// S steps a line.
template <int S>
void group_row_of(const GroupRowTask t) {  // a copy: what is stored might else be the task
    const int steps = (t.columns + kStepColumns - 1) / kStepColumns;
    const uint8_t* w = t.weights + 4 * t.row;
    int64_t at = t.row / 16 * 16;
    for (int step = 0; step < steps; at += kGroupRows) {
        float scales[16];
        store(scales, load_scales(t.scales, at));
        const float scale = scales[t.row % 16];
        const int stop = step + t.group_steps < steps ? step + t.group_steps : steps;
        for (; step < stop; step += S, w += kStepBytes) {
            uint32_t word;
            std::memcpy(&word, w, 4);
#pragma GCC unroll 2
            for (int i = 0; i < S; i++) {
                const int k = (step + i) * kStepColumns;
                const uint32_t high_bits = (i ? word << 1 : word) & 0xaaaaaaaa;  // see kernels.h
                store_first(t.out + k, t.columns - k, code_weights(S == 2 ? high_bits : word, scale));
            }
        }
    }
}

void group_row(const GroupRowTask& task) { (task.one_bit ? group_row_of<2> : group_row_of<1>)(task); }

void group_add(const int32_t* acc, int tokens, const ScaleLines& scales, const int32_t* minus_sums, int64_t sums_stride,
               float* totals) {
    const Lanes scale[2] = {load_scales(scales, 0), load_scales(scales, 16)};
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
