// Attention over the paged cache.
//
// For each query head: the scores of a block of 32 positions, each summed over ascending features; exp against the
// running maximum of the segment; values added in ascending positions. Segments of 256 positions start afresh and are
// merged in ascending order. Nothing depends on which tokens or heads are computed together: up to 16 queries of one
// key head, of whichever tokens, walk over a block while it is in the nearest cache, and up to 8 share what is loaded.
#pragma once
#include "verbs_cache.h"

namespace {

using namespace bitnet;

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

// The next block, whose place the processor cannot guess, is fetched while this one is read: a tile for every tile. A
// token that decodes waits for memory, and has it fetched in four places in turn.
struct NextBlock {
    const uint8_t* data;  // null where other queries have fetched it
    int64_t quarter;      // tiles
    template <Dtype D, int G>
    BITNET_INLINE void fetch_tile(uint32_t tile) const {
        constexpr uint32_t places = G > 4 ? 1 : 4;
        if (G > 4 && !data) return;
        const uint8_t* p = data + (tile % places * quarter + tile / places) * Tile<D>::bytes;
        fetch(p);
        if (Tile<D>::bytes > 64) fetch(p + 64);
    }
};

// The scores of up to 32 positions for G queries, which stand as [pair of features][G][2]; those of query g from
// counts[g] on are -inf.
template <Dtype D, int G>
BITNET_APART void score_block(const AttendTask& t, const uint8_t* keys, const NextBlock& next, const float* q,
                              const int* counts, float (*scores)[32]) {
    constexpr int halves = 2 * G <= kLaneSums ? 2 : 1;  // at once
    const int pairs = t.layout.head_dim / 2;
    for (int half = 0; half < 2; half += halves) {
        Lanes sums[G][halves], low[halves], high[halves];
#pragma GCC unroll 8
        for (int g = 0; g < G; g++)
#pragma GCC unroll 2
            for (int i = 0; i < halves; i++) sums[g][i] = set1(0.0f);
        for (int p = 0; p < pairs; p++) {
#pragma GCC unroll 2
            for (int i = 0; i < halves; i++) {
                const uint8_t* tile = keys + (int64_t(half + i) * pairs + p) * Tile<D>::bytes;
                Tile<D>::get(tile, low[i], high[i]);
                next.fetch_tile<D, G>(uint32_t(half * pairs + p * halves + i));
            }
#pragma GCC unroll 8
            for (int g = 0; g < G; g++)
#pragma GCC unroll 2
                for (int i = 0; i < halves; i++) {
                    const float* pair = q + (p * G + g) * 2;
                    sums[g][i] = fma(set1(pair[1]), high[i], fma(set1(pair[0]), low[i], sums[g][i]));
                }
        }
#pragma GCC unroll 8
        for (int g = 0; g < G; g++)
#pragma GCC unroll 2
            for (int i = 0; i < halves; i++) {
                const int from = 16 * (half + i);
                Lanes score = mul(sums[g][i], set1(t.scale));
                if constexpr (D == Dtype::i8) score = mul(score, load(scales_of(t.layout, keys) + from));
                store(scores[g] + from, first(counts[g] - from, score, set1(-INFINITY)));
            }
    }
}

// Turns scores into weights against the new maxima; corrections are what the earlier sums must be multiplied by.
// Nothing changes for a query that has no position here.
template <int G>
BITNET_APART void weigh_block(float (*scores)[32], const int* counts, Softmax* states, float* corrections) {
    float largest[G];
    alignas(64) float drops[16] = {};
    for (int g = 0; g < G; g++) {
        const float here = reduce_max(max(load(scores[g]), load(scores[g] + 16)));
        largest[g] = states[g].largest > here ? states[g].largest : here;
        drops[g] = states[g].largest - largest[g];
    }
    store(corrections, exp(load(drops)));
    constexpr int at_once = kLaneSums >= 16 && G % 2 == 0 ? 2 : 1;
    float totals[G];
    for (int g = 0; g < G; g += at_once) {
        Lanes w[2 * at_once];
        for (int i = 0; i < 2 * at_once; i++)
            w[i] = sub(load(scores[g + i / 2] + i % 2 * 16), set1(largest[g + i / 2]));
        exp_each(w);
        for (int i = 0; i < 2 * at_once; i++) store(scores[g + i / 2] + i % 2 * 16, w[i]);
        for (int i = 0; i < at_once; i++) totals[g + i] = reduce_add(add(w[2 * i], w[2 * i + 1]));
    }
    for (int g = 0; g < G; g++) {
        if (!counts[g] || states[g].total == 0.0f) corrections[g] = counts[g] ? 0.0f : 1.0f;
        if (counts[g]) states[g] = {largest[g], std::fma(states[g].total, corrections[g], totals[g])};
    }
}

// Adds the values of the positions from .. to - 1 to N tiles of features of G queries.
template <Dtype D, int G, int N>
BITNET_INLINE void add_tiles(const uint8_t* values, const NextBlock& next, uint32_t fetched, int tiles, int from,
                             int to, const float (*weights)[32], const float* corrections, float* sums) {
    Lanes s[G][N];
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int d = 0; d < N; d++) s[g][d] = mul(load(sums + (g * tiles + d) * 16), set1(corrections[g]));
    const int64_t row_bytes = int64_t(tiles) * Tile<D>::bytes;
    const uint8_t* row = values + from / 2 * row_bytes;
    Lanes low[N], high[N];
    const auto get = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int d = 0; d < N; d++) Tile<D>::get(row + d * Tile<D>::bytes, low[d], high[d]);
        row += row_bytes;
    };
    const auto add = [&](int j, const Lanes(&x)[N]) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int g = 0; g < G; g++)
