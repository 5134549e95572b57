// Products: dense rows, and what is done to the sums of the ternary ones.
#pragma once
#include <algorithm>

#include "tile_parts.h"
#include "verbs_rows.h"

namespace {

using namespace bitnet;

template <Dtype D>
BITNET_INLINE Lanes load_weight(const void* row, int64_t k) {
    if constexpr (D == Dtype::f32) return load((const float*)row + k);
    if constexpr (D == Dtype::f16) return load_f16((const uint16_t*)row + k);
    if constexpr (D == Dtype::i8) return load_i8((const int8_t*)row + k);
    return load_bf16((const uint16_t*)row + k);
}

template <Dtype D>
BITNET_INLINE Lanes load_weight_tail(const void* row, int64_t k, int n) {
    constexpr int item = D == Dtype::f32 ? 4 : D == Dtype::i8 ? 1 : 2;
    alignas(64) uint8_t tail[64] = {};
    std::memcpy(tail, (const uint8_t*)row + k * item, size_t(n) * item);
    return load_weight<D>(tail, 0);
}

// Products of a token with neighbouring rows go where the task wants them.
BITNET_INLINE void store_products(const DenseTask& t, int token, int64_t first_row, const float* y, int rows) {
    float* out = t.out + token * t.out_stride + first_row;
    const float* residual = t.residual ? t.residual + token * t.residual_stride + first_row : nullptr;
    for (int r = 0; r < rows; r++) out[r] = residual ? residual[r] + y[r] : y[r];
}

// R rows times T tokens; one chain of fused multiply-adds for each of them, so tiling does not change a bit. `row`
// tells where the rows are, and where those that are fetched meanwhile.
template <Dtype D, int R, int T, class Row>
BITNET_INLINE void dense_tile(const DenseTask& t, int64_t first_row, int first_token, const Row& row) {
    constexpr int item = D == Dtype::f32 ? 4 : 2;
    const float* x = t.x + first_token * t.x_stride;
    Lanes sums[R][T];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) sums[r][i] = set1(0.0f);
    int k = 0;
    for (; k + 16 <= t.columns; k += 16) {
        Lanes xs[T];
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) xs[i] = load(x + i * t.x_stride + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            fetch(row(R + r) + k * item);
            Lanes v = load_weight<D>(row(r), k);
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) sums[r][i] = fma(v, xs[i], sums[r][i]);
        }
    }
    if (const int n = t.columns - k; n > 0) {
        Lanes xs[T];
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) xs[i] = load_first(x + i * t.x_stride + k, n);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Lanes v = load_weight_tail<D>(row(r), k, n);
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) sums[r][i] = fma(v, xs[i], sums[r][i]);
        }
    }
    alignas(64) float y[T * R];
    if constexpr (R == 4 && T == 4)
        store(y, reduce_add_each(sums));
    else
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) y[i * R + r] = reduce_add(sums[r][i]);
#pragma GCC unroll 8
    for (int i = 0; i < T; i++) store_products(t, first_token + i, first_row, y + i * R, R);
}

template <Dtype D, int R, int T>
void dense_rows(const DenseTask& t, int64_t first_row, int first_token) {
    const int64_t row_bytes = int64_t(t.columns) * (D == Dtype::f32 ? 4 : 2);
    const uint8_t* w = (const uint8_t*)t.weight + first_row * row_bytes;
    dense_tile<D, R, T>(t, first_row, first_token, [&](int r) { return w + r * row_bytes; });
}

template <Dtype D, int T>
void dense_tokens(const DenseTask& t, int first_token) {
    constexpr int R = kLaneSums >= 16 ? (T == 1 ? 8 : 4) : T == 1 ? 4 : 3;
    for (int64_t r = 0; r < t.rows; r += R)
        with_count<R>(int(std::min<int64_t>(R, t.rows - r)),
                      [&](auto n) { dense_rows<D, n.value, T>(t, r, first_token); });
}

// Rows here and there: in those that come next, the processor sees a stream each, of which it runs ahead.
template <Dtype D>
void dense_gathered(const DenseTask& t) {
    constexpr int most = 4;
    const int64_t row_bytes = int64_t(t.columns) * (D == Dtype::f32 ? 4 : 2);
    for (int64_t first = 0; first < t.rows; first += most)
        with_count<most>(int(std::min<int64_t>(most, t.rows - first)), [&](auto n) {
            const uint8_t* rows[2 * n.value];
            for (int r = 0; r < 2 * n.value; r++)
                rows[r] = (const uint8_t*)t.weight + t.row_ids[std::min(first + r, t.rows - 1)] * row_bytes;
            dense_tile<D, n.value, 1>(t, first, 0, [&](int r) { return rows[r]; });
        });
}

template <Dtype D>
void dense_of(const DenseTask& t) {
    constexpr int most = kLaneSums >= 16 ? 4 : 2;
    if (t.row_ids) return dense_gathered<D>(t);
    for (int i = 0; i < t.tokens; i += most)
        with_count<most>(t.tokens - i, [&](auto n) { dense_tokens<D, n.value>(t, i); });
}

void dense(const DenseTask& t) {
    if (t.dtype == Dtype::f32) return dense_of<Dtype::f32>(t);
    if (t.dtype == Dtype::f16) return dense_of<Dtype::f16>(t);
    dense_of<Dtype::bf16>(t);
}

template <Dtype D>
void embed_of(const void* row, int width, float* out) {
    int k = 0;
    for (; k + 16 <= width; k += 16) store(out + k, load_weight<D>(row, k));
    if (k < width) store_first(out + k, width - k, load_weight_tail<D>(row, k, width - k));
}

void embed(const void* row, Dtype dtype, int width, float* out) {
    if (dtype == Dtype::f32) return embed_of<Dtype::f32>(row, width, out);
    if (dtype == Dtype::f16) return embed_of<Dtype::f16>(row, width, out);
    if (dtype == Dtype::i8) return embed_of<Dtype::i8>(row, width, out);  // the codes, without their scale
    embed_of<Dtype::bf16>(row, width, out);
}

void ternary_store(const int32_t* acc, int tokens, int rows, const float* scales, const float* inverse_scale,
                   const int32_t* code_sum, float* out, int64_t out_stride, const float* residual,
                   int64_t residual_stride) {
    for (int i = 0; i < tokens; i++, acc += kGroupRows, out += out_stride) {
        const float inverse = inverse_scale[i];
        const int32_t sum = code_sum[i];
        if (residual)
            for (int r = 0; r < rows; r++)
                out[r] = residual[i * residual_stride + r] + float(acc[r] - sum) * (scales[r] * inverse);
        else
            for (int r = 0; r < rows; r++) out[r] = float(acc[r] - sum) * (scales[r] * inverse);
    }
}

void add_rows(const float* x, const float* y, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i++) out[i] = x[i] + y[i];
}

uint64_t read_memory(const uint8_t* data, int64_t num_bytes) {
    Bytes seen[4];
    for (Bytes& each : seen) each = no_bytes();
    for (const uint8_t* p = data; p < data + num_bytes; p += 256)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __builtin_prefetch(p + 64 * i + 2048, 0, 2);
            seen[i] = mask_or(load_bytes(p + 64 * i), 255, seen[i]);
        }
    const int8_t ones[4] = {1, 1, 1, 1};
    Sums sums = no_sums();
    for (const Bytes& each : seen) sums = dot(sums, masked(each, 63), ones);
    int32_t totals[16];
    store_sums(totals, sums);
    uint64_t total = 0;
    for (const int32_t each : totals) total += uint64_t(each);
    return total;
}

}  // namespace
