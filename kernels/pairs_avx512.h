// Products in pairs (avx512pairs.cpp): fields of weights as their factors, and the sums of some tokens.
#pragma once
#include "products_avx512.h"
#include "t5_decode.h"
#include "tile_parts.h"

namespace {

using namespace bitnet;

// Three instructions that stay together: gcc 12 would move additions ahead, and sums out of the registers.
BITNET_INLINE void add_pair_products(__m512i& sum, const __m512i& a0, const __m512i& a1, const __m512i& w0,
                                     const __m512i& w1) {
    __m512i left, right;
    asm("vpaddb %[a0], %[w1], %[left]\n\tvpaddb %[a1], %[w0], %[right]\n\tvpdpbusd %[right], %[left], %[sum]"
        : [sum] "+v"(sum), [left] "=&v"(left), [right] "=&v"(right)
        : [a0] "v"(a0), [a1] "v"(a1), [w0] "v"(w0), [w1] "v"(w1));
}

struct Halves {
    __m512i of[2];  // 16 rows each
};

const Halves kNoSums{};

enum class Place { left, right, alone };

// The two bits of field P as w0, w1 + 128, or the code of a weight that is alone. A product of bit matrices is any
// function of three values of two bits.
template <int P, Place To>
BITNET_INLINE Halves field(const Halves& x) {
    constexpr uint64_t low = uint64_t(1) << 2 * P, high = uint64_t(2) << 2 * P, any = low | high;
    constexpr uint64_t rows = low << 56 | (To == Place::alone ? high << 48 : any * 0x1010101010101);
    constexpr int zero = To == Place::left ? 0xff : To == Place::right ? 0x7f : 0;
    const __m512i matrix = _mm512_set1_epi64(int64_t(rows));
    return {
        {_mm512_gf2p8affine_epi64_epi8(x.of[0], matrix, zero), _mm512_gf2p8affine_epi64_epi8(x.of[1], matrix, zero)}};
}

BITNET_INLINE Halves load(const uint8_t* w) { return {{_mm512_loadu_si512(w), _mm512_loadu_si512(w + 64)}}; }

// The fields of a step: in the bytes of U2, or on top of what as many steps of T5 look up.
struct FieldsOfU2 {
    Halves x;
    template <int P, Place To>
    BITNET_INLINE Halves get() const {
        return field<P, To>(x);
    }
};
struct Fifths {
    const Halves* upper;
    template <int P, Place To>
    BITNET_INLINE Halves get() const {
        return field<3, To>(upper[P]);
    }
};

// Decodes a step of T5; its last fields are left in `upper`.
BITNET_INLINE FieldsOfU2 decode(const T5Decoder& decoder, const uint8_t* w, Halves& upper) {
    const Halves x = load(w);
    const T5Fields first = decoder(x.of[0]), second = decoder(x.of[1]);
    upper = {{first.upper, second.upper}};
    return {{{first.first_four(), second.first_four()}}};
}

constexpr int kPairTile = 8;  // tokens

// The sums of T tokens, whose codes of a field stand side by side, those of the next field behind them.
template <int T>
struct Tile {
    static constexpr int kCodes = 4 * T;  // of a field
    __m512i sums[2][T];

    BITNET_INLINE void add_pair(const Halves& w0, const Halves& w1, const int8_t* a) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++, a += 4) add_pair(t, w0, w1, a);
    }
    BITNET_INLINE void add_alone(const Halves& x, const int8_t* b) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++, b += 4) add_alone(t, x, b);
    }
    // A pair, and a field that is alone.
    BITNET_INLINE void add_three(const Halves& w0, const Halves& w1, const int8_t* a, const Halves& x,
                                 const int8_t* b) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++, a += 4, b += 4) {
            add_alone(t, x, b);
            add_pair(t, w0, w1, a);
        }
    }
    BITNET_INLINE void add_pair(int t, const Halves& w0, const Halves& w1, const int8_t* a) {
        const __m512i a0 = broadcast(a), a1 = broadcast(a + kCodes);
        add_pair_products(sums[0][t], a0, a1, w0.of[0], w1.of[0]);
        add_pair_products(sums[1][t], a0, a1, w0.of[1], w1.of[1]);
    }
    BITNET_INLINE void add_alone(int t, const Halves& x, const int8_t* b) {
        const __m512i four = broadcast(b);
        add_products(sums[0][t], x.of[0], four);
        add_products(sums[1][t], x.of[1], four);
    }
};

}  // namespace
