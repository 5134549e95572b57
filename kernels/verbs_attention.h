// Rotary embedding, the paged cache and attention over it.
//
// For each query head: the scores of a block of 32 positions, each summed over ascending features; exp against the
// running maximum of the segment; values added in ascending positions. Segments of 256 positions start afresh and are
// merged in ascending order. Nothing depends on which tokens or heads are computed together.
#pragma once
#include "verbs_rows.h"

namespace {

using namespace bitnet;

// x[j], x[j + D/2] of every head turned by the angle of j (NeoX halves).
void rope(float* x, int num_heads, int head_dim, const float* cosine, const float* sine) {
    const int half = head_dim / 2;
    for (int h = 0; h < num_heads; h++, x += head_dim)
        for (int j = 0; j < half; j++) {
            const float a = x[j], b = x[j + half];
            x[j] = a * cosine[j] - b * sine[j];
            x[j + half] = b * cosine[j] + a * sine[j];
        }
}

BITNET_INLINE uint16_t to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return uint16_t(f == f ? rounded : bits >> 16 | 0x40);
}

template <Dtype D>
struct Tile;  // 16 lanes x 2 in the cache: item [lane, which] stands at lane * lane_step + which * which_step

template <>
struct Tile<Dtype::bf16> {
    using Item = uint16_t;
    static constexpr int bytes = 64, lane_step = 2, which_step = 1;
    BITNET_INLINE static Item item(float x) { return to_bf16(x); }
    static void get(const uint8_t* tile, Lanes& low, Lanes& high) { load_pair_bf16((const uint16_t*)tile, low, high); }
};

template <>
struct Tile<Dtype::f32> {
    using Item = float;
    static constexpr int bytes = 128, lane_step = 1, which_step = 16;
    BITNET_INLINE static Item item(float x) { return x; }
    static void get(const uint8_t* tile, Lanes& low, Lanes& high) {
        low = load((const float*)tile);
        high = load((const float*)tile + 16);
    }
};

template <>
struct Tile<Dtype::i8> {
    using Item = int8_t;
    static constexpr int bytes = 32, lane_step = 1, which_step = 16;
    BITNET_INLINE static Item item(float x) { return int8_t(x == x ? std::nearbyint(x) : 0.0f); }
    static void get(const uint8_t* tile, Lanes& low, Lanes& high) {
        low = load_i8((const int8_t*)tile);
        high = load_i8((const int8_t*)tile + 16);
    }
};

// The scales of a head's keys in a block of an int8 cache, one a position; those of its values follow.
inline float* scales_of(const CacheLayout& c, const uint8_t* head) {
    return (float*)(head + c.head_bytes - 2 * kBlockTokens * 4);
}

// What to multiply n numbers by so that they are codes, -127 to 127; `scale` undoes it, and is not a number where one
// of them is not finite. 1 for caches of floats.
template <Dtype D>
float to_codes(const float* x, int n, float* scale) {
    if (D != Dtype::i8) return 1.0f;
    float largest = 0, poison = 0;
    for (int i = 0; i < n; i++) {
        largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
        poison += x[i] * 0.0f;
    }
    *scale = largest / 127.0f + poison;
    return largest > 1e-30f ? 127.0f / largest : 0.0f;
}

// n numbers of a head, an even number of them and at most 16, as the cache holds them: keys in a lane of n / 2 tiles,
// values in all lanes of one.
template <Dtype D>
BITNET_INLINE void write_16(uint8_t* keys, uint8_t* values, int lane, int which, int n, const float* k, float by_k,
                            const float* v, float by_v) {
    using T = Tile<D>;
    using Item = typename T::Item;
    Item key[16], value[16];
    for (int i = 0; i < n; i++) key[i] = T::item(k[i] * by_k), value[i] = T::item(v[i] * by_v);
    for (int i = 0; i < n; i++)
        ((Item*)(keys + i / 2 * T::bytes))[lane * T::lane_step + i % 2 * T::which_step] = key[i];
    for (int i = 0; i < n; i++) ((Item*)values)[i * T::lane_step + which * T::which_step] = value[i];
}

