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

#include "fetch.h"
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

// The fields of a step: in the bytes of U2, or on top of what four steps of T5 look up.
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

// The sums of T tokens.
template <int T>
struct Tile {
    __m512i sums[2][T];

    BITNET_INLINE void add_pair(const uint8_t* w, const int8_t* a) {
        const Halves w0 = expanded(w), w1 = expanded(w + kFieldBytes);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++, a += 4) add_pair(t, w0, w1, a);
    }
    // A pair, and a field that is alone.
    BITNET_INLINE void add_three(const uint8_t* w, const int8_t* a, const uint8_t* alone, const int8_t* b) {
        const Halves w0 = expanded(w), w1 = expanded(w + kFieldBytes), x = expanded(alone);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++, a += 4, b += 4) {
            const __m512i four = broadcast(b);
            add_products(sums[0][t], x.of[0], four);
            add_products(sums[1][t], x.of[1], four);
            add_pair(t, w0, w1, a);
        }
    }
    BITNET_INLINE void add_pair(int t, const Halves& w0, const Halves& w1, const int8_t* a) {
        const __m512i a0 = broadcast(a), a1 = broadcast(a + 4 * T);
        add_pair_products(sums[0][t], a0, a1, w0.of[0], w1.of[0]);
        add_pair_products(sums[1][t], a0, a1, w0.of[1], w1.of[1]);
    }
    BITNET_INLINE void add_steps(const uint8_t* w, const int8_t* a, int steps, Ahead& ahead) {
        constexpr int kCodes = 4 * T;  // of a field
        for (; steps >= 2; steps -= 2, w += 2 * kUnpackedBytes, a += 8 * kCodes) {
            ahead.step();
            add_three(w, a, w + 6 * kFieldBytes, a + 6 * kCodes);
            ahead.step();
            add_three(w + 2 * kFieldBytes, a + 2 * kCodes, w + 7 * kFieldBytes, a + 7 * kCodes);
            add_pair(w + 4 * kFieldBytes, a + 4 * kCodes);
        }
        if (!steps) return;
        add_pair(w, a);
        add_pair(w + 2 * kFieldBytes, a + 2 * kCodes);
    }
};

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
    tile.add_steps(chunk.bytes, codes + spans[0].first * 16 * T, spans[0].count, ahead);
    tile.add_steps(chunk.bytes + spans[0].count * kUnpackedBytes, codes + spans[1].first * 16 * T, spans[1].count,
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
void pair_product(const ManyTask& t) {
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
    kernels.many_tokens = 9;
    kernels.many_tile = kPairTile;
}
