// AVX-512 with VNNI: one 32-bit lane is one output row; `vpdpbusd` multiplies four codes by four broadcast activations.
#include "lanes_avx512.h"
#include "products_avx512.h"
#include "tile_parts.h"
#include "unpacked_avx512.h"
#include "verbs.h"
#include "wide_products.h"

namespace {

// T tokens, F of the four fields in a pass over the columns. The fields are masked in place, not shifted: half the
// instructions beside the products. Their sums are shifted once at the end, which is exact: a sum stays below
// 192 * 127 * columns / 4 < 2^31 (kMaxColumns). Passes share a chunk of columns that stays in the nearest cache, and
// what is fetched ahead.
template <int T, int F>
void tile(const uint8_t* w, const int8_t* a, int steps, int32_t* acc) {
    constexpr int kChunk = F == 4 ? 1 << 30 : 96;
    __m512i masks[4];
    for (int p = 0; p < 4; p++) masks[p] = _mm512_set1_epi8(char(3 << 2 * p));
    for (int begin = 0; begin < steps; begin += kChunk) {
        const int end = steps - begin < kChunk ? steps : begin + kChunk;
        for (int first = 0; first < 4; first += F) {
            __m512i sums[F][2][T];
#pragma GCC unroll 4
            for (int f = 0; f < F; f++)
#pragma GCC unroll 12
                for (int t = 0; t < T; t++) sums[f][0][t] = sums[f][1][t] = _mm512_setzero_si512();
            const uint8_t* ws = w + begin * kStepBytes;
            const int8_t* as = a + (begin * 16 + 4 * first) * T;
            const uint8_t* next = ws + (F < 4 ? kChunk + kChunk / 4 * first : 0) * kStepBytes;
            for (int s = begin; s < end; s++, ws += kStepBytes, as += 16 * T) {
                if (F == 4 || F * s % 4 == first) {
                    const bool in_order = F < 4 && fetches_in_order;
                    in_order ? fetch(next) : fetch_ahead(ws);
                    in_order ? fetch(next + 64) : fetch_ahead(ws + 64);
                    next += kStepBytes;
                }
#pragma GCC unroll 4
                for (int f = 0; f < F; f++) {
                    const __m512i u = _mm512_and_si512(_mm512_loadu_si512(ws), masks[first + f]);
                    const __m512i v = _mm512_and_si512(_mm512_loadu_si512(ws + 64), masks[first + f]);
#pragma GCC unroll 12
                    for (int t = 0; t < T; t++)
                        add_products_of(t, sums[f][0][t], sums[f][1][t], u, v, as + 4 * (f * T + t));
                }
            }
#pragma GCC unroll 12
            for (int t = 0; t < T; t++)
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    int32_t* out = acc + t * kGroupRows + 16 * h;
                    __m512i sum = begin || first ? _mm512_loadu_si512(out) : _mm512_setzero_si512();
#pragma GCC unroll 4
                    for (int f = 0; f < F; f++)
                        sum =
                            _mm512_add_epi32(sum, _mm512_sra_epi32(sums[f][h][t], _mm_cvtsi32_si128(2 * (first + f))));
                    _mm512_storeu_si512(out, sum);
                }
        }
    }
}

void ternary_tile(const uint8_t* w, const int8_t* a, int steps, int tokens, int32_t* acc) {
    with_count<kMaxTileTokens>(tokens, [&](auto t) {
        // At least 10 sums under way hide the latency of a product, and 24 fit into the registers.
        tile<t.value, t.value <= 3 ? 4 : t.value <= 6 ? 2 : 1>(w, a, steps, acc);
    });
}

void many_product(const ManyTask& t) { unpacked_product(t, unpack_steps); }

int64_t int8_peak(int64_t iterations) {
    __m512i sums[12];
    for (__m512i& sum : sums) sum = _mm512_setzero_si512();
    __m512i w = _mm512_set1_epi8(1), a = _mm512_set1_epi8(3);
    for (int64_t i = 0; i < iterations; i++)
#pragma GCC unroll 12
        for (__m512i& sum : sums) add_products(sum, w, a);
    for (__m512i& sum : sums) asm volatile("" : : "v"(sum));
    return iterations * 12 * 64;
}

}  // namespace

const bitnet::Kernels* bitnet::avx512_kernels() {
    static constexpr Kernels kernels = [] {
        Kernels own = make_kernels("avx512", ternary_tile, int8_peak);
        own.dense = wide_dense;
        own.many_product = many_product;
        own.many_tokens = kMaxTileTokens + 1;  // a single tile unpacks its weights as fast in registers
        own.many_tile = kMaxTileTokens;
        return own;
    }();
    return &kernels;
}