#pragma GCC unroll 4
            for (int d = 0; d < N; d++) s[g][d] = fma(set1(weights[g][j]), x[d], s[g][d]);
    };
    int j = from;
    if (j % 2) get(), add(j++, high);
    for (; j + 1 < to; j += 2) {
        get();
#pragma GCC unroll 4
        for (int d = 0; d < N; d++) next.fetch_tile<D, G>(fetched++);
        add(j, low), add(j + 1, high);
    }
    if (j < to) get(), add(j, low);
#pragma GCC unroll 8
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int d = 0; d < N; d++) store(sums + (g * tiles + d) * 16, s[g][d]);
}

template <Dtype D, int G>
BITNET_APART void add_values(const AttendTask& t, const uint8_t* values, const NextBlock& next, int from, int to,
                             const float (*weights)[32], const float* corrections, float* sums) {
    constexpr int at_once = kLaneSums / G > 4 ? 4 : kLaneSums / G > 1 ? kLaneSums / G : 1;
    const int tiles = t.layout.padded_dim / 16;
    const auto add = [&](int d, auto count) {
        add_tiles<D, G, count.size>(values + d * Tile<D>::bytes, next,
                                    uint32_t(t.layout.head_dim + d * (kBlockTokens / 2)), tiles, from, to, weights,
                                    corrections, sums + d * 16);
    };
    int d = 0;
    for (; d + at_once <= tiles; d += at_once) add(d, Group<at_once>());
    for (; d < tiles; d++) add(d, Group<1>());
}

// The block of positions from p on, for G queries.
template <Dtype D, int G>
void attend_block(const AttendTask& t, const uint8_t* block, const NextBlock& next, int p, const Query* queries,
                  const float* q, Softmax* states, float* sums) {
    float (*scores)[32] = (float (*)[32])(t.scratch);
    int counts[G], common = kBlockTokens;
    for (int g = 0; g < G; g++) {
        const int left = queries[g].first < p + kBlockTokens ? queries[g].length - p : 0;
        counts[g] = left < 0 ? 0 : left < kBlockTokens ? left : kBlockTokens;
        common = counts[g] < common ? counts[g] : common;
    }
    score_block<D, G>(t, block, next, q, counts, scores);
    for (int g = 0; g < G; g++)  // what a window has left behind
        for (int j = 0; j < queries[g].first - p && j < counts[g]; j++) scores[g][j] = -INFINITY;
    alignas(64) float corrections[16];
    weigh_block<G>(scores, counts, states, corrections);
    if constexpr (D == Dtype::i8)
        for (int g = 0; g < G; g++)
            for (int j = 0; j < counts[g]; j++) scores[g][j] *= scales_of(t.layout, block)[kBlockTokens + j];
    const uint8_t* values = block + t.layout.key_bytes;
    add_values<D, G>(t, values, next, 0, common, scores, corrections, sums);
    const float one = 1.0f;
    for (int g = 0; g < G; g++)  // what later tokens see and earlier ones do not
        if (counts[g] > common)
            add_values<D, 1>(t, values, next, common, counts[g], scores + g, &one, sums + g * t.layout.padded_dim);
}

template <Dtype D>
void attend_segment(const AttendTask& t, int begin, int end, const Query* queries, int count, const float* q,
                    const Attended& to) {
    for (int i = 0; i < count; i++) to.states[i] = {-INFINITY, 0.0f};
    std::memset(to.sums, 0, size_t(count) * t.layout.padded_dim * 4);
    for (int p = begin; p < end; p += kBlockTokens) {
        const int32_t* here = t.blocks + p / kBlockTokens;
        const auto place = [&](int32_t id) {
            return t.cache + id * t.layout.block_stride + t.kv_head * t.layout.head_bytes;
        };
        const uint8_t* block = place(here[0]);
        const bool is_last = p + kBlockTokens >= queries[count - 1].length;
        NextBlock next{is_last ? t.next : place(here[1]), (t.layout.head_dim + t.layout.padded_dim) / 4};
        each_group(count, [&](int i, auto group) {
            if (group.size > 4 && i) next.data = nullptr;
            attend_block<D, group.size>(t, block, next, p, queries + i, q + i * t.layout.head_dim, to.states + i,
                                        to.sums + i * t.layout.padded_dim);
        });
    }
}

