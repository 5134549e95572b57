// Attention to a segment of the paged cache.
//
// For each query head and each segment of 256 positions: scores; weights, which are exp of a score less the largest of
// the segment; and the sum of the values by their weights. Segments are merged in ascending order.
//
// A sum is added as AMX adds it, which other instruction sets can do alike: of every 32 features or positions the
// products of the even ones are added onto 0 by fused multiply-adds in ascending order, so are those of the odd ones,
// and the sum of both is added to what came before. AMX takes numbers below 2^-126 for 0, so `attend` is called with
// FloatMode::flushing, and it multiplies bfloat16: unless the cache is float32, queries and weights are rounded to it.
// Nothing depends on which tokens or heads are computed together: up to 256 queries of one key head, of whichever
// tokens, take a segment while it is in the second cache, 32 walk over a block while it is in the nearest, and up to 8
// share what is loaded.
#pragma once
#include "cache_tiles.h"

namespace {

using namespace bitnet;

constexpr int kSumPairs = 16;  // pairs of numbers of which both chains are added up on their own

struct Softmax {
    float largest, total;
};

inline float exp_scalar(float x) {
    float lanes[16];
    store(lanes, exp(set1(x)));
    return lanes[0];
}

// One query: the features of one head of one token, and the positions that it attends to: first .. length - 1.
struct Query {
    const float* q;
    float* out;
    int first, length;
    // How many of the positions from p to p + n - 1 come before `length`.
    int count(int p, int n) const { return length < p ? 0 : length - p < n ? length - p : n; }
};

// What attention to some positions gives for each query, before it is divided by the total.
struct Attended {
    Softmax* states;
    float* sums;  // [queries][padded_dim]
};

// So many queries at a time share what is loaded of the cache.
template <int G>
struct Group {
    static constexpr int size = G;
};
template <class F>
BITNET_INLINE void each_group(int queries, F f) {
    int i = 0;
    if constexpr (kLaneSums >= 16)
        for (; i + 8 <= queries; i += 8) f(i, Group<8>());
    for (; i + 4 <= queries; i += 4) f(i, Group<4>());
    if (queries - i == 3) f(i, Group<3>());
    if (queries - i == 2) f(i, Group<2>());
    if (queries - i == 1) f(i, Group<1>());
}

// The keys or the values that are read next, whose places the processor cannot guess, are fetched while others are
// read: a tile for every tile, from four pages in turn; or in order, evenly in both chains of the sums, if it is
// large enough into the nearest cache.
struct Next {
    const uint8_t* places[4];  // null where other queries have fetched them
    template <Dtype D, int G>
    BITNET_INLINE void fetch_tile(uint32_t tile, int chain) const {
        const bool in_order = fetches_in_order;
        if ((G > 4 && !places[0]) || chain != (in_order ? int(tile % 2) : 0)) return;
        const uint8_t* p = in_order ? places[0] + tile * Tile<D>::bytes : places[tile % 4] + tile / 4 * Tile<D>::bytes;
        for (int line = 0; line < Tile<D>::bytes; line += 64) fetches_near ? fetch_near(p + line) : fetch(p + line);
    }
};

// The sums of the even products, then those of the odd ones, and both together: f(which, sums) adds to them.
template <int A, int B, class F>
BITNET_INLINE void add_both(Lanes (&sums)[A][B], F f) {
    const auto chain = [&](auto which, Lanes(&x)[A][B]) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int a = 0; a < A; a++)
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) x[a][b] = set1(0.0f);
        f(which, x);
    };
    Lanes odd[A][B];
    chain(Group<0>(), sums);
    chain(Group<1>(), odd);
#pragma GCC unroll 8
    for (int a = 0; a < A; a++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) sums[a][b] = add(sums[a][b], odd[a][b]);
}

// How an instruction set multiplies numbers of the cache with those of queries, and with weights: one by one.
template <Dtype D>
struct OneByOne {
    static constexpr int tiles = 1;  // of which the even numbers, or the odd ones, are factors of one product
    using Number = float;            // the other factor
    using Factor = Lanes;
    template <int Which>
    BITNET_INLINE static Factor get(const uint8_t* tile, int64_t) {
        return Tile<D>::template get<Which>(tile);
    }
    BITNET_INLINE static void add(Lanes& sum, const Factor& factor, const Number& number) {
        sum = fma(set1(number), factor, sum);
    }
    // Queries of a group side by side, so that one pointer walks along them all.
    static void take(int head_dim, const Query* queries, int count, Number* q) {
        each_group(count, [&](int i, auto group) {
            for (int g = 0; g < group.size; g++) {
                float* to = q + i * head_dim + 2 * g;
                for (int d = 0; d < head_dim; d += 2) std::memcpy(to + d * group.size, queries[i + g].q + d, 8);
            }
        });
        if constexpr (D != Dtype::f32)
            for (int d = 0; d < count * head_dim; d++) q[d] = from_bf16(to_bf16(q[d]));
    }
    // Weights stand where scores did.
    static Number* weights(float* scores) { return scores; }
    BITNET_INLINE static void pack(Number*, const Lanes&) {}
};

