// AVX-VNNI: the AVX-512 kernel in 256-bit halves; a step of 32 rows is four registers of 8 rows.
#include "lanes_avx2.h"
#include "tile_parts.h"
#include "verbs.h"
#include "wide_products.h"

namespace {

inline __m256i broadcast(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return _mm256_set1_epi32(four);
}

// Q of the four registers of a step, starting with register `first`, for T tokens that stand among `stride`.
template <int T, int Q>
inline void tile_part(const uint8_t* w, const int8_t* a, int steps, int stride, int first, int32_t* acc) {
    __m256i sums[Q][T];
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[q][t] = _mm256_setzero_si256();
    const __m256i mask = _mm256_set1_epi8(3);
    w += 32 * first;
    for (int s = 0; s < steps; s++, w += kStepBytes, a += 16 * stride) {
        fetch_ahead(w);
        if (Q > 2) fetch_ahead(w + 64);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            __m256i field[Q];
#pragma GCC unroll 4
            for (int q = 0; q < Q; q++) {
                const __m256i x = _mm256_loadu_si256((const __m256i*)(w + 32 * q));
                field[q] = _mm256_and_si256(p ? _mm256_srli_epi16(x, 2 * p) : x, mask);
            }
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const __m256i b = broadcast(a + 4 * (p * stride + t));
#pragma GCC unroll 4
                for (int q = 0; q < Q; q++) sums[q][t] = _mm256_dpbusd_avx_epi32(sums[q][t], field[q], b);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) _mm256_storeu_si256((__m256i*)(acc + t * kGroupRows + 8 * (first + q)), sums[q][t]);
}

// 16 registers: all four quarters for one or two tokens, then two at a time. At least 10 sums under way hide
// the latency of a product.
struct TokenTile {
    template <int T>
    static void run(const uint8_t* w, const int8_t* a, int steps, int stride, int32_t* acc) {
        constexpr int Q = T <= 2 ? 4 : 2;
        for (int first = 0; first < 4; first += Q) tile_part<T, Q>(w, a, steps, stride, first, acc);
    }
};

int64_t int8_peak(int64_t iterations) {
    __m256i sums[12];
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    __m256i w = _mm256_set1_epi8(1), a = _mm256_set1_epi8(3);
    for (int64_t i = 0; i < iterations; i++)
#pragma GCC unroll 12
        for (__m256i& sum : sums) sum = _mm256_dpbusd_avx_epi32(sum, w, a);
    for (__m256i& sum : sums) asm volatile("" : : "x"(sum));
    return iterations * 12 * 32;
}

}  // namespace

const bitnet::Kernels* bitnet::avxvnni_kernels() {
    static constexpr Kernels kernels = [] {
        Kernels own = make_kernels("avxvnni", tile_in_parts<TokenTile, 6>, int8_peak);
        own.dense = wide_dense;
        return own;
    }();
    return &kernels;
}
