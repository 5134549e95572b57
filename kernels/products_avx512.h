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

// Where some steps of weights stand in the columns: those of T5 in two places, its fifth fields behind all others.
struct Span {
    int first, count;
};

constexpr int kChunkSteps = 40;  // of columns: 20 KB as bytes, which stay in the first cache
constexpr int kFieldBytes = 128, kUnpackedBytes = 4 * kFieldBytes;

// Calls f for chunk after chunk of the weights: with its first byte, how many steps of U2 or blocks of T5 it has, where
// these stand, and whether it is the first.
template <class F>
BITNET_INLINE void each_chunk(const bitnet::ManyTask& t, const F& f) {
    using namespace bitnet;
    const int blocks = t.steps / kBlockSteps, units = t.is_t5 ? blocks : t.steps;
    const int most = t.is_t5 ? kChunkSteps / kBlockSteps : kChunkSteps;
    for (int begin = 0; begin < units; begin += most) {
        const int count = units - begin < most ? units - begin : most;
        const Span spans[2] = {t.is_t5 ? Span{4 * begin, 4 * count} : Span{begin, count},
                               t.is_t5 ? Span{4 * blocks + begin, count} : Span{}};
        f(t.weights + begin * (t.is_t5 ? kBlockBytes : kStepBytes), count, spans, begin == 0);
    }
}

}  // namespace
