// 16 float lanes in one AVX-512 register; lanes_generic.h says what each operation means.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace {

struct Lanes {
    __m512 v;
};
constexpr int kLaneSums = 16;

BITNET_INLINE Lanes set1(float x) { return {_mm512_set1_ps(x)}; }
BITNET_INLINE Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
BITNET_INLINE Lanes load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
BITNET_INLINE Lanes load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
BITNET_INLINE Lanes load_even_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
BITNET_INLINE Lanes load_odd_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))))};
}
BITNET_INLINE Lanes load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
BITNET_INLINE void store(float* p, const Lanes& x) { _mm512_storeu_ps(p, x.v); }
BITNET_INLINE Lanes add(const Lanes& x, const Lanes& y) { return {_mm512_add_ps(x.v, y.v)}; }
BITNET_INLINE Lanes sub(const Lanes& x, const Lanes& y) { return {_mm512_sub_ps(x.v, y.v)}; }
BITNET_INLINE Lanes mul(const Lanes& x, const Lanes& y) { return {_mm512_mul_ps(x.v, y.v)}; }
BITNET_INLINE Lanes div(const Lanes& x, const Lanes& y) { return {_mm512_div_ps(x.v, y.v)}; }
BITNET_INLINE Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
BITNET_INLINE Lanes max(const Lanes& x, const Lanes& y) { return {_mm512_max_ps(x.v, y.v)}; }
BITNET_INLINE Lanes min(const Lanes& x, const Lanes& y) { return {_mm512_min_ps(x.v, y.v)}; }
BITNET_INLINE Lanes abs(const Lanes& x) { return {_mm512_abs_ps(x.v)}; }
BITNET_INLINE Lanes first(int n, const Lanes& x, const Lanes& y) {
    return {_mm512_mask_blend_ps(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1, y.v, x.v)};
}
BITNET_INLINE Lanes below(const Lanes& test, const Lanes& bound, const Lanes& x, const Lanes& y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(test.v, bound.v, _CMP_LT_OQ), x.v, y.v)};
}
BITNET_INLINE bool any_below(const Lanes& x, const Lanes& y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ) != 0; }
BITNET_INLINE Lanes round(const Lanes& x) {
    return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
BITNET_INLINE Lanes scaled(const Lanes& x, const Lanes& n) { return {_mm512_scalef_ps(x.v, n.v)}; }
BITNET_INLINE void store_int8(int8_t* p, const Lanes& x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
BITNET_INLINE __m256 upper(__m512 x) {
    return _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(x), 1));
}
BITNET_INLINE float reduce_add(const Lanes& x) {
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x.v), upper(x.v));
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
// reduce_add of 4 x 4 in 15 additions, not 64: two vectors share one as soon as half of it is enough for each.
BITNET_INLINE Lanes reduce_add_each(const Lanes (&x)[4][4]) {
    const auto halves = [](__m512 a, __m512 b) __attribute__((always_inline)) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    __m512 quarters[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        const __m512 first = halves(x[r][0].v, x[r][1].v), second = halves(x[r][2].v, x[r][3].v);
        quarters[r] =
            _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd));
    }
    const auto pairs = [](__m512 a, __m512 b) __attribute__((always_inline)) {
        const __m512d u = _mm512_castps_pd(a), v = _mm512_castps_pd(b);
        return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(u, v)), _mm512_castpd_ps(_mm512_unpackhi_pd(u, v)));
    };
    const __m512 first = pairs(quarters[0], quarters[1]), second = pairs(quarters[2], quarters[3]);
    return {_mm512_add_ps(_mm512_shuffle_ps(first, second, 0x88), _mm512_shuffle_ps(first, second, 0xdd))};
}
BITNET_INLINE float reduce_max(const Lanes& x) {
    __m256 s = _mm256_max_ps(_mm512_castps512_ps256(x.v), upper(x.v));
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}

struct Bytes {
    __m512i v;
};
using Sums = Bytes;
constexpr int kTileSums = 12, kHeadVectors = 16;
constexpr bool kWholeBytes = true;

BITNET_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
BITNET_INLINE Bytes masked(const Bytes& x, uint8_t mask) {
    return {_mm512_and_si512(x.v, _mm512_set1_epi8(char(mask)))};
}
BITNET_INLINE Bytes mask_or(const Bytes& x, uint8_t mask, const Bytes& y) {
    return {_mm512_ternarylogic_epi32(x.v, _mm512_set1_epi8(char(mask)), y.v, 0xea)};
}
BITNET_INLINE Bytes choose_bits(const Bytes& x, uint8_t mask, const Bytes& y) {
    return {_mm512_ternarylogic_epi32(x.v, _mm512_set1_epi8(char(mask)), y.v, 0xe2)};
}
template <int N>
BITNET_INLINE Bytes shift_left(const Bytes& x) {
    return {_mm512_slli_epi16(x.v, N)};
}
template <int N>
BITNET_INLINE Bytes shift_right(const Bytes& x) {
    return {_mm512_srli_epi16(x.v, N)};
}
BITNET_INLINE Bytes no_bytes() { return {_mm512_setzero_si512()}; }
BITNET_INLINE Bytes set_bytes(uint8_t x) { return {_mm512_set1_epi8(char(x))}; }
BITNET_INLINE Sums no_sums() { return no_bytes(); }
BITNET_INLINE Sums set_sums(int32_t x) { return {_mm512_set1_epi32(x)}; }
BITNET_INLINE Sums load_sums(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
BITNET_INLINE Sums add_sums(const Sums& x, const Sums& y) { return {_mm512_add_epi32(x.v, y.v)}; }
BITNET_INLINE Sums scale_sums(const Sums& x, int shift, int32_t minus) {
    return {_mm512_sub_epi32(_mm512_sll_epi32(x.v, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(minus))};
}
BITNET_INLINE Lanes code_weights(uint32_t word, float scale) {
    const __m512i shifts = _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30);
    const __m512 signs = _mm512_broadcast_f32x4(_mm_setr_ps(-1, 0, 1, 2));  // by the low 4 bits of what is shifted
    const __m512 weights = _mm512_mul_ps(signs, _mm512_set1_ps(scale));
    return {_mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi32(int(word)), shifts), weights)};
}
BITNET_INLINE Sums quarter_sums(const Sums& x) { return {_mm512_srai_epi32(x.v, 2)}; }
BITNET_INLINE Lanes to_lanes(const Sums& sums) { return {_mm512_cvtepi32_ps(sums.v)}; }
// _mm512_dpbusd_epi32, which gcc 12 surrounds with copies of the sums.
BITNET_INLINE Sums dot(Sums sums, const Bytes& x, const int8_t* codes) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums.v) : "v"(x.v), "m"(*(const int32_t*)codes));
    return sums;
}
BITNET_INLINE void store_sums(int32_t* p, const Sums& sums) { _mm512_storeu_si512(p, sums.v); }

}  // namespace