// The products of 32 positions with G queries, which stand as [pairs of features of as many tiles][G][2], without the
// scale.
template <class Products, Dtype D, int G>
BITNET_APART void score_block(const AttendTask& t, const uint8_t* keys, const Next& next,
                              const typename Products::Number* q, float* scores) {
    constexpr int tiles = Products::tiles;
    constexpr int halves = 2 * G <= kLaneSums ? 2 : 1;  // at once
    const int pairs = t.layout.head_dim / 2;
    for (int half = 0; half < 2; half += halves) {
        Lanes all[G][halves];
#pragma GCC unroll 8
        for (int g = 0; g < G; g++)
#pragma GCC unroll 2
            for (int i = 0; i < halves; i++) all[g][i] = set1(0.0f);
        for (int begin = 0; begin < pairs; begin += kSumPairs) {
            const int end = pairs - begin < kSumPairs ? pairs : begin + kSumPairs;
            Lanes sums[G][halves];
            add_both(sums, [&](auto which, Lanes(&x)[G][halves]) __attribute__((always_inline)) {
                for (int p = begin; p < end; p += tiles) {
                    typename Products::Factor key[halves];
#pragma GCC unroll 2
                    for (int i = 0; i < halves; i++) {
                        const uint8_t* tile = keys + (int64_t(half + i) * pairs + p) * Tile<D>::bytes;
                        key[i] = Products::template get<which.size>(tile, Tile<D>::bytes);
#pragma GCC unroll 2
                        for (int k = 0; k < tiles; k++)
                            next.fetch_tile<D, G>(uint32_t(half * pairs + (p + k) * halves + i), which.size);
                    }
#pragma GCC unroll 8
                    for (int g = 0; g < G; g++)
#pragma GCC unroll 2
                        for (int i = 0; i < halves; i++)
                            Products::add(x[g][i], key[i], q[(p / tiles * G + g) * 2 + which.size]);
                }
            });
#pragma GCC unroll 8
            for (int g = 0; g < G; g++)
#pragma GCC unroll 2
                for (int i = 0; i < halves; i++) all[g][i] = add(all[g][i], sums[g][i]);
        }
#pragma GCC unroll 8
        for (int g = 0; g < G; g++)
#pragma GCC unroll 2
            for (int i = 0; i < halves; i++) {
                const int from = 16 * (half + i);
                if constexpr (D == Dtype::i8) all[g][i] = mul(all[g][i], load(scales_of(t.layout, keys) + from));
                store(scores + g * kScoreRow + from, all[g][i]);
            }
    }
}

constexpr int kWeighed = 64;

// Turns products into scores, and gives the largest: of those from .. to - 1 of the segment, of which the query may see
// none. The others become -infinity, up to a multiple of kWeighed.
BITNET_APART float scale_scores(float* scores, int width, float scale, int from, int to) {
    const Lanes none = set1(-INFINITY);
    Lanes largest = none;
    for (int i = 0; i < width; i += 16) {
        Lanes score = mul(load(scores + i), set1(scale));
        if (to - i < 16) score = first(to - i, score, none);
        if (from > i) score = first(from - i, none, score);
        store(scores + i, score);
        largest = max(score, largest);
    }
    for (int i = width; i % kWeighed != 0; i += 16) store(scores + i, none);
    return reduce_max(largest);
}

// Turns scores into weights against the largest of them, and gives their total.
template <Dtype D, class Packed>
BITNET_APART float weigh(float* scores, int width, float largest, Packed packed) {
    const Lanes subtracted = set1(largest);
    Lanes totals = set1(0.0f);
    for (int i = 0; i < width; i += kWeighed) {
        constexpr int at_once = kWeighed / 16;
        Lanes w[at_once];
        for (int k = 0; k < at_once; k++) w[k] = sub(load(scores + i + 16 * k), subtracted);
        exp_each(w);
        for (int k = 0; k < at_once; k++) {
            if constexpr (D == Dtype::bf16) w[k] = round_to_bf16(w[k]);
            store(scores + i + 16 * k, w[k]);
            packed(i + 16 * k, w[k]);
            totals = add(totals, w[k]);
        }
    }
    return reduce_add(totals);
}

