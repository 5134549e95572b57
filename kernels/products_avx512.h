// What ternary products on AVX-512 are made of.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "tile_parts.h"

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

// The same with four activations, which the product itself broadcasts.
BITNET_INLINE void add_products(__m512i& sum, const __m512i& codes, const int8_t* activations) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const int32_t*)activations));
}

// Two sums of a token, which share its activations. Every other token's are broadcast by the products: the instructions
// that this saves count where a core's other thread takes turns at decoding; the loads that it adds would, for all.
BITNET_INLINE void add_products_of(int token, __m512i& sum0, __m512i& sum1, __m512i codes0, __m512i codes1,
                                   const int8_t* activations) {
    if (token % 2) {
        add_products(sum0, codes0, activations);
        add_products(sum1, codes1, activations);
    } else {
        const __m512i all = broadcast(activations);
        add_products(sum0, codes0, all);
        add_products(sum1, codes1, all);
    }
}

// Field p of every byte, in the low bits: one instruction with GFNI, which all processors with VBMI and VNNI have.
BITNET_INLINE __m512i field(__m512i x, int p) {
    if (p == 0) return _mm512_and_si512(x, _mm512_set1_epi8(3));
#ifdef __GFNI__
    constexpr uint64_t low_two = 0x0102000000000000;  // the first rows of the matrix, each of which makes a bit
    return _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(int64_t(low_two << 2 * p)), 0);
#else
    return _mm512_and_si512(_mm512_srli_epi16(x, 2 * p), _mm512_set1_epi8(3));
#endif
}

// Where some steps of weights stand in the columns: those of T5 in two places, its fifth fields behind all others.
struct Span {
    int first, count;
};

constexpr int kChunkSteps = 40;  // of columns: 20 KB as bytes, which stay in the first cache
constexpr int kFieldBytes = 128, kUnpackedBytes = 4 * kFieldBytes;

// Steps of U2 or blocks of T5 that become bytes together.
struct Piece {
    Share share;
    const uint8_t* weights;
    Span spans[2];
};

// Calls f for piece after piece of the weights.
template <class F>
BITNET_INLINE void each_piece(const bitnet::ManyTask& t, const F& f) {
    using namespace bitnet;
    const int blocks = t.steps / kBlockSteps, units = t.is_t5 ? blocks : t.steps;
    const int most = t.is_t5 ? kChunkSteps / kBlockSteps : kChunkSteps, bytes = t.is_t5 ? kBlockBytes : kStepBytes;
    for (int begin = 0; begin < units; begin += most) {
        const int count = units - begin < most ? units - begin : most;
        const Piece piece{{begin, count, units, bytes},
                          t.weights + begin * bytes,
                          {t.is_t5 ? Span{4 * begin, 4 * count} : Span{begin, count},
                           t.is_t5 ? Span{4 * blocks + begin, count} : Span{}}};
        f(piece);
    }
}

}  // namespace
