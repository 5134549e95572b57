// AVX-512 with VBMI: products with T5, decoded in registers.
#include "fetch.h"
#include "products_avx512.h"
#include "t5_decode.h"
#include "tile_parts.h"
#include "unpacked_avx512.h"

namespace {

using namespace bitnet;

// T tokens with H halves (16 rows each) in a pass. Fields are masked in place, as in avx512.cpp; the last two are both
// 64 times too large and share a sum: 128 * 127 * columns * 2 / 5 < 2^31 (kMaxColumns).
template <int T, int H>
void tile_in_place(const uint8_t* w, const int8_t* a, int num_blocks, int32_t* acc) {
    constexpr int kChunk = H == 2 ? 1 << 20 : 64;
    const T5Decoder decoder;
    const int steps = 4 * num_blocks;
    const int8_t* last = a + 16 * steps * T;
    __m512i masks[4];
    for (int p = 0; p < 4; p++) masks[p] = _mm512_set1_epi8(char(3 << 2 * p));
    for (int begin = 0; begin < steps; begin += kChunk) {
        const int end = steps - begin < kChunk ? steps : begin + kChunk;
        for (int first = 0; first < 2; first += H) {
            __m512i sums[H][4][T];
#pragma GCC unroll 2
            for (int h = 0; h < H; h++)
#pragma GCC unroll 4
                for (int p = 0; p < 4; p++)
#pragma GCC unroll 8
                    for (int t = 0; t < T; t++) sums[h][p][t] = _mm512_setzero_si512();
            const uint8_t* ws = w + begin * kStepBytes + 64 * first;
            const int8_t* as = a + begin * 16 * T;
            const int8_t* ls = last + begin * 4 * T;
            for (int s = begin; s < end; s++, ws += kStepBytes, as += 16 * T, ls += 4 * T) {
#pragma GCC unroll 2
                for (int h = 0; h < H; h++) {
                    fetch_ahead(ws + 64 * h);
                    const T5Fields fields = decoder(_mm512_loadu_si512(ws + 64 * h));
#pragma GCC unroll 5
                    for (int p = 0; p < 5; p++) {
                        const __m512i field = fields.in_place(p, masks[p < 4 ? p : 3]);
                        const int8_t* four = p < 4 ? as + 4 * p * T : ls;
#pragma GCC unroll 8
                        for (int t = 0; t < T; t++) add_products(sums[h][p < 4 ? p : 3][t], field, four + 4 * t);
                    }
                }
            }
#pragma GCC unroll 2
            for (int h = 0; h < H; h++)
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) {
                    int32_t* out = acc + t * kGroupRows + 16 * (first + h);
                    __m512i sum = begin ? _mm512_loadu_si512(out) : _mm512_setzero_si512();
                    sum = _mm512_add_epi32(sum, sums[h][0][t]);
                    sum = _mm512_add_epi32(sum, _mm512_srai_epi32(sums[h][1][t], 2));
                    sum = _mm512_add_epi32(sum, _mm512_srai_epi32(sums[h][2][t], 4));
                    sum = _mm512_add_epi32(sum, _mm512_srai_epi32(sums[h][3][t], 6));
                    _mm512_storeu_si512(out, sum);
                }
        }
    }
}

// For more tokens: fields are brought to the low bits, so that all share a sum, and both halves the activations.
template <int T>
void tile(const uint8_t* w, const int8_t* a, int num_blocks, int32_t* acc) {
    const T5Decoder decoder;
    const int steps = 4 * num_blocks;
    const int8_t* last = a + 16 * steps * T;
    __m512i sums[2][T];
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) sums[0][t] = sums[1][t] = _mm512_setzero_si512();
    for (int s = 0; s < steps; s++, w += kStepBytes, a += 16 * T, last += 4 * T) {
        fetch_ahead(w);
        fetch_ahead(w + 64);
        const T5Fields x = decoder(_mm512_loadu_si512(w)), y = decoder(_mm512_loadu_si512(w + 64));
        const __m512i first_x = x.first_four(), first_y = y.first_four();
#pragma GCC unroll 5
        for (int p = 0; p < 5; p++) {
            const __m512i u = p < 4 ? field(first_x, p) : field(x.upper, 3),
                          v = p < 4 ? field(first_y, p) : field(y.upper, 3);
            const int8_t* four = p < 4 ? a + 4 * p * T : last;
#pragma GCC unroll 12
            for (int t = 0; t < T; t++) add_products_of(t, sums[0][t], sums[1][t], u, v, four + 4 * t);
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) {
        _mm512_storeu_si512(acc + t * kGroupRows, sums[0][t]);
        _mm512_storeu_si512(acc + t * kGroupRows + 16, sums[1][t]);
    }
}

void block_tile(const uint8_t* w, const int8_t* a, int num_blocks, int tokens, int32_t* acc) {
    with_count<kMaxTileTokens>(tokens, [&](auto t) {
        if constexpr (t.value <= 6)
            tile_in_place<t.value, t.value <= 2 ? 2 : 1>(w, a, num_blocks, acc);
        else
            tile<t.value>(w, a, num_blocks, acc);
    });
}

// The fifth fields of a block are a step behind all others.
BITNET_APART void unpack_blocks(const uint8_t* w, int blocks, uint8_t* to) {
    const T5Decoder decoder;
    uint8_t* last = to + 4 * blocks * kUnpackedBytes;
    for (; blocks > 0; blocks--)
        for (int s = 0; s < 4; s++, w += kStepBytes, to += kUnpackedBytes, last += kFieldBytes)
            for (int half = 0; half < 128; half += 64) {
                const T5Fields fields = decoder(_mm512_loadu_si512(w + half));
                unpack_fields(to + half, fields.first_four());
                _mm512_store_si512(last + half, field(fields.upper, 3));
            }
}

void many_product(const ManyTask& t) { unpacked_product(t, t.is_t5 ? unpack_blocks : unpack_steps); }

}  // namespace

void bitnet::add_avx512vbmi(Kernels& kernels) {
    kernels.block_tile = block_tile;
    kernels.many_product = many_product;
    kernels.many_tokens = 9;  // decoding in registers is dearer
}
