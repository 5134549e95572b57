// 16 float lanes in two AVX2 registers; lanes_generic.h says what each operation means.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace {

struct Lanes {
    __m256 a, b;
};
constexpr int kLaneSums = 4;

BITNET_INLINE Lanes set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
BITNET_INLINE Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
BITNET_INLINE __m256 widen_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
BITNET_INLINE Lanes load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
BITNET_INLINE Lanes load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
BITNET_INLINE Lanes load_even_bf16(const uint16_t* p) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)p), y = _mm256_loadu_si256((const __m256i*)(p + 16));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))};
}
BITNET_INLINE Lanes load_odd_bf16(const uint16_t* p) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)p), y = _mm256_loadu_si256((const __m256i*)(p + 16));
    const __m256i mask = _mm256_set1_epi32(int(0xffff0000));
    return {_mm256_castsi256_ps(_mm256_and_si256(x, mask)), _mm256_castsi256_ps(_mm256_and_si256(y, mask))};
}
BITNET_INLINE __m256 widen_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
BITNET_INLINE Lanes load_i8(const int8_t* p) { return {widen_i8(p), widen_i8(p + 8)}; }
BITNET_INLINE void store(float* p, const Lanes& x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
BITNET_INLINE Lanes add(const Lanes& x, const Lanes& y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
BITNET_INLINE Lanes sub(const Lanes& x, const Lanes& y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
BITNET_INLINE Lanes mul(const Lanes& x, const Lanes& y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
BITNET_INLINE Lanes div(const Lanes& x, const Lanes& y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
BITNET_INLINE Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
BITNET_INLINE Lanes max(const Lanes& x, const Lanes& y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
BITNET_INLINE Lanes min(const Lanes& x, const Lanes& y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
BITNET_INLINE Lanes abs(const Lanes& x) {
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
BITNET_INLINE __m256 lanes_before(int n) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
}
BITNET_INLINE Lanes first(int n, const Lanes& x, const Lanes& y) {
    return {_mm256_blendv_ps(y.a, x.a, lanes_before(n)), _mm256_blendv_ps(y.b, x.b, lanes_before(n - 8))};
}
BITNET_INLINE Lanes below(const Lanes& test, const Lanes& bound, const Lanes& x, const Lanes& y) {
    return {_mm256_blendv_ps(x.a, y.a, _mm256_cmp_ps(test.a, bound.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(x.b, y.b, _mm256_cmp_ps(test.b, bound.b, _CMP_LT_OQ))};
}
BITNET_INLINE bool any_below(const Lanes& x, const Lanes& y) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)));
}
BITNET_INLINE Lanes round(const Lanes& x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
BITNET_INLINE __m256 power_of_two(__m256 n) {
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
BITNET_INLINE Lanes scaled(const Lanes& x, const Lanes& n) { return mul(x, {power_of_two(n.a), power_of_two(n.b)}); }
BITNET_INLINE void store_int8(int8_t* p, const Lanes& x) {
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    words = _mm256_permute4x64_epi64(words, 0xd8);  // packs works within 128-bit halves
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i*)p, bytes);
}
BITNET_INLINE float reduce_add(const Lanes& x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
BITNET_INLINE float reduce_max(const Lanes& x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}

struct Bytes {
    __m256i a, b;
};
using Sums = Bytes;
constexpr int kTileSums = 4, kHeadVectors = 8;

BITNET_INLINE Bytes load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
BITNET_INLINE Bytes masked(const Bytes& x, uint8_t mask) {
    const __m256i m = _mm256_set1_epi8(char(mask));
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
BITNET_INLINE Bytes mask_or(const Bytes& x, uint8_t mask, const Bytes& y) {
    __m256i m = _mm256_set1_epi8(char(mask));
    return {_mm256_or_si256(_mm256_and_si256(x.a, m), y.a), _mm256_or_si256(_mm256_and_si256(x.b, m), y.b)};
}
BITNET_INLINE Bytes choose_bits(const Bytes& x, uint8_t mask, const Bytes& y) {
    const __m256i m = _mm256_set1_epi8(char(mask));
    return mask_or(x, mask, {_mm256_andnot_si256(m, y.a), _mm256_andnot_si256(m, y.b)});
}
template <int N>
BITNET_INLINE Bytes shift_left(const Bytes& x) {
    return {_mm256_slli_epi16(x.a, N), _mm256_slli_epi16(x.b, N)};
}
template <int N>
BITNET_INLINE Bytes shift_right(const Bytes& x) {
    return {_mm256_srli_epi16(x.a, N), _mm256_srli_epi16(x.b, N)};
}
BITNET_INLINE Bytes no_bytes() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
BITNET_INLINE Bytes set_bytes(uint8_t x) { return {_mm256_set1_epi8(char(x)), _mm256_set1_epi8(char(x))}; }
BITNET_INLINE Sums no_sums() { return no_bytes(); }
BITNET_INLINE Sums set_sums(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
BITNET_INLINE Sums load_sums(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
BITNET_INLINE Sums add_sums(const Sums& x, const Sums& y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
BITNET_INLINE Sums scale_sums(const Sums& x, int shift, int32_t minus) {
    const __m128i count = _mm_cvtsi32_si128(shift);
    const __m256i less = _mm256_set1_epi32(minus);
    return {_mm256_sub_epi32(_mm256_sll_epi32(x.a, count), less), _mm256_sub_epi32(_mm256_sll_epi32(x.b, count), less)};
}
BITNET_INLINE Lanes code_weights(uint32_t word, float scale) {
    const __m256i x = _mm256_srlv_epi32(_mm256_set1_epi32(int(word)), _mm256_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26));
    const __m256 signs = _mm256_setr_ps(-1, 0, 1, 2, -1, 0, 1, 2);  // by the low 3 bits of what is shifted
    const __m256 weights = _mm256_mul_ps(signs, _mm256_set1_ps(scale));
    return {_mm256_permutevar8x32_ps(weights, x), _mm256_permutevar8x32_ps(weights, _mm256_srli_epi32(x, 4))};
}
BITNET_INLINE Sums quarter_sums(const Sums& x) { return {_mm256_srai_epi32(x.a, 2), _mm256_srai_epi32(x.b, 2)}; }
BITNET_INLINE Lanes to_lanes(const Sums& sums) { return {_mm256_cvtepi32_ps(sums.a), _mm256_cvtepi32_ps(sums.b)}; }
#ifdef __AVXVNNI__
constexpr bool kWholeBytes = true;
#else
constexpr bool kWholeBytes = false;
#endif
BITNET_INLINE __m256i dot_half(__m256i sums, __m256i x, __m256i codes) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sums, x, codes);
#else  // 2 * 63 * 127 fits into int16
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(x, codes), _mm256_set1_epi16(1)));
#endif
}
BITNET_INLINE Sums dot(const Sums& sums, const Bytes& x, const int8_t* codes) {
    int32_t four;
    __builtin_memcpy(&four, codes, 4);
    __m256i c = _mm256_set1_epi32(four);
    return {dot_half(sums.a, x.a, c), dot_half(sums.b, x.b, c)};
}
BITNET_INLINE void store_sums(int32_t* p, const Sums& sums) {
    _mm256_storeu_si256((__m256i*)p, sums.a);
    _mm256_storeu_si256((__m256i*)(p + 8), sums.b);
}

}  // namespace
