// Attention over the paged cache: all segments that queries see, and those of the next queries. One segment, and the
// order of its sums, is in attention_segments.h.
#pragma once
#include "attention_segments.h"

namespace {

using namespace bitnet;

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

inline void divide(int padded_dim, const Query* queries, int count, int head_dim, const Attended& all) {
    for (int i = 0; i < count; i++)
        for (int d = 0; d < head_dim; d++) queries[i].out[d] = all.sums[i * padded_dim + d] / all.states[i].total;
}

// Up to kNearQueries, kQueries at a time; each segment for all of them before the next one.
template <class Way, Dtype D>
void attend_queries(const AttendTask& t, const Query* queries, int count, const Attended* piece) {
    const int padded = t.layout.padded_dim, dim = t.layout.head_dim, length = queries[count - 1].length;
    Softmax states[kNearQueries], more_states[kQueries];
    float* sums = t.scratch + kQueries * kScoreRow * 3 / 2;
    const Attended more{more_states, sums};
    const Attended all{states, sums + kQueries * padded};
    float* q = all.sums + count * padded;
    const auto each = [&](auto f) {
        for (int i = 0; i < count; i += kQueries)
            f(i, queries + i, count - i < kQueries ? count - i : kQueries, Attended{states + i, all.sums + i * padded});
    };
    bool is_near = false;
    const auto attend_to = [&](int segment, int from, int some, const Attended& to) {
        const Query* first = queries + from;
        const int begin = segment * kSegmentTokens, seen = first->first / kBlockTokens * kBlockTokens;
        const int end = begin + kSegmentTokens, known = first[some - 1].length;
        const Segment part{t, begin < seen ? seen : begin, end < known ? end : known, length, is_near};
        Way::template attend<D>(part, first, some, q + from * dim, to);
        is_near = true;
    };
    each([&](int i, const Query* some, int n, const Attended&) { Way::template take<D>(t, some, n, q + i * dim); });
    if (piece) return attend_to(t.segment, 0, count, *piece);
    for (int segment = queries[0].first / kSegmentTokens; segment * kSegmentTokens < length; segment++) {
        is_near = false;
        each([&](int i, const Query* some, int n, const Attended& to) {
            const int start = some[0].first / kSegmentTokens;
            if (segment < start || some[n - 1].length <= segment * kSegmentTokens) return;
            if (segment == start) return attend_to(segment, i, n, to);
            attend_to(segment, i, n, more);
            for (int k = 0; k < n; k++)
                if (some[k].length > segment * kSegmentTokens)
                    merge_segment(padded, to.states[k], to.sums + k * padded, more_states[k], more.sums + k * padded);
        });
    }
    divide(padded, queries, count, dim, all);
}

// What a segment gives for the query heads from `head` on.
inline Attended piece_of(const AttendTask& t, int segment, int head) {
    float* at = t.pieces + segment * t.piece_floats;
    return {(Softmax*)(at + t.num_heads * t.layout.padded_dim) + head, at + head * t.layout.padded_dim};
}

// The queries of all heads of all tokens, at most so many at a time; of a piece they have one token.
template <class F>
BITNET_INLINE void each_queries(const AttendTask& t, int most, F f) {
    Query queries[kNearQueries];
    const int all = t.tokens * t.num_heads;
    for (int from = 0, count; from < all; from += count) {
        count = all - from < most ? all - from : most;
        for (int i = 0; i < count; i++) {
            const int token = (from + i) / t.num_heads, feature = (from + i) % t.num_heads * t.layout.head_dim;
            const int length = t.positions[token] + 1;
            queries[i] = {t.q + token * t.q_stride + feature, t.out + token * t.out_stride + feature,
                          t.window && t.window < length ? length - t.window : 0, length};
        }
        f(queries, count, from);
    }
}

template <class Way>
void attend_in(const AttendTask& t) {
    const auto run = t.layout.dtype == Dtype::f32  ? attend_queries<Way, Dtype::f32>
                     : t.layout.dtype == Dtype::i8 ? attend_queries<Way, Dtype::i8>
                                                   : attend_queries<Way, Dtype::bf16>;
    each_queries(t, t.pieces ? kQueries : kNearQueries, [&](const Query* queries, int count, int from) {
        const Attended piece = t.pieces ? piece_of(t, t.segment, from) : Attended{};
        run(t, queries, count, t.pieces ? &piece : nullptr);
    });
}

inline void attend_merge(const AttendTask& t) {
    const int padded = t.layout.padded_dim;
    each_queries(t, kQueries, [&](const Query* queries, int count, int from) {
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
