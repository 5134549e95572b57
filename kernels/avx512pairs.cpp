// AVX-512 where two additions cost no more than one `vpdpbusd`: one product for two weights and two activations.
//
//     (a0 + w1) (a1 + w0) = a0 w0 + a1 w1 + a0 a1 + w0 w1           (S. Winograd, IEEE Trans. Computers C-17, 1968)
//
// The last two terms are those of a token and of a row alone. AMD's cores do two products and two more additions of 32
// bytes at a time, Intel's both on the same ports. Of eight fields six are paired, and two fill the gaps: 1.45 times
// what products alone could reach. Sums wrap around, which no difference of them sees.
//
// Weights are bytes: w0 as it is and w1 + 128, so that an activation as it is makes the left factor an unsigned byte
// and the right one a signed byte. 127 and -128 leave them: such pairs are listed, and corrected one by one.
//
// Pairs are the fields 0 and 1 of a step of 16 columns, and in even steps the fields 2 and 3.
#include <algorithm>

#include "few_pairs_avx512.h"

namespace {

using namespace bitnet;

// Some steps of a group, a byte a weight, and what w0 (w1 + 128) adds up to in each row.
struct Chunk {
    alignas(64) uint8_t bytes[kChunkSteps * kUnpackedBytes];
    Halves rows;
};

template <int P, bool IsEven, class Fields>
BITNET_INLINE void expand_fields(uint8_t* to, const Fields& step, Halves& rows) {
    constexpr bool are_paired = P < 2 || IsEven;
    const Halves x = step.template get<P, are_paired ? Place::left : Place::alone>();
    const Halves y = step.template get<P + 1, are_paired ? Place::right : Place::alone>();
    for (int h = 0; h < 2; h++) {
        if (are_paired) add_products(rows.of[h], y.of[h], x.of[h]);
        _mm512_store_si512(to + P * kFieldBytes + 64 * h, x.of[h]);
        _mm512_store_si512(to + (P + 1) * kFieldBytes + 64 * h, y.of[h]);
    }
}

template <bool IsEven, class Fields>
BITNET_INLINE void expand_step(uint8_t* to, const Fields& step, Halves& rows) {
    expand_fields<0, IsEven>(to, step, rows);
    expand_fields<2, IsEven>(to, step, rows);
}

BITNET_APART void expand_u2(const uint8_t* w, int steps, Chunk& chunk) {
    Halves rows = kNoSums;
    uint8_t* to = chunk.bytes;
    for (; steps > 0; steps -= 2, w += 2 * kStepBytes, to += 2 * kUnpackedBytes) {
        expand_step<true>(to, FieldsOfU2{load(w)}, rows);
        if (steps > 1) expand_step<false>(to + kUnpackedBytes, FieldsOfU2{load(w + kStepBytes)}, rows);
    }
    chunk.rows = rows;
}

// The fifth fields stand behind the others.
BITNET_APART void expand_t5(const uint8_t* w, int blocks, Chunk& chunk) {
    const T5Decoder decoder;
    Halves rows = kNoSums;
    uint8_t *to = chunk.bytes, *last = to + 4 * blocks * kUnpackedBytes;
    for (int b = 0; b < blocks; b++, last += kUnpackedBytes) {
        Halves upper[4];
#pragma GCC unroll 2
        for (int s = 0; s < 4; s += 2, w += 2 * kStepBytes, to += 2 * kUnpackedBytes) {
            expand_step<true>(to, decode(decoder, w, upper[s]), rows);
            expand_step<false>(to + kUnpackedBytes, decode(decoder, w + kStepBytes, upper[s + 1]), rows);
        }
        if (b % 2)
            expand_step<false>(last, Fifths{upper}, rows);
        else
            expand_step<true>(last, Fifths{upper}, rows);
    }
    chunk.rows = rows;
}

BITNET_INLINE Halves expanded(const uint8_t* bytes) {
    return {{_mm512_load_si512(bytes), _mm512_load_si512(bytes + 64)}};
}

// Steps that are bytes.
template <int T>
BITNET_INLINE void add_expanded(Tile<T>& tile, const uint8_t* w, const int8_t* a, int steps, Ahead& ahead) {
    constexpr int kCodes = Tile<T>::kCodes;
    const auto field = [&](int p) { return expanded(w + p * kFieldBytes); };
    for (; steps >= 2; steps -= 2, w += 2 * kUnpackedBytes, a += 8 * kCodes) {
        ahead.step();
        tile.add_three(field(0), field(1), a, field(6), a + 6 * kCodes);
        ahead.step();
        tile.add_three(field(2), field(3), a + 2 * kCodes, field(7), a + 7 * kCodes);
        tile.add_pair(field(4), field(5), a + 4 * kCodes);
    }
    if (!steps) return;
    tile.add_pair(field(0), field(1), a);
    tile.add_pair(field(2), field(3), a + 2 * kCodes);
}

template <int T>
BITNET_APART void chunk_tile(const Chunk& chunk, const Span (&spans)[2], const int8_t* codes, const int32_t* offsets,
                             Ahead ahead, int32_t* acc) {
    Tile<T> tile;
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
            tile.sums[h][t] =
                offsets ? _mm512_set1_epi32(offsets[t]) : _mm512_loadu_si512(acc + t * kGroupRows + 16 * h);
    add_expanded(tile, chunk.bytes, codes + spans[0].first * 16 * T, spans[0].count, ahead);
    add_expanded(tile, chunk.bytes + spans[0].count * kUnpackedBytes, codes + spans[1].first * 16 * T, spans[1].count,
                 ahead);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
            _mm512_storeu_si512(acc + t * kGroupRows + 16 * h, _mm512_sub_epi32(tile.sums[h][t], chunk.rows.of[h]));
}

// Calls f with the fields of a step.
template <class F>
BITNET_INLINE void with_step(const ManyTask& t, int step, const F& f) {
    if (!t.is_t5) return f(FieldsOfU2{load(t.weights + step * kStepBytes)});
    const T5Decoder decoder;
    const int four = t.steps / kBlockSteps * 4;
    Halves upper[4];
    if (step < four) return f(decode(decoder, t.weights + step * kStepBytes, upper[0]));
    for (int s = 0; s < 4; s++) decode(decoder, t.weights + ((step - four) * 4 + s) * kStepBytes, upper[s]);
    f(Fifths{upper});
}

// The sums of one token with 16 rows, four codes a field `stride` bytes apart.
template <class Fields>
BITNET_INLINE void add_alone(Halves& sums, const Fields& step, const int8_t* codes, int stride) {
    const Halves fields[4] = {step.template get<0, Place::alone>(), step.template get<1, Place::alone>(),
                              step.template get<2, Place::alone>(), step.template get<3, Place::alone>()};
    for (int p = 0; p < 4; p++)
        for (int h = 0; h < 2; h++) add_products(sums.of[h], fields[p].of[h], broadcast(codes + p * stride));
}

// What a tile has added for a pair, with the opposite sign, and its true products.
template <int P, class Fields>
BITNET_INLINE void add_correction(Halves& sums, const Fields& step, const int8_t* codes, int stride) {
    const __m512i a0 = broadcast(codes + P * stride), a1 = broadcast(codes + (P + 1) * stride);
    const Halves w0 = step.template get<P, Place::left>(), w1 = step.template get<P + 1, Place::right>();
    const Halves x0 = step.template get<P, Place::alone>(), x1 = step.template get<P + 1, Place::alone>();
    Halves wrong = kNoSums;
    for (int h = 0; h < 2; h++) {
        add_pair_products(wrong.of[h], a0, a1, w0.of[h], w1.of[h]);
        add_products(sums.of[h], w1.of[h], w0.of[h]);
        add_products(sums.of[h], x0.of[h], a0);
        add_products(sums.of[h], x1.of[h], a1);
        sums.of[h] = _mm512_sub_epi32(sums.of[h], wrong.of[h]);
    }
}

// Pairs of one token whose factors are not bytes: so many that all its products are summed again, or a few.
void correct(const ManyTask& t, const uint16_t* list, const int8_t* codes, int stride, int32_t* acc) {
    Halves sums = kNoSums;
    const int count = list[0] & ~kNegated;
    const bool all = count > kPairList;
    for (int s = 0; all && s < t.steps; s++)
        with_step(t, s, [&](const auto& step) { add_alone(sums, step, codes + 4 * s * stride, stride); });
    for (int i = 1; !all && i <= count; i++) {
        if (list[i] / 2 >= t.steps) continue;  // of a program that has overwritten the list
        with_step(t, list[i] / 2, [&](const auto& step) {
            const int8_t* at = codes + list[i] / 2 * 4 * stride;
            list[i] % 2 ? add_correction<2>(sums, step, at, stride) : add_correction<0>(sums, step, at, stride);
        });
    }
    for (int h = 0; h < 2; h++) {
        const __m512i before = all ? _mm512_setzero_si512() : _mm512_loadu_si512(acc + 16 * h);
        _mm512_storeu_si512(acc + 16 * h, _mm512_add_epi32(before, sums.of[h]));
    }
}

BITNET_INLINE void negate(int32_t* acc) {
    for (int h = 0; h < 2; h++)
        _mm512_storeu_si512(acc + 16 * h, _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(acc + 16 * h)));
}