inline void merge_segment(int padded_dim, Softmax& into, float* sums, const Softmax& from, const float* more) {
    if (into.total == 0.0f) {  // a window begins here: the sign of zeros counts too
        std::memcpy(sums, more, size_t(padded_dim) * 4);
        into = from;
        return;
    }
    const float largest = into.largest > from.largest ? into.largest : from.largest;
    const float a = exp_scalar(into.largest - largest), b = exp_scalar(from.largest - largest);
    for (int d = 0; d < padded_dim; d += 16)
        store(sums + d, fma(load(more + d), set1(b), mul(load(sums + d), set1(a))));
    into = {largest, std::fma(from.total, b, into.total * a)};
}

// Queries of a group side by side, so that one pointer walks along them all.
inline void interleave(const Query* queries, int count, int head_dim, float* q) {
    each_group(count, [&](int i, auto group) {
        for (int g = 0; g < group.size; g++) {
            const float* from = queries[i + g].q;
            float* to = q + i * head_dim + 2 * g;
            for (int d = 0; d < head_dim; d += 2) std::memcpy(to + d * group.size, from + d, 8);
        }
    });
}

inline void divide(int padded_dim, const Query* queries, int count, int head_dim, const Attended& all) {
    for (int i = 0; i < count; i++)
        for (int d = 0; d < head_dim; d++) queries[i].out[d] = all.sums[i * padded_dim + d] / all.states[i].total;
}

template <Dtype D>
void attend_queries(const AttendTask& t, const Query* queries, int count, const Attended* piece) {
    const int padded = t.layout.padded_dim, dim = t.layout.head_dim, length = queries[count - 1].length;
    const int seen = queries[0].first / kBlockTokens * kBlockTokens, start = queries[0].first / kSegmentTokens;
    Softmax states[kQueries], more_states[kQueries];
    float* q = t.scratch + 8 * kBlockTokens;
    const Attended all{states, q + count * dim}, more{more_states, all.sums + count * padded};
    interleave(queries, count, dim, q);
    const auto attend_to = [&](int segment, const Attended& to) {
        const int begin = segment * kSegmentTokens, end = begin + kSegmentTokens;
        attend_segment<D>(t, begin < seen ? seen : begin, end < length ? end : length, queries, count, q, to);
    };
    if (piece) return attend_to(t.segment, *piece);
    attend_to(start, all);
    for (int segment = start + 1; segment * kSegmentTokens < length; segment++) {
        attend_to(segment, more);
        for (int i = 0; i < count; i++)
            if (queries[i].length > segment * kSegmentTokens)
                merge_segment(padded, states[i], all.sums + i * padded, more_states[i], more.sums + i * padded);
    }
    divide(padded, queries, count, dim, all);
}

// What a segment gives for the query heads from `head` on.
inline Attended piece_of(const AttendTask& t, int segment, int head) {
    float* at = t.pieces + segment * t.piece_floats;
    return {(Softmax*)(at + t.num_heads * t.layout.padded_dim) + head, at + head * t.layout.padded_dim};
}

// The queries of all heads of all tokens, as many at a time as go together; of a piece they have one token.
template <class F>
BITNET_INLINE void each_queries(const AttendTask& t, F f) {
    Query queries[kQueries];
    const int all = t.tokens * t.num_heads;
    for (int from = 0, count; from < all; from += count) {
        count = all - from < kQueries ? all - from : kQueries;
        for (int i = 0; i < count; i++) {
            const int token = (from + i) / t.num_heads, feature = (from + i) % t.num_heads * t.layout.head_dim;
            const int length = t.positions[token] + 1;
            queries[i] = {t.q + token * t.q_stride + feature, t.out + token * t.out_stride + feature,
                          t.window && t.window < length ? length - t.window : 0, length};
        }
        f(queries, count, from);
    }
}

void attend(const AttendTask& t) {
    const auto run = t.layout.dtype == Dtype::f32  ? attend_queries<Dtype::f32>
                     : t.layout.dtype == Dtype::i8 ? attend_queries<Dtype::i8>
                                                   : attend_queries<Dtype::bf16>;
    each_queries(t, [&](const Query* queries, int count, int from) {
        const Attended piece = t.pieces ? piece_of(t, t.segment, from) : Attended{};
        run(t, queries, count, t.pieces ? &piece : nullptr);
    });
}

void attend_merge(const AttendTask& t) {
    const int padded = t.layout.padded_dim;
    each_queries(t, [&](const Query* queries, int count, int from) {
        const int start = queries[0].first / kSegmentTokens;
        const Attended all = piece_of(t, start, from);
        for (int segment = start + 1; segment * kSegmentTokens < queries[0].length; segment++) {
            const Attended more = piece_of(t, segment, from);
            for (int i = 0; i < count; i++)
                merge_segment(padded, all.states[i], all.sums + i * padded, more.states[i], more.sums + i * padded);
        }
        divide(padded, queries, count, t.layout.head_dim, all);
    });
}

}  // namespace
