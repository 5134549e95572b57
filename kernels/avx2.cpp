// AVX2 without VNNI: `vpmaddubsw` multiplies pairs into int16, which is widened before it can overflow.
#include "lanes_avx2.h"
#include "tile_parts.h"
#include "verbs.h"

namespace {

// A product of two codes (0..2) and two activations is at most 4 * 127 = 508 in size: 32 of them fit into int16 twice
// over, so that even the invalid code 3 could not wrap it. A step adds four.
constexpr int kStepsBeforeWidening = 8;

inline __m256i broadcast(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return _mm256_set1_epi32(four);
}

// Q of the four registers of a step, starting with register `first`, for T tokens that stand among `stride`.
template <int T, int Q>
inline void tile_part(const uint8_t* w, const int8_t* a, int steps, int stride, int first, int32_t* acc) {
    const __m256i mask = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
    __m256i sums[Q][T];
    for (int q = 0; q < Q; q++)
        for (int t = 0; t < T; t++) sums[q][t] = _mm256_setzero_si256();
    w += 32 * first;
    for (int s = 0; s < steps;) {
        const int stop = s + kStepsBeforeWidening < steps ? s + kStepsBeforeWidening : steps;
        __m256i narrow[Q][T];
        for (int q = 0; q < Q; q++)
            for (int t = 0; t < T; t++) narrow[q][t] = _mm256_setzero_si256();
        for (; s < stop; s++, w += kStepBytes, a += 16 * stride) {
            fetch_ahead(w);
            if (Q > 2) fetch_ahead(w + 64);
#pragma GCC unroll 4
            for (int p = 0; p < 4; p++) {
                __m256i field[Q];
                for (int q = 0; q < Q; q++) {
                    const __m256i x = _mm256_loadu_si256((const __m256i*)(w + 32 * q));
                    field[q] = _mm256_and_si256(p ? _mm256_srli_epi16(x, 2 * p) : x, mask);
                }
#pragma GCC unroll 4
                for (int t = 0; t < T; t++) {
                    const __m256i b = broadcast(a + 4 * (p * stride + t));
                    for (int q = 0; q < Q; q++)
                        narrow[q][t] = _mm256_add_epi16(narrow[q][t], _mm256_maddubs_epi16(field[q], b));
                }
            }
        }
        for (int q = 0; q < Q; q++)
            for (int t = 0; t < T; t++)
                sums[q][t] = _mm256_add_epi32(sums[q][t], _mm256_madd_epi16(narrow[q][t], ones));
    }
    for (int t = 0; t < T; t++)
        for (int q = 0; q < Q; q++) _mm256_storeu_si256((__m256i*)(acc + t * kGroupRows + 8 * (first + q)), sums[q][t]);
}

struct TokenTile {
    template <int T>
    static void run(const uint8_t* w, const int8_t* a, int steps, int stride, int32_t* acc) {
        constexpr int Q = T == 1 ? 4 : T == 2 ? 2 : 1;
        for (int first = 0; first < 4; first += Q) tile_part<T, Q>(w, a, steps, stride, first, acc);
    }
};

int64_t int8_peak(int64_t iterations) {
    __m256i sums[12];
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    __m256i w = _mm256_set1_epi8(1), a = _mm256_set1_epi8(3);
    for (int64_t i = 0; i < iterations; i++) {
        asm volatile("" : "+x"(w));  // or the product would be taken out of the loop
#pragma GCC unroll 12
        for (__m256i& sum : sums) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, a));
    }
    for (__m256i& sum : sums) asm volatile("" : : "x"(sum));
    return iterations * 12 * 32;
}

}  // namespace

const bitnet::Kernels* bitnet::avx2_kernels() {
    static constexpr Kernels kernels = make_kernels("avx2", tile_in_parts<TokenTile, 4>, int8_peak);
    return &kernels;
}
