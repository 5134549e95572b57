// Dense products of many tokens on AVX2 and AVX-512: weights become float32 once for a block of tokens.
//
// The chains of fused multiply-adds are those of dense_tile. Here a tile takes as many of the sixteen lanes at a time
// as a register has, eight with AVX2, so that all its sums stay in registers, with fewer loads for each multiply-add
// and without conversions. Some columns of a few rows stay in the first cache, while sums under way wait in the second.
#pragma once
#include "verbs_products.h"

namespace {

#ifdef __AVX512F__
using Register = __m512;
constexpr int kTileTokens = 6;
BITNET_INLINE Register load_register(const float* p) { return _mm512_loadu_ps(p); }
BITNET_INLINE void store_register(float* p, Register x) { _mm512_storeu_ps(p, x); }
BITNET_INLINE Register fma_register(Register x, Register y, Register z) { return _mm512_fmadd_ps(x, y, z); }
#else
using Register = __m256;
constexpr int kTileTokens = 3;
BITNET_INLINE Register load_register(const float* p) { return _mm256_loadu_ps(p); }
BITNET_INLINE void store_register(float* p, Register x) { _mm256_storeu_ps(p, x); }
BITNET_INLINE Register fma_register(Register x, Register y, Register z) { return _mm256_fmadd_ps(x, y, z); }
#endif
constexpr int kRegisterLanes = sizeof(Register) / sizeof(float);

constexpr int kWideTokens = 16;  // fewer are as fast in dense_tile
constexpr int kWideRows = 8, kWideColumns = 512, kBlockWide = 96;
constexpr int kTileRows = 4;

// sums[token][kWideRows][16] of R rows and T tokens. Of w there are zeros up to the next multiple of 16 columns.
template <int R, int T>
BITNET_APART void wide_tile(const float* w, const float* x, int64_t x_stride, int columns, float* sums, bool more) {
    const int tail = columns % 16, whole = columns - tail;
    alignas(64) float tails[T][16];
    for (int i = 0; tail && i < T; i++) store(tails[i], load_first(x + i * x_stride + whole, tail));
    for (int lane = 0; lane < 16; lane += kRegisterLanes) {
        Register chains[R][T];
        const auto multiply = [&](const float* ws, const float* xs, int64_t stride) __attribute__((always_inline)) {
            Register wide[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) wide[r] = load_register(ws + r * kWideColumns);
#pragma GCC unroll 6
            for (int i = 0; i < T; i++) {
                const Register v = load_register(xs + i * stride);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) chains[r][i] = fma_register(wide[r], v, chains[r][i]);
            }
        };
#pragma GCC unroll 6
        for (int i = 0; i < T; i++)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                chains[r][i] = more ? load_register(sums + 16 * (i * kWideRows + r) + lane) : Register{};
        for (int k = lane; k < whole; k += 16) multiply(w + k, x + k, x_stride);
        if (tail) multiply(w + whole + lane, tails[0] + lane, 16);
#pragma GCC unroll 6
        for (int i = 0; i < T; i++)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) store_register(sums + 16 * (i * kWideRows + r) + lane, chains[r][i]);
    }
}

template <Dtype D>
void widen(const DenseTask& t, int64_t first_row, int rows, int begin, int columns, float* to) {
    constexpr int item = D == Dtype::f32 ? 4 : 2;
    for (int r = 0; r < rows; r++, to += kWideColumns) {
        const uint8_t* w = (const uint8_t*)t.weight + ((first_row + r) * t.columns + begin) * item;
        int k = 0;
        for (; k + 16 <= columns; k += 16) {
            __builtin_prefetch(w + (kWideColumns + k) * item, 0, 2);
            store(to + k, load_weight<D>(w, k));
        }
        if (k < columns) store(to + k, load_weight_tail<D>(w, k, columns - k));
    }
}

template <Dtype D>
void wide_block(const DenseTask& t, int64_t first_row, int rows, int first_token, int tokens) {
    alignas(64) float wide[kWideRows * kWideColumns], sums[kBlockWide * kWideRows * 16];
    const float* x = t.x + first_token * t.x_stride;
    for (int begin = 0; begin < t.columns; begin += kWideColumns) {
        const int columns = std::min(kWideColumns, t.columns - begin);
        widen<D>(t, first_row, rows, begin, columns, wide);
        for (int i = 0; i < tokens; i += kTileTokens)
            with_count<kTileTokens>(tokens - i, [&](auto n) {
                for (int r = 0; r < rows; r += kTileRows)
                    with_count<kTileRows>(rows - r, [&](auto m) {
                        wide_tile<m.value, n.value>(wide + r * kWideColumns, x + i * t.x_stride + begin, t.x_stride,
                                                    columns, sums + 16 * (i * kWideRows + r), begin);
                    });
            });
    }
    for (int i = 0; i < tokens; i++) {
        float y[kWideRows];
        for (int r = 0; r < rows; r++) y[r] = reduce_add(load(sums + 16 * (i * kWideRows + r)));
        store_products(t, first_token + i, first_row, y, rows);
    }
}

template <Dtype D>
void wide_of(const DenseTask& t) {
    for (int64_t r = 0; r < t.rows; r += kWideRows)
        for (int i = 0; i < t.tokens; i += kBlockWide)
            wide_block<D>(t, r, int(std::min<int64_t>(kWideRows, t.rows - r)), i, std::min(kBlockWide, t.tokens - i));
}

// Kernels::dense
void wide_dense(const DenseTask& t) {
    if (t.tokens < kWideTokens) return dense(t);
    if (t.dtype == Dtype::f32) return wide_of<Dtype::f32>(t);
    if (t.dtype == Dtype::f16) return wide_of<Dtype::f16>(t);
    wide_of<Dtype::bf16>(t);
}

}  // namespace
