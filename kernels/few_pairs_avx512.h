// Products in pairs of so few tokens that T5 is decoded in registers: their sums stay there from the first block to the
// last, so nothing is written that is read only once or twice.
#pragma once
#include "fetch.h"
#include "pairs_avx512.h"

namespace {

constexpr int kFewestInPairs = 7;  // tokens; up to kPairTile

template <int T>
struct FewTile : Tile<T> {
    using Tile<T>::kCodes;
    Halves rows = kNoSums;  // what w0 (w1 + 128) adds up to

    BITNET_INLINE void note(const Halves& w0, const Halves& w1) {
        for (int h = 0; h < 2; h++) add_products(rows.of[h], w1.of[h], w0.of[h]);
    }
    // An even step and the next, and their fifth fields.
    BITNET_INLINE void add_steps(const T5Decoder& decoder, const uint8_t* w, const int8_t* a, const int8_t* last,
                                 bool fifths_are_paired) {
        for (int line = 0; line < 2 * kStepBytes; line += 64) fetch_ahead(w + line);
        Halves upper[2];
        const FieldsOfU2 even = decode(decoder, w, upper[0]), odd = decode(decoder, w + kStepBytes, upper[1]);
        const Fifths fifths{upper};
        add(even.get<0, Place::left>(), even.get<1, Place::right>(), a, odd.get<2, Place::alone>(), a + 6 * kCodes);
        add(even.get<2, Place::left>(), even.get<3, Place::right>(), a + 2 * kCodes, odd.get<3, Place::alone>(),
            a + 7 * kCodes);
        add(odd.get<0, Place::left>(), odd.get<1, Place::right>(), a + 4 * kCodes);
        if (fifths_are_paired) {
            add(fifths.get<0, Place::left>(), fifths.get<1, Place::right>(), last);
        } else {
            this->add_alone(fifths.get<0, Place::alone>(), last);
            this->add_alone(fifths.get<1, Place::alone>(), last + kCodes);
        }
    }
    BITNET_INLINE void add(const Halves& w0, const Halves& w1, const int8_t* a) {
        note(w0, w1);
        this->add_pair(w0, w1, a);
    }
    BITNET_INLINE void add(const Halves& w0, const Halves& w1, const int8_t* a, const Halves& x, const int8_t* b) {
        note(w0, w1);
        this->add_three(w0, w1, a, x, b);
    }
};

template <int T>
BITNET_APART void few_tile(const uint8_t* w, int blocks, const int8_t* a, const int32_t* offsets, int32_t* acc) {
    const T5Decoder decoder;
    FewTile<T> tile;
    constexpr int kCodes = Tile<T>::kCodes;
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) tile.sums[0][t] = tile.sums[1][t] = _mm512_set1_epi32(offsets[t]);
    const int8_t* last = a + 16 * kCodes * blocks;
    for (int i = 0; i < 2 * blocks; i++, w += 2 * kStepBytes, a += 8 * kCodes, last += 2 * kCodes)
        tile.add_steps(decoder, w, a, last, i % 4 != 3);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
            _mm512_storeu_si512(acc + t * kGroupRows + 16 * h, _mm512_sub_epi32(tile.sums[h][t], tile.rows.of[h]));
}

BITNET_INLINE bool are_few(const ManyTask& t) { return t.is_t5 && t.tokens >= kFewestInPairs && t.tokens <= kPairTile; }

void multiply_few(const ManyTask& t) {
    static_assert(kPairTile == kFewestInPairs + 1);
    const auto multiply = t.tokens == kPairTile ? few_tile<kPairTile> : few_tile<kFewestInPairs>;
    multiply(t.weights, t.steps / kBlockSteps, t.codes, t.offsets, t.acc);
}

}  // namespace
