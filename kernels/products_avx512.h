// What ternary products on AVX-512 are made of.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "kernels.h"

namespace {

BITNET_INLINE __m512i broadcast(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return _mm512_set1_epi32(four);
}

// _mm512_dpbusd_epi32, which gcc 12 surrounds with copies of the sums.
BITNET_INLINE void add_products(__m512i& sum, const __m512i& codes, const __m512i& activations) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(activations));
}

}  // namespace
