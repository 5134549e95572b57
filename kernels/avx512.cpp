// AVX-512 with VNNI: one 32-bit lane is one output row; `vpdpbusd` multiplies four codes by four broadcast activations.
#include "lanes_avx512.h"
#include "verbs.h"

namespace {

inline __m512i broadcast(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return _mm512_set1_epi32(four);
}

// One or two tokens: the fields are masked in place, and their sums shifted once at the end. Exact: |sum| stays below
// 192 * 127 * columns / 4 < 2^31 (kMaxColumns).
template <int T>
void tile_masked(const uint8_t* w, const int8_t* a, int steps, int32_t* acc) {
    __m512i sums[4][2][T];
    for (int p = 0; p < 4; p++)
        for (int h = 0; h < 2; h++)
            for (int t = 0; t < T; t++) sums[p][h][t] = _mm512_setzero_si512();
    const __m512i masks[4] = {_mm512_set1_epi8(3), _mm512_set1_epi8(12), _mm512_set1_epi8(48),
                              _mm512_set1_epi8(char(192))};
    for (int s = 0; s < steps; s++, w += kStepBytes, a += 16 * T) {
        __builtin_prefetch(w + 4096);
        __builtin_prefetch(w + 4096 + 64);
        const __m512i x = _mm512_loadu_si512(w), y = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++)
#pragma GCC unroll 2
            for (int t = 0; t < T; t++) {
                const __m512i b = broadcast(a + 4 * (p * T + t));
                sums[p][0][t] = _mm512_dpbusd_epi32(sums[p][0][t], _mm512_and_si512(x, masks[p]), b);
                sums[p][1][t] = _mm512_dpbusd_epi32(sums[p][1][t], _mm512_and_si512(y, masks[p]), b);
            }
    }
    for (int t = 0; t < T; t++)
        for (int h = 0; h < 2; h++) {
            __m512i low = _mm512_add_epi32(sums[0][h][t], _mm512_srai_epi32(sums[1][h][t], 2));
            __m512i high = _mm512_add_epi32(_mm512_srai_epi32(sums[2][h][t], 4), _mm512_srai_epi32(sums[3][h][t], 6));
            _mm512_storeu_si512(acc + t * kGroupRows + 16 * h, _mm512_add_epi32(low, high));
        }
}

template <int T>
void tile_shifted(const uint8_t* w, const int8_t* a, int steps, int32_t* acc) {
    __m512i sums[2][T];
    for (int h = 0; h < 2; h++)
        for (int t = 0; t < T; t++) sums[h][t] = _mm512_setzero_si512();
    const __m512i mask = _mm512_set1_epi8(3);
    for (int s = 0; s < steps; s++, w += kStepBytes, a += 16 * T) {
        __builtin_prefetch(w + 4096);
        __builtin_prefetch(w + 4096 + 64);
        const __m512i x = _mm512_loadu_si512(w), y = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m512i u = _mm512_and_si512(p ? _mm512_srli_epi16(x, 2 * p) : x, mask);
            const __m512i v = _mm512_and_si512(p ? _mm512_srli_epi16(y, 2 * p) : y, mask);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const __m512i b = broadcast(a + 4 * (p * T + t));
                sums[0][t] = _mm512_dpbusd_epi32(sums[0][t], u, b);
                sums[1][t] = _mm512_dpbusd_epi32(sums[1][t], v, b);
            }
        }
    }
    for (int t = 0; t < T; t++)
        for (int h = 0; h < 2; h++) _mm512_storeu_si512(acc + t * kGroupRows + 16 * h, sums[h][t]);
}

void ternary_tile(const uint8_t* w, const int8_t* a, int steps, int tokens, int32_t* acc) {
    switch (tokens) {
        case 1:
            return tile_masked<1>(w, a, steps, acc);
        case 2:
            return tile_masked<2>(w, a, steps, acc);
        case 3:
            return tile_shifted<3>(w, a, steps, acc);
        case 4:
            return tile_shifted<4>(w, a, steps, acc);
        case 5:
            return tile_shifted<5>(w, a, steps, acc);
        case 6:
            return tile_shifted<6>(w, a, steps, acc);
        case 7:
            return tile_shifted<7>(w, a, steps, acc);
        default:
            return tile_shifted<8>(w, a, steps, acc);
    }
}

int64_t int8_peak(int64_t iterations) {
    __m512i sums[12];
    for (__m512i& sum : sums) sum = _mm512_setzero_si512();
    __m512i w = _mm512_set1_epi8(1), a = _mm512_set1_epi8(3);
    for (int64_t i = 0; i < iterations; i++)
#pragma GCC unroll 12
        for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, w, a);
    for (__m512i& sum : sums) asm volatile("" : : "v"(sum));
    return iterations * 12 * 64;
}

}  // namespace

const bitnet::Kernels* bitnet::avx512_kernels() {
    static constexpr Kernels kernels = make_kernels("avx512", ternary_tile, int8_peak);
    return &kernels;
}