template <Dtype D>
void cache_write_of(const CacheLayout& c, uint8_t* block, int offset, const float* k, const float* v) {
    const int bytes = Tile<D>::bytes, dim = c.head_dim;
    for (int h = 0; h < c.num_kv_heads; h++, block += c.head_bytes, k += dim, v += dim) {
        float* scales = scales_of(c, block) + offset;
        const float by_k = to_codes<D>(k, dim, scales), by_v = to_codes<D>(v, dim, scales + kBlockTokens);
        uint8_t* keys = block + int64_t(offset / 16) * (dim / 2) * bytes;
        uint8_t* values = block + c.key_bytes + int64_t(offset / 2) * (c.padded_dim / 16) * bytes;
        each_16(dim, [&](int d, int n) {
            write_16<D>(keys + d / 2 * bytes, values + d / 16 * bytes, offset % 16, offset % 2, n, k + d, by_k, v + d,
                        by_v);
        });
    }
}

void cache_write(const CacheLayout& layout, uint8_t* block, int offset, const float* k, const float* v) {
    if (layout.dtype == Dtype::f32) return cache_write_of<Dtype::f32>(layout, block, offset, k, v);
    if (layout.dtype == Dtype::i8) return cache_write_of<Dtype::i8>(layout, block, offset, k, v);
    cache_write_of<Dtype::bf16>(layout, block, offset, k, v);
}

struct Softmax {
    float largest, total;
};

inline float exp_scalar(float x) {
    float lanes[16];
    store(lanes, exp(set1(x)));
    return lanes[0];
}

// The scores of up to 32 positions for G heads: scores[g][32]; those from `count` on are -inf.
template <Dtype D, int G>
BITNET_INLINE void score_block(const AttendTask& t, const uint8_t* keys, const float* q, int count,
                               float (*scores)[32]) {
    const int pairs = t.layout.head_dim / 2;
    Lanes sums[G][2];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) sums[g][0] = sums[g][1] = set1(0.0f);
    for (int p = 0; p < pairs; p++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            Lanes low, high;
            Tile<D>::get(keys + (int64_t(i) * pairs + p) * Tile<D>::bytes, low, high);
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                const float* qg = q + g * t.layout.head_dim + 2 * p;
                sums[g][i] = fma(set1(qg[1]), high, fma(set1(qg[0]), low, sums[g][i]));
            }
        }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            Lanes score = mul(sums[g][i], set1(t.scale));
            if constexpr (D == Dtype::i8) score = mul(score, load(scales_of(t.layout, keys) + 16 * i));
            store(scores[g] + 16 * i, first(count - 16 * i, score, set1(-INFINITY)));
        }
}

// Turns scores into weights against the new maximum; returns what the earlier sums must be multiplied by.
inline float weigh_block(float* scores, Softmax& state) {
    Lanes a = load(scores), b = load(scores + 16);
    float largest = reduce_max(max(a, b));
    largest = state.largest > largest ? state.largest : largest;
    const Lanes from = set1(largest);
    a = exp(sub(a, from));
    b = exp(sub(b, from));
    store(scores, a);
    store(scores + 16, b);
    const float correction = state.total == 0.0f ? 0.0f : exp_scalar(state.largest - largest);
    state.total = std::fma(state.total, correction, reduce_add(add(a, b)));
    state.largest = largest;
    return correction;
}

template <Dtype D, int G>
BITNET_INLINE void add_values(const AttendTask& t, const uint8_t* values, int count, const float (*weights)[32],
                              const float* corrections, float* sums) {
    const int tiles = t.layout.padded_dim / 16;
    for (int d = 0; d < tiles; d++) {
        Lanes s[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) s[g] = mul(load(sums + (g * tiles + d) * 16), set1(corrections[g]));
        for (int j = 0; j < count; j += 2) {
            Lanes low, high;
            Tile<D>::get(values + (int64_t(j / 2) * tiles + d) * Tile<D>::bytes, low, high);
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) s[g] = fma(set1(weights[g][j]), low, s[g]);
            if (j + 1 < count)
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) s[g] = fma(set1(weights[g][j + 1]), high, s[g]);
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) store(sums + (g * tiles + d) * 16, s[g]);
    }
}