// Chunk after chunk of the weights, which become bytes once for all tiles.
void multiply_many(const ManyTask& t) {
    Chunk chunk;
    each_piece(t, [&](const Piece& piece) {
        t.is_t5 ? expand_t5(piece.weights, piece.share.count, chunk)
                : expand_u2(piece.weights, piece.share.count, chunk);
        each_tile(t, [&](int first, int tokens, int tile) {
            const Ahead ahead = fetch_beside(t, piece.share, tile, first, tokens);
            with_count<kPairTile>(tokens, [&](auto n) {
                chunk_tile<n.value>(chunk, piece.spans, t.codes + first * t.padded,
                                    piece.share.begin == 0 ? t.offsets + first : nullptr, ahead,
                                    t.acc + first * kGroupRows);
            });
        });
    });
}

void pair_product(const ManyTask& t) {
    are_few(t) ? multiply_few(t) : multiply_many(t);
    each_tile(t, [&](int first, int tokens, int) {
        for (int i = 0; i < tokens; i++) {
            const uint16_t* list = t.lists + (first + i) * (kPairList + 1);
            int32_t* acc = t.acc + (first + i) * kGroupRows;
            if (list[0] & ~kNegated) correct(t, list, t.codes + first * t.padded + 4 * i, 4 * tokens, acc);
            if (list[0] & kNegated) negate(acc);
        }
    });
}

