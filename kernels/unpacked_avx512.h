// Products of many tokens on AVX-512: some steps of the weights after the others become bytes, once for all tokens.
// What unpacks them would take the ports of `vpdpbusd` beside every tile again.
#pragma once
#include "products_avx512.h"
#include "tile_parts.h"

namespace {

// A byte of U2 as a byte each for its fields, which stand kFieldBytes apart.
BITNET_INLINE void unpack_fields(uint8_t* to, __m512i x) {
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) _mm512_store_si512(to + p * kFieldBytes, field(x, p));
}

BITNET_APART void unpack_steps(const uint8_t* w, int steps, uint8_t* to) {
    for (; steps > 0; steps--, w += bitnet::kStepBytes, to += kUnpackedBytes)
        for (int half = 0; half < 128; half += 64) unpack_fields(to + half, _mm512_loadu_si512(w + half));
}

// The sums of T tokens with what is unpacked of a group.
template <int T>
BITNET_APART void unpacked_tile(const uint8_t* bytes, const Span (&spans)[2], const int8_t* codes, bool is_first,
                                Ahead ahead, int32_t* acc) {
    __m512i sums[2][T];
#pragma GCC unroll 12
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
            sums[h][t] = is_first ? _mm512_setzero_si512() : _mm512_loadu_si512(acc + t * bitnet::kGroupRows + 16 * h);
    for (const Span& span : spans) {
        const int8_t* a = codes + span.first * 16 * T;
        for (int field = 0; field < 4 * span.count; field++, bytes += kFieldBytes, a += 4 * T) {
            if (field % 2) ahead.step();
            const __m512i u = _mm512_load_si512(bytes), v = _mm512_load_si512(bytes + 64);
#pragma GCC unroll 12
            for (int t = 0; t < T; t++) add_products_of(t, sums[0][t], sums[1][t], u, v, a + 4 * t);
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) _mm512_storeu_si512(acc + t * bitnet::kGroupRows + 16 * h, sums[h][t]);
}

// Kernels::many_product: unpack(weights, count, bytes) is what unpacks so many steps, or blocks of T5.
template <class Unpack>
BITNET_INLINE void unpacked_product(const bitnet::ManyTask& t, const Unpack& unpack) {
    alignas(64) uint8_t bytes[kChunkSteps * kUnpackedBytes];
    each_piece(t, [&](const Piece& piece) {
        unpack(piece.weights, piece.share.count, bytes);
        each_tile(t, [&](int first, int tokens, int tile) {
            const Ahead ahead = fetch_beside(t, piece.share, tile, first, tokens);
            with_count<bitnet::kMaxTileTokens>(tokens, [&](auto n) {
                unpacked_tile<n.value>(bytes, piece.spans, t.codes + first * t.padded, piece.share.begin == 0, ahead,
                                       t.acc + first * bitnet::kGroupRows);
            });
        });
    });
}

}  // namespace