// Adds the values of the first positions of a block to N tiles of features of G queries. The weights stand in two
// forms: as the products take them, and one by one for positions that are left.
template <class Products, Dtype D, int G, int N>
BITNET_INLINE void add_tiles(const uint8_t* values, const Next& next, uint32_t fetched, int tiles, int count,
                             const typename Products::Number* weights, const float* each, float* sums) {
    Lanes here[G][N];
    add_both(here, [&](auto which, Lanes(&x)[G][N]) __attribute__((always_inline)) {
        const uint8_t* row = values;
        const int64_t to_next = int64_t(tiles) * Tile<D>::bytes;
        const auto add = [&](auto way, int j, const auto* numbers) __attribute__((always_inline)) {
            using Way = decltype(way);
            typename Way::Factor value[N];
#pragma GCC unroll 4
            for (int d = 0; d < N; d++) {
                value[d] = Way::template get<which.size>(row + d * Tile<D>::bytes, to_next);
#pragma GCC unroll 2
                for (int k = 0; k < Way::tiles; k++)
                    next.fetch_tile<D, G>(fetched + uint32_t((j / 2 + k) * N + d), which.size);
            }
#pragma GCC unroll 8
            for (int g = 0; g < G; g++)
#pragma GCC unroll 4
                for (int d = 0; d < N; d++)
                    Way::add(x[g][d], value[d], numbers[(g * kScoreRow + j) / Way::tiles + which.size]);
            row += Way::tiles * to_next;
        };
        constexpr int at_once = 2 * Products::tiles;
        int j = 0;
        for (; j + at_once <= count; j += at_once) add(Products(), j, weights);
        for (; j + which.size < count; j += 2) add(OneByOne<D>(), j, each);
    });
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int d = 0; d < N; d++) {
            float* sum = sums + (g * tiles + d) * 16;
            store(sum, add(load(sum), here[g][d]));
        }
}

template <class Products, Dtype D, int G>
BITNET_APART void add_values(const AttendTask& t, const uint8_t* values, const Next& next, int count,
                             const typename Products::Number* weights, const float* each, float* sums) {
    constexpr int at_once = kLaneSums / G > 4 ? 4 : kLaneSums / G > 1 ? kLaneSums / G : 1;
    const int tiles = t.layout.padded_dim / 16;
    const auto add = [&](int d, auto several) {
        add_tiles<Products, D, G, several.size>(values + d * Tile<D>::bytes, next, uint32_t(d * (kBlockTokens / 2)),
                                                tiles, count, weights, each, sums + d * 16);
    };
    int d = 0;
    for (; d + at_once <= tiles; d += at_once) add(d, Group<at_once>());
    for (; d < tiles; d++) add(d, Group<1>());
}

// The positions begin .. end - 1, all within a segment, of sequences of `length`. Their keys are read block by block,
// and then their values.
struct Segment {
    const AttendTask& t;
    int begin, end, length;
    bool is_near;  // whether others have read it just now, and no near cache lacks it
    const uint8_t* keys(int p) const {
        return t.cache + t.blocks[p / kBlockTokens] * t.layout.block_stride + t.kv_head * t.layout.head_bytes;
    }
    const uint8_t* values(int p) const { return keys(p) + t.layout.key_bytes; }
    int offset(int p) const { return p % kSegmentTokens; }
    int width() const { return (end - begin + kBlockTokens - 1) / kBlockTokens * kBlockTokens; }
    Next after_keys(int p) const { return after((p - begin) / kBlockTokens); }
    Next after_values(int p) const { return after((p - begin + width()) / kBlockTokens); }

  private:
    // What is read as number i, or some time thereafter.
    const uint8_t* read(int i) const {
        const int p = begin + i * kBlockTokens, width = this->width();
        if (i * kBlockTokens < width) return keys(p);
        if (p - width < end) return values(p - width);
        if (p - 2 * width + end - begin < length) return keys(p - 2 * width + end - begin);
        return t.next + i % 2 * t.layout.key_bytes;
    }
    Next after(int i) const {
        if (fetches_in_order) return {{read(i + 2)}};
        const int64_t half = t.layout.key_bytes / 2, at = i % 2 * half / 2;
        const uint8_t *first = read(i / 2 * 2 + 2) + at, *second = read(i / 2 * 2 + 3) + at;
        return {{first, first + half, second, second + half}};
    }
};