template <Dtype D, int G>
void attend_segment(const AttendTask& t, int begin, int end, const float* q, Softmax* states, float* sums) {
    float (*scores)[32] = (float (*)[32])(t.scratch);
    for (int g = 0; g < G; g++) states[g] = {-INFINITY, 0.0f};
    std::memset(sums, 0, size_t(G) * t.layout.padded_dim * 4);
    for (int p = begin; p < end; p += kBlockTokens) {
        const int count = end - p < kBlockTokens ? end - p : kBlockTokens;
        const uint8_t* block = t.cache + t.blocks[p / kBlockTokens] * t.layout.block_bytes;
        block += t.kv_head * t.layout.head_bytes;
        score_block<D, G>(t, block, q, count, scores);
        float corrections[G];
        for (int g = 0; g < G; g++) corrections[g] = weigh_block(scores[g], states[g]);
        if constexpr (D == Dtype::i8)
            for (int g = 0; g < G; g++)
                for (int j = 0; j < count; j++) scores[g][j] *= scales_of(t.layout, block)[kBlockTokens + j];
        add_values<D, G>(t, block + t.layout.key_bytes, count, scores, corrections, sums);
    }
}

inline void merge_segment(int padded_dim, Softmax& into, float* sums, const Softmax& from, const float* more) {
    const float largest = into.largest > from.largest ? into.largest : from.largest;
    const float a = exp_scalar(into.largest - largest), b = exp_scalar(from.largest - largest);
    for (int d = 0; d < padded_dim; d += 16)
        store(sums + d, fma(load(more + d), set1(b), mul(load(sums + d), set1(a))));
    into = {largest, std::fma(from.total, b, into.total * a)};
}

template <Dtype D, int G>
void attend_heads(const AttendTask& t, const float* q, float* out) {
    const int padded = t.layout.padded_dim, dim = t.layout.head_dim;
    Softmax states[G], more[G];
    float* sums = t.scratch + 4 * kBlockTokens;
    float* more_sums = sums + G * padded;
    attend_segment<D, G>(t, 0, t.length < kSegmentTokens ? t.length : kSegmentTokens, q, states, sums);
    for (int begin = kSegmentTokens; begin < t.length; begin += kSegmentTokens) {
        const int end = t.length - begin < kSegmentTokens ? t.length : begin + kSegmentTokens;
        attend_segment<D, G>(t, begin, end, q, more, more_sums);
        for (int g = 0; g < G; g++)
            merge_segment(padded, states[g], sums + g * padded, more[g], more_sums + g * padded);
    }
    for (int g = 0; g < G; g++)
        for (int d = 0; d < dim; d++) out[g * dim + d] = sums[g * padded + d] / states[g].total;
}

template <Dtype D>
void attend_of(const AttendTask& t) {
    const int dim = t.layout.head_dim;
    for (int h = 0; h < t.num_heads; h += 4) {
        const float* q = t.q + h * dim;
        float* out = t.out + h * dim;
        switch (t.num_heads - h) {
            case 1:
                attend_heads<D, 1>(t, q, out);
                break;
            case 2:
                attend_heads<D, 2>(t, q, out);
                break;
            case 3:
                attend_heads<D, 3>(t, q, out);
                break;
            default:
                attend_heads<D, 4>(t, q, out);
        }
    }
}

void attend(const AttendTask& t) {
    if (t.layout.dtype == Dtype::f32) return attend_of<Dtype::f32>(t);
    if (t.layout.dtype == Dtype::i8) return attend_of<Dtype::i8>(t);
    attend_of<Dtype::bf16>(t);
}

}  // namespace
