// AVX2 without VNNI: `vpmaddubsw` multiplies pairs into int16, which is widened before it can overflow.
#include "lanes_avx2.h"
#include "lookups_avx2.h"
#include "unpacked_avx2.h"
#include "verbs.h"
#include "wide_products.h"

namespace {

// A product of two codes (0..2) and two activations is at most 4 * 128 = 512 in size, 768 with the invalid code 3, and
// a step adds four: so many of them never wrap in int16.
constexpr int kStepsBeforeWidening = 10;

// sum += the products of pairs of codes and activations. gcc 12 would add the products of a step among each other
// before it adds them to the sums, and has too few registers for that.
inline void add_products(__m256i& sum, const __m256i& codes, const __m256i& activations) {
    __m256i products;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(codes), "x"(activations));
}

// Sums of Q registers times T tokens over so many steps that they fit into int16, of the registers from `first` on. The
// passes over the same steps share what is fetched ahead. The activations for a field stand `stride` bytes apart. Calls
// use(token, register, sums in int32) in the end.
template <class Steps, int T, int Q, class Use>
BITNET_INLINE void pass(const uint8_t* w, const int8_t* a, int stride, int begin, int end, int first, const Use& use) {
    constexpr int R = Steps::kRegisters;
    __m256i sums[Q][T];
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++)
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) sums[q][t] = _mm256_setzero_si256();
    w += begin * Steps::kBytes, a += Steps::kFields * begin * stride;
    for (int s = begin; s < end; s++, w += Steps::kBytes) {
        if (Q == R || Q * s % R == first) Steps::fetch_step(w);
#pragma GCC unroll 8
        for (int p = 0; p < Steps::kFields; p++, a += stride) {
            __m256i field[Q];
#pragma GCC unroll 4
            for (int q = 0; q < Q; q++) field[q] = Steps::field(w, p, first + q);
#pragma GCC unroll 12
            for (int t = 0; t < T; t++) {
                const __m256i b = broadcast(a + 4 * t);
#pragma GCC unroll 4
                for (int q = 0; q < Q; q++) add_products(sums[q][t], field[q], b);
            }
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) use(t, first + q, _mm256_madd_epi16(sums[q][t], _mm256_set1_epi16(1)));
}

// Registers at a time of the R that a step has: twelve sums under way, and what they are made of, fill the registers.
template <int T, int R>
constexpr int kAtOnce = T <= 2   ? R
                        : T <= 6 ? 2
                                 : 1;

// acc[token][8 * R] of all steps, which is added to what is there if `more`. A function of its own: gcc 12 runs out of
// registers where several are put into one.
template <class Steps, int T>
BITNET_APART void tile(const uint8_t* w, const int8_t* a, int stride, int steps, int32_t* acc, bool more = false) {
    constexpr int R = Steps::kRegisters, Q = kAtOnce<T, R>;
    for (int begin = 0; begin < steps; begin += kStepsBeforeWidening)
        for (int first = 0; first < R; first += Q)
            pass<Steps, T, Q>(w, a, stride, begin, least(steps, begin + kStepsBeforeWidening), first,
                              [&](int t, int r, __m256i sum) {
                                  int32_t* out = acc + 8 * (t * R + r);
                                  if (begin || more) sum = _mm256_add_epi32(sum, load_register(out));
                                  _mm256_storeu_si256((__m256i*)out, sum);
                              });
}

// Kernels::group_tile: a group of columns is what fits into int16.
template <class Steps, int T>
BITNET_APART void scaled_tile(const GroupTask& task) {
    constexpr int R = Steps::kRegisters, Q = kAtOnce<T, R>, S = Steps::kFields / 4;
    const int end = task.steps / S, group = task.group_steps / S;
    const int32_t* minus_sums = task.minus_sums;
    int64_t at = 0;  // of the scales
    for (int begin = 0; begin < end; begin += group, at += kGroupRows, minus_sums++) {
        float scales[kGroupRows];
        for (int i = 0; i < kGroupRows; i += 16) store(scales + i, load_scales(task.scales, at + i));
        for (int first = 0; first < R; first += Q)
            pass<Steps, T, Q>(task.weights, task.codes, 4 * T, begin, least(end, begin + group), first,
                              [&](int t, int r, __m256i sum) {
                                  float* out = task.totals + 8 * (t * R + r);
                                  const __m256i minus = _mm256_set1_epi32(minus_sums[t * task.sums_stride]);
                                  const __m256 total = begin ? _mm256_loadu_ps(out) : _mm256_setzero_ps();
                                  const __m256 whole = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, minus));
                                  _mm256_storeu_ps(out, _mm256_fmadd_ps(whole, _mm256_loadu_ps(scales + 8 * r), total));
                              });
    }
}

void ternary_tile(const uint8_t* w, const int8_t* a, int steps, int tokens, int32_t* acc) {
    with_count<kMaxTileTokens>(tokens, [&](auto t) { tile<Packed<4>, t.value>(w, a, 4 * t.value, steps, acc); });
}

// What is unpacked, for unpacked_product.
struct UnpackedTile {
    template <int T>
    static void run(const uint8_t* bytes, const int8_t* a, int stride, int steps, int32_t* acc, bool more) {
        tile<Unpacked, T>(bytes, a, stride, steps, acc, more);
    }
};

void group_tile_in_int16(const GroupTask& task) {
    with_count<kMaxTileTokens>(task.tokens, [&](auto t) {
        task.one_bit ? scaled_tile<OneBit, t.value>(task) : scaled_tile<Packed<4>, t.value>(task);
    });
}