// The weights of all queries, of which the lanes from k on of query i go to packed(i, k, lanes) too. The largest score
// of each is known before the first is weighed, so that none waits for it.
template <Dtype D, class Packed>
void weigh_all(const Segment& segment, const Query* queries, int count, const Attended& to, Packed packed) {
    const int at = segment.offset(segment.begin), width = segment.width();
    float* scores = segment.t.scratch + at;
    const auto first = [&](int i) { return queries[i].first - segment.begin; };
    const auto end = [&](int i) { return queries[i].length - segment.begin; };
    for (int i = 0; i < count; i++)
        to.states[i].largest = scale_scores(scores + i * kScoreRow, width, segment.t.scale, first(i), end(i));
    for (int i = 0; i < count; i++)
        to.states[i].total =
            weigh<D>(scores + i * kScoreRow, width, first(i) < width && end(i) > 0 ? to.states[i].largest : 0.0f,
                     [&](int k, const Lanes& w) __attribute__((always_inline)) { packed(i, at + k, w); });
}

// The values of the block from p on, whose positions some queries may not see all of.
template <class Products, Dtype D>
void add_block(const Segment& segment, int p, const Query* queries, int count, float* scores, const Attended& to) {
    const AttendTask& t = segment.t;
    Next next = segment.after_values(p);
    for (int i = 0, same; i < count; i += same) {
        const int seen = queries[i].count(p, kBlockTokens);
        for (same = 1; i + same < count && queries[i + same].count(p, kBlockTokens) == seen;) same++;
        if (!seen) continue;
        const int first = i * kScoreRow + segment.offset(p);
        if constexpr (D == Dtype::i8)
            for (int k = 0; k < same * 2; k++) {
                float* at = scores + first + k / 2 * kScoreRow + k % 2 * 16;
                const float* scales = scales_of(t.layout, segment.keys(p)) + kBlockTokens + k % 2 * 16;
                store(at, round_to_bf16(mul(load(at), load(scales))));
            }
        each_group(same, [&](int k, auto group) {
            if (group.size > 4 && (i + k || segment.is_near)) next.places[0] = nullptr;
            const int at = first + k * kScoreRow;
            add_values<Products, D, group.size>(t, segment.values(p), next, seen,
                                                Products::weights(scores) + at / Products::tiles, scores + at,
                                                to.sums + (i + k) * t.layout.padded_dim);
        });
    }
}

// How an instruction set attends: with vectors.
template <template <Dtype> class ProductsOf>
struct InVectorsBy {
    template <Dtype D>
    using Products = ProductsOf<D>;
    template <Dtype D>
    using Number = typename Products<D>::Number;

    template <Dtype D>
    static void take(const AttendTask& t, const Query* queries, int count, float* q) {
        Products<D>::take(t.layout.head_dim, queries, count, (Number<D>*)q);
    }
    template <Dtype D>
    static void attend(const Segment& segment, const Query* queries, int count, const float* q, const Attended& to) {
        const AttendTask& t = segment.t;
        constexpr int tiles = Products<D>::tiles;
        float* scores = t.scratch;
        for (int p = segment.begin; p < segment.end; p += kBlockTokens) {
            Next next = segment.after_keys(p);
            each_group(count, [&](int i, auto group) {
                if (group.size > 4 && (i || segment.is_near)) next.places[0] = nullptr;
                score_block<Products<D>, D, group.size>(t, segment.keys(p), next,
                                                        (const Number<D>*)q + i * t.layout.head_dim / tiles,
                                                        scores + i * kScoreRow + segment.offset(p));
            });
        }
        weigh_all<D>(segment, queries, count, to, [&](int i, int k, const Lanes& w) __attribute__((always_inline)) {
            Products<D>::pack(Products<D>::weights(scores) + (i * kScoreRow + k) / tiles, w);
        });
        std::memset(to.sums, 0, size_t(count) * t.layout.padded_dim * 4);
        for (int p = segment.begin; p < segment.end; p += kBlockTokens)
            add_block<Products<D>, D>(segment, p, queries, count, scores, to);
    }
};
using InVectors = InVectorsBy<OneByOne>;

}  // namespace