// Two fields of activations are 64 bits; the fields 2 and 3 of odd steps are alone.
constexpr uint8_t kPaired = 0x77;

// Of 64 codes from k on, those that there are.
BITNET_INLINE __mmask64 inside(int k, int padded) {
    return padded - k < 64 ? (__mmask64(1) << (padded - k)) - 1 : ~__mmask64(0);
}

BITNET_INLINE __m512i load_codes(const int8_t* codes, int k, int padded) {
    return _mm512_maskz_loadu_epi8(inside(k, padded), codes + k);
}

// Nearly every row holds either 127 or -127, its largest number, and only the second fits into pairs.
bool negate_if_better(int8_t* codes, int padded) {
    const __m512i most = _mm512_set1_epi8(127), minus_most = _mm512_set1_epi8(-127);
    __mmask64 plus = 0, minus = 0;
    for (int k = 0; k < padded; k += 64) {
        const __m512i a = load_codes(codes, k, padded);
        plus |= _mm512_cmpeq_epi8_mask(a, most);
        minus |= _mm512_cmple_epi8_mask(a, minus_most);
    }
    if (!plus || minus) return false;
    for (int k = 0; k < padded; k += 64) {
        const __m512i a = load_codes(codes, k, padded);
        _mm512_mask_storeu_epi8(codes + k, inside(k, padded), _mm512_sub_epi8(_mm512_setzero_si512(), a));
    }
    return true;
}

void pair_row(int8_t* codes, int padded, bool may_negate, int32_t* offset, uint16_t* list) {
    constexpr int kListedColumns = 8 << 16;
    const bool is_negated = may_negate && negate_if_better(codes, padded);
    const __m512i ones = _mm512_set1_epi8(1), most = _mm512_set1_epi8(127), least = _mm512_set1_epi8(-128);
    __m512i products = _mm512_setzero_si512(), sums = products;
    int count = 0;
    for (int k = 0; k < padded; k += 64) {
        const __m512i a = load_codes(codes, k, padded);
        const __m512i far = _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(a, most) | _mm512_cmpeq_epi8_mask(a, least));
        const unsigned listed = _mm512_test_epi64_mask(far, far) & kPaired;
        const __m512i paired = _mm512_maskz_mov_epi64(__mmask8(kPaired & ~listed), a);
        add_products(products, _mm512_xor_si512(paired, least), _mm512_srli_epi64(paired, 32));
        add_products(sums, ones, paired);
        for (unsigned left = listed; left; left &= left - 1)
            if (++count <= kPairList) list[count] = uint16_t(k / 8 + __builtin_ctz(left));
    }
    list[0] = uint16_t((padded > kListedColumns ? kPairList + 1 : std::min(count, kPairList + 1)) |
                       (is_negated ? kNegated : 0));
    *offset = _mm512_reduce_add_epi32(_mm512_sub_epi32(sums, products));
}

}  // namespace

void bitnet::add_avx512pairs(Kernels& kernels) {
    kernels.pair_row = pair_row;
    kernels.many_product = pair_product;
    kernels.many_tokens = kFewestInPairs;
    kernels.many_tile = kPairTile;
}
