// AVX-VNNI: the AVX-512 kernel in 256-bit halves; a step of 32 rows is four registers of 8 rows.
#include "lanes_avx2.h"
#include "unpacked_avx2.h"
#include "verbs.h"
#include "wide_products.h"

#ifndef BITNET_VEX
#define BITNET_VEX "%{vex%} "  // else assemblers take the encoding of AVX-512
#endif

namespace {

// _mm256_dpbusd_avx_epi32, which gcc 12 surrounds with copies of the sums; but where few are under way, these help.
BITNET_INLINE void add_products(__m256i& sum, const __m256i& codes, const __m256i& activations) {
    asm(BITNET_VEX "vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(activations));
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

// What is unpacked, for unpacked_product.
struct UnpackedTile {
    template <int T>
    BITNET_APART static void part(const uint8_t* bytes, const int8_t* a, int stride, int steps, int32_t* acc,
                                  bool more) {
        __m256i sums[2][T];
#pragma GCC unroll 6
        for (int t = 0; t < T; t++)
#pragma GCC unroll 2
            for (int q = 0; q < 2; q++)
                sums[q][t] = more ? load_register(acc + t * kGroupRows + 8 * q) : _mm256_setzero_si256();
        for (int field = 0; field < 4 * steps; field++, bytes += Unpacked::kFieldBytes, a += stride) {
            const __m256i x = load_register(bytes), y = load_register(bytes + 32);
#pragma GCC unroll 6
            for (int t = 0; t < T; t++) {
                const __m256i b = broadcast(a + 4 * t);
                add_products(sums[0][t], x, b);
                add_products(sums[1][t], y, b);
            }
        }
#pragma GCC unroll 6
        for (int t = 0; t < T; t++)
#pragma GCC unroll 2
            for (int q = 0; q < 2; q++) _mm256_storeu_si256((__m256i*)(acc + t * kGroupRows + 8 * q), sums[q][t]);
    }
    template <int T>
    static void run(const uint8_t* bytes, const int8_t* a, int stride, int steps, int32_t* acc, bool more) {
        for (int half = 0; half < 2; half++) part<T>(bytes + 64 * half, a, stride, steps, acc + 16 * half, more);
    }
};

int64_t int8_peak(int64_t iterations) {
    __m256i sums[12];
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    __m256i w = _mm256_set1_epi8(1), a = _mm256_set1_epi8(3);
    for (int64_t i = 0; i < iterations; i++)
#pragma GCC unroll 12
        for (__m256i& sum : sums) add_products(sum, w, a);
    for (__m256i& sum : sums) asm volatile("" : : "x"(sum));
    return iterations * 12 * 32;
}

}  // namespace

const bitnet::Kernels* bitnet::avxvnni_kernels() {
    static constexpr Kernels kernels = [] {
        Kernels own = make_kernels("avxvnni", tile_in_parts<TokenTile, 6>, int8_peak);
        own.dense = wide_dense;
        own.many_product = unpacked_product<UnpackedTile>;
        own.many_tokens = 22;
        own.many_tile = kMaxTileTokens;
        return own;
    }();
    return &kernels;
}