// The low bits of a head are steps of two registers.
void head_sums2_in_int16(const HeadTask& task) {
    with_count<kHeadVectors>(task.vectors, [&](auto v) {
        for (int i = 0; i < task.tiles; i++)
            tile<Packed<2>, v.value>(task.weights2 + int64_t(i) * task.steps * kHeadBytes2, task.codes, 4 * v.value,
                                     task.steps, task.acc + i * kHeadTaskVectors * kHeadRows);
    });
}

// sum += the products of four codes and activations twice; 4 * 63 * 128 fits into int16.
inline void add_products(__m256i& sum, const __m256i* codes, const int8_t* activations, const int8_t* others) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i products, more;
    asm("vpmaddubsw %5, %3, %1\n\tvpmaddubsw %6, %4, %2\n\tvpaddw %2, %1, %1\n\t"
        "vpmaddwd %7, %1, %1\n\tvpaddd %1, %0, %0"
        : "+x"(sum), "=&x"(products), "=&x"(more)
        : "x"(codes[0]), "x"(codes[1]), "x"(broadcast(activations)), "x"(broadcast(others)), "x"(ones));
}

// The four fields of eight rows of 6-bit codes (verbs_screen.h), two and two.
inline void first_fields6(const uint8_t* w, __m256i* fields) {
    const __m256i low = load_register(w), high = load_register(w + 128);
    const __m256i four = _mm256_set1_epi8(15), two = _mm256_set1_epi8(48);
    fields[0] = _mm256_or_si256(_mm256_and_si256(low, four), _mm256_and_si256(_mm256_slli_epi16(high, 4), two));
    fields[1] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low, 4), four),
                                _mm256_and_si256(_mm256_slli_epi16(high, 2), two));
}
inline void last_fields6(const uint8_t* w, __m256i* fields) {
    const __m256i middle = load_register(w + 64), high = load_register(w + 128);
    const __m256i four = _mm256_set1_epi8(15), two = _mm256_set1_epi8(48);
    fields[0] = _mm256_or_si256(_mm256_and_si256(middle, four), _mm256_and_si256(high, two));
    fields[1] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(middle, 4), four),
                                _mm256_and_si256(_mm256_srli_epi16(high, 2), two));
}

template <int V>
BITNET_APART void tile6(const uint8_t* w, const int8_t* a, int steps, int32_t* acc) {
    constexpr int Q = V <= 4 ? 2 : 1;
    for (int first = 0; first < 2; first += Q) {
        __m256i sums[Q][V];
#pragma GCC unroll 2
        for (int q = 0; q < Q; q++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[q][v] = _mm256_setzero_si256();
        const uint8_t* ws = w + 32 * first;
        const int8_t* as = a;
        for (int s = 0; s < steps; s++, ws += kHeadBytes6, as += 16 * V) {
            if (!first)
#pragma GCC unroll 3
                for (int line = 0; line < kHeadBytes6; line += 64) fetch_ahead(ws + line);
#pragma GCC unroll 2
            for (int q = 0; q < Q; q++) {
                __m256i fields[2];
                first_fields6(ws + 32 * q, fields);
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) add_products(sums[q][v], fields, as + 4 * v, as + 4 * (V + v));
                last_fields6(ws + 32 * q, fields);
#pragma GCC unroll 8
                for (int v = 0; v < V; v++)
                    add_products(sums[q][v], fields, as + 4 * (2 * V + v), as + 4 * (3 * V + v));
            }
        }
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
#pragma GCC unroll 2
            for (int q = 0; q < Q; q++)
                _mm256_storeu_si256((__m256i*)(acc + v * kHeadRows + 8 * (first + q)), sums[q][v]);
    }
}

void head_sums6_in_pairs(const HeadTask& task) {
    with_count<kHeadVectors>(task.vectors, [&](auto v) {
        for (int i = 0; i < task.tiles; i++)
            tile6<v.value>(task.weights6 + int64_t(i) * task.steps * kHeadBytes6, task.codes, task.steps,
                           task.acc + i * kHeadTaskVectors * kHeadRows);
    });
}

int64_t int8_peak(int64_t iterations) {
    __m256i sums[12];
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    const __m256i w = _mm256_set1_epi8(1), a = _mm256_set1_epi8(3);
    for (int64_t i = 0; i < iterations; i++)
#pragma GCC unroll 12
        for (__m256i& sum : sums) add_products(sum, w, a);
    for (__m256i& sum : sums) asm volatile("" : : "x"(sum));
    return iterations * 12 * 32;
}

}  // namespace

const bitnet::Kernels* bitnet::avx2_kernels() {
    static constexpr Kernels kernels = [] {
        Kernels own = make_kernels("avx2", ternary_tile, int8_peak);
        own.group_tile = group_tile_in_int16;
        own.signs_product = signs_product;
        own.signs_tokens = 3;
        own.signs_tile = kMaxTileTokens;
        own.dense = wide_dense;
        own.many_product = unpacked_product<UnpackedTile>;
        own.many_tokens = 18;
        own.many_tile = kMaxTileTokens;
        own.rough_inputs = 1;
        own.cost_of_help = 8'000'000;
        own.head_sums2 = head_sums2_in_int16;
        own.head_sums6 = head_sums6_in_pairs;
        own.head_sums8 = head_sums8_in_parts<head_sums6_in_pairs, head_sums2_in_int16>;
        return own;
    }();
    return &kernels;
}
