// AVX-512 with VBMI decodes T5: two `vpermi2b` and a blend give a byte of U2 from a byte of T5, `vpermb` its fifth
// weight.
#include <immintrin.h>

#include <cstring>

#include "kernels.h"
#include "t5.h"

namespace {

using namespace bitnet;

struct Tables {
    __m512i first[4], fifth;
    Tables() {
        for (int i = 0; i < 4; i++) first[i] = _mm512_loadu_si512(kT5.first + 64 * i);
        fifth = _mm512_loadu_si512(kT5.fifth);
    }
};

BITNET_INLINE __m512i first_four(const Tables& tables, __m512i x) {
    const __m512i low = _mm512_permutex2var_epi8(tables.first[0], x, tables.first[1]);
    const __m512i high = _mm512_permutex2var_epi8(tables.first[2], x, tables.first[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high);
}

BITNET_INLINE __m512i fifth(const Tables& tables, __m512i x) { return _mm512_permutexvar_epi8(x, tables.fifth); }

void expand_blocks(const uint8_t* blocks, int num_blocks, uint8_t* steps) {
    const Tables tables;
    for (int b = 0; b < num_blocks; b++, blocks += kBlockBytes, steps += kBlockSteps * kStepBytes)
        for (int half = 0; half < kStepBytes; half += 64) {
            __m512i last = _mm512_setzero_si512();
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) {
                const __m512i x = _mm512_loadu_si512(blocks + s * kStepBytes + half);
                _mm512_storeu_si512(steps + s * kStepBytes + half, first_four(tables, x));
                last = _mm512_or_si512(last, _mm512_slli_epi16(fifth(tables, x), 2 * s));
            }
            _mm512_storeu_si512(steps + 4 * kStepBytes + half, last);
        }
}

BITNET_INLINE __m512i broadcast(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return _mm512_set1_epi32(four);
}

BITNET_INLINE void add_products(__m512i& sum, const __m512i& codes, const __m512i& activations) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(activations));
}

// As tile<1, 4> of avx512.cpp: fields masked in place, a sum for each, shifted once at the end.
void block_tile(const uint8_t* w, const int8_t* a, int num_blocks, int32_t* acc) {
    const Tables tables;
    __m512i sums[5][2], masks[4];
    for (int p = 0; p < 5; p++) sums[p][0] = sums[p][1] = _mm512_setzero_si512();
    for (int p = 0; p < 4; p++) masks[p] = _mm512_set1_epi8(char(3 << 2 * p));
    for (int b = 0; b < num_blocks; b++, a += kBlockColumns)
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++, w += kStepBytes) {
            __builtin_prefetch(w + 3072, 0, 2);
            __builtin_prefetch(w + 3072 + 64, 0, 2);
            const __m512i x = _mm512_loadu_si512(w), y = _mm512_loadu_si512(w + 64);
            const __m512i u = first_four(tables, x), v = first_four(tables, y);
#pragma GCC unroll 4
            for (int p = 0; p < 4; p++) {
                const __m512i four = broadcast(a + 16 * s + 4 * p);
                add_products(sums[p][0], _mm512_and_si512(u, masks[p]), four);
                add_products(sums[p][1], _mm512_and_si512(v, masks[p]), four);
            }
            const __m512i four = broadcast(a + 64 + 4 * s);
            add_products(sums[4][0], fifth(tables, x), four);
            add_products(sums[4][1], fifth(tables, y), four);
        }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m512i sum = _mm512_add_epi32(sums[4][h], sums[0][h]);
        sum = _mm512_add_epi32(sum, _mm512_srai_epi32(sums[1][h], 2));
        sum = _mm512_add_epi32(sum, _mm512_srai_epi32(sums[2][h], 4));
        sum = _mm512_add_epi32(sum, _mm512_srai_epi32(sums[3][h], 6));
        _mm512_storeu_si512(acc + 16 * h, sum);
    }
}

}  // namespace

void bitnet::add_avx512vbmi(Kernels& kernels) {
    kernels.expand_blocks = expand_blocks;
    kernels.block_tile = block_tile;
}
