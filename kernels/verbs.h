// The float verbs, written once over 16 lanes and compiled by every instruction set: what makes them equal to the bit.
//
// The order of every sum is fixed here: lane l takes elements 16 i + l in ascending i by fused multiply-add, then the
// lanes are added as reduce_add says. Element-wise loops are plain C++: without -ffast-math and without contraction a
// compiler may vectorise them, but not change a bit of them.
// Everything is in an unnamed namespace: a function shared between objects with different flags would be linked once,
// with the instructions of whichever object came first.
#pragma once
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace {

using namespace bitnet;

// exp for lanes up to 88.37; 0 below -87.33. Cephes' expf: n = round(x / ln 2), a polynomial in x - n ln 2, times 2^n.
BITNET_INLINE Lanes exp(const Lanes& x) {
    const Lanes lowest = set1(-87.33654475f);
    Lanes y = min(set1(88.3762626647949f), max(lowest, x));
    Lanes n = round(mul(y, set1(1.44269504088896341f)));
    Lanes r = fma(n, set1(-0.693359375f), y);
    r = fma(n, set1(2.12194440e-4f), r);
    Lanes p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    return below(x, lowest, mul(p, power_of_two(n)), set1(0.0f));
}

BITNET_INLINE Lanes activate(Activation kind, const Lanes& x) {
    if (kind == Activation::silu) return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x))));
    Lanes r = max(x, set1(0.0f));  // relu2
    return mul(r, r);
}

// 16 elements from p, of which n exist; the others are 0.
BITNET_INLINE Lanes load_first(const float* p, int n) {
    if (n >= 16) return load(p);
    float tail[16] = {};
    std::memcpy(tail, p, size_t(n) * 4);
    return load(tail);
}

inline void store_first(float* p, int n, const Lanes& x) {
    if (n >= 16) return store(p, x);
    float tail[16];
    store(tail, x);
    std::memcpy(p, tail, size_t(n) * 4);
}

// ---- rows: gate, norm, quantise -------------------------------------------------------------------------------------

void store_codes(const RowTask& t, const float* y) {
    Lanes largest = set1(0.0f);
    for (int k = 0; k < t.width; k += 16) largest = max(largest, abs(load_first(y + k, t.width - k)));
    float top = reduce_max(largest);
    if (top < 1e-5f) top = 1e-5f;
    const float scale = (1.0f / top) * 127.0f;  // two roundings, as torch evaluates 127 / top
    const Lanes by = set1(scale);
    int32_t sum = 0;
    alignas(16) int8_t codes[16];
    for (int k = 0; k < t.padded_width; k += 16) {
        store_int8(codes, k < t.width ? mul(load_first(y + k, t.width - k), by) : set1(0.0f));
        for (int i = 0; i < 16; i++) sum += codes[i];
        for (int i = 0; i < 4; i++) std::memcpy(t.codes + (k + 4 * i) * int64_t(t.lane_stride), codes + 4 * i, 4);
    }
    *t.inverse_scale = 1.0f / scale;
    *t.code_sum = sum;
}

void row(const RowTask& t) {
    const float* y = t.x;
    if (t.up) {
        float* gated = t.weight || t.codes ? t.scratch : t.out;
        for (int k = 0; k < t.width; k += 16) {
            int n = t.width - k;
            store_first(gated + k, n, mul(activate(t.activation, load_first(t.x + k, n)), load_first(t.up + k, n)));
        }
        y = gated;
    }
    if (t.weight) {
        Lanes squares = set1(0.0f);
        for (int k = 0; k < t.width; k += 16) {
            Lanes v = load_first(y + k, t.width - k);
            squares = fma(v, v, squares);
        }
        const float r = 1.0f / std::sqrt(reduce_add(squares) / float(t.width) + t.eps);
        float* normed = t.codes ? t.scratch : t.out;
        for (int k = 0; k < t.width; k++) normed[k] = (y[k] * r) * t.weight[k];
        y = normed;
    }
    if (t.codes) store_codes(t, y);
}

// ---- dense products -------------------------------------------------------------------------------------------------

template <Dtype D>
BITNET_INLINE Lanes load_weight(const void* row, int64_t k) {
    if constexpr (D == Dtype::f32) return load((const float*)row + k);
    if constexpr (D == Dtype::f16) return load_f16((const uint16_t*)row + k);
    return load_bf16((const uint16_t*)row + k);
}

template <Dtype D>
BITNET_INLINE Lanes load_weight_tail(const void* row, int64_t k, int n) {
    constexpr int item = D == Dtype::f32 ? 4 : 2;
    alignas(64) uint8_t tail[64] = {};
    std::memcpy(tail, (const uint8_t*)row + k * item, size_t(n) * item);
    return load_weight<D>(tail, 0);
}

// R rows times T tokens; one chain of fused multiply-adds for each of them, so tiling does not change a bit.
template <Dtype D, int R, int T>
void dense_tile(const DenseTask& t, int64_t first_row, int first_token) {
    constexpr int item = D == Dtype::f32 ? 4 : 2;
    const uint8_t* w = (const uint8_t*)t.weight + first_row * t.columns * item;
    const float* x = t.x + first_token * t.x_stride;
    const int64_t row_bytes = int64_t(t.columns) * item;
    Lanes sums[R][T];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) sums[r][i] = set1(0.0f);
    int k = 0;
    for (; k + 16 <= t.columns; k += 16) {
        Lanes xs[T];
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) xs[i] = load(x + i * t.x_stride + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Lanes v = load_weight<D>(w + r * row_bytes, k);
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) sums[r][i] = fma(v, xs[i], sums[r][i]);
        }
    }
    if (const int n = t.columns - k; n > 0) {
        Lanes xs[T];
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) xs[i] = load_first(x + i * t.x_stride + k, n);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Lanes v = load_weight_tail<D>(w + r * row_bytes, k, n);
#pragma GCC unroll 8
            for (int i = 0; i < T; i++) sums[r][i] = fma(v, xs[i], sums[r][i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < T; i++) {
            float y = reduce_add(sums[r][i]);
            if (t.residual) y = t.residual[(first_token + i) * t.residual_stride + first_row + r] + y;
            t.out[(first_token + i) * t.out_stride + first_row + r] = y;
        }
}

template <Dtype D, int T>
void dense_tokens(const DenseTask& t, int first_token) {
    constexpr int R = T == 1 ? 8 : 4;
    int64_t r = 0;
    for (; r + R <= t.rows; r += R) dense_tile<D, R, T>(t, r, first_token);
    for (; r < t.rows; r++) dense_tile<D, 1, T>(t, r, first_token);
}

template <Dtype D>
void dense_of(const DenseTask& t) {
    int i = 0;
    for (; i + 4 <= t.tokens; i += 4) dense_tokens<D, 4>(t, i);
    switch (t.tokens - i) {
        case 3:
            return dense_tokens<D, 3>(t, i);
        case 2:
            return dense_tokens<D, 2>(t, i);
        case 1:
            return dense_tokens<D, 1>(t, i);
    }
}

void dense(const DenseTask& t) {
    if (t.dtype == Dtype::f32) return dense_of<Dtype::f32>(t);
    if (t.dtype == Dtype::f16) return dense_of<Dtype::f16>(t);
    dense_of<Dtype::bf16>(t);
}

template <Dtype D>
void embed_of(const void* row, int width, float* out) {
    int k = 0;
    for (; k + 16 <= width; k += 16) store(out + k, load_weight<D>(row, k));
    if (k < width) store_first(out + k, width - k, load_weight_tail<D>(row, k, width - k));
}

void embed(const void* row, Dtype dtype, int width, float* out) {
    if (dtype == Dtype::f32) return embed_of<Dtype::f32>(row, width, out);
    if (dtype == Dtype::f16) return embed_of<Dtype::f16>(row, width, out);
    embed_of<Dtype::bf16>(row, width, out);
}

void ternary_store(const int32_t* acc, int tokens, int rows, float scale, const float* inverse_scale,
                   const int32_t* code_sum, float* out, int64_t out_stride, const float* residual,
                   int64_t residual_stride) {
    for (int i = 0; i < tokens; i++, acc += kGroupRows, out += out_stride) {
        const float by = scale * inverse_scale[i];
        const int32_t sum = code_sum[i];
        if (residual)
            for (int r = 0; r < rows; r++) out[r] = residual[i * residual_stride + r] + float(acc[r] - sum) * by;
        else
            for (int r = 0; r < rows; r++) out[r] = float(acc[r] - sum) * by;
    }
}

void add_rows(const float* x, const float* y, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i++) out[i] = x[i] + y[i];
}

// ---- screen -------------------------------------------------------------------------------------------------------

// 16 rows of 6-bit weights (screen.h) times V vectors of codes.
template <int V>
void screen_vectors(const uint8_t* w, const int8_t* codes, int steps, int32_t* acc) {
    Sums sums[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sums[v] = no_sums();
    for (int s = 0; s < steps; s++, w += kScreenStepBytes, codes += 16 * V) {
        __builtin_prefetch(w + 4096);
        __builtin_prefetch(w + 4096 + 64);
        __builtin_prefetch(w + 4096 + 128);
        const Bytes low = load_bytes(w), middle = load_bytes(w + 64), high = load_bytes(w + 128);
        const Bytes fields[4] = {mask_or(low, 15, mask_or(shift_left<4>(high), 48, no_bytes())),
                                 mask_or(shift_right<4>(low), 15, mask_or(shift_left<2>(high), 48, no_bytes())),
                                 mask_or(middle, 15, mask_or(high, 48, no_bytes())),
                                 mask_or(shift_right<4>(middle), 15, mask_or(shift_right<2>(high), 48, no_bytes()))};
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[v] = dot(sums[v], fields[p], codes + 4 * (p * V + v));
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store_sums(acc + 16 * v, sums[v]);
}

void screen(const uint8_t* w, const int8_t* codes, int steps, int vectors, int32_t* acc) {
    switch (vectors) {
        case 2:
            return screen_vectors<2>(w, codes, steps, acc);
        case 4:
            return screen_vectors<4>(w, codes, steps, acc);
        case 6:
            return screen_vectors<6>(w, codes, steps, acc);
        default:
            return screen_vectors<8>(w, codes, steps, acc);
    }
}

// ---- rotary embedding and the cache ---------------------------------------------------------------------------------

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

inline uint16_t to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if (f != f) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <Dtype D>
struct Tile;  // 16 lanes x 2 in the cache

template <>
struct Tile<Dtype::bf16> {
    static constexpr int bytes = 64;
    static void put(uint8_t* tile, int lane, int which, float x) {
        uint16_t bits = to_bf16(x);
        std::memcpy(tile + 4 * lane + 2 * which, &bits, 2);
    }
    static void get(const uint8_t* tile, Lanes& low, Lanes& high) { load_pair_bf16((const uint16_t*)tile, low, high); }
};

template <>
struct Tile<Dtype::f32> {
    static constexpr int bytes = 128;
    static void put(uint8_t* tile, int lane, int which, float x) { std::memcpy(tile + 64 * which + 4 * lane, &x, 4); }
    static void get(const uint8_t* tile, Lanes& low, Lanes& high) {
        low = load((const float*)tile);
        high = load((const float*)tile + 16);
    }
};

template <Dtype D>
void cache_write_of(const CacheLayout& c, uint8_t* block, int offset, const float* k, const float* v) {
    const int pairs = c.head_dim / 2, value_tiles = c.padded_dim / 16;
    for (int h = 0; h < c.num_kv_heads; h++, block += c.head_bytes, k += c.head_dim, v += c.head_dim) {
        uint8_t* keys = block + int64_t(offset / 16) * pairs * Tile<D>::bytes;
        for (int d = 0; d < c.head_dim; d++) Tile<D>::put(keys + d / 2 * Tile<D>::bytes, offset % 16, d % 2, k[d]);
        uint8_t* values = block + c.key_bytes + int64_t(offset / 2) * value_tiles * Tile<D>::bytes;
        for (int d = 0; d < c.head_dim; d++) Tile<D>::put(values + d / 16 * Tile<D>::bytes, d % 16, offset % 2, v[d]);
    }
}

void cache_write(const CacheLayout& layout, uint8_t* block, int offset, const float* k, const float* v) {
    if (layout.dtype == Dtype::f32) return cache_write_of<Dtype::f32>(layout, block, offset, k, v);
    cache_write_of<Dtype::bf16>(layout, block, offset, k, v);
}

// ---- attention ------------------------------------------------------------------------------------------------------
// For each query head: the scores of a block of 32 positions, each summed over ascending features; exp against the
// running maximum of the segment; values added in ascending positions. Segments of 256 positions start afresh and are
// merged in ascending order. Nothing depends on which tokens or heads are computed together.

struct Softmax {
    float largest, total;
};

inline float exp_scalar(float x) {
    float lanes[16];
    store(lanes, exp(set1(x)));
    return lanes[0];
}

// The scores of up to 32 positions for G heads; those from `count` on are -inf. Returns nothing: weights[g][32].
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
        for (int i = 0; i < 2; i++)
            store(scores[g] + 16 * i, first(count - 16 * i, mul(sums[g][i], set1(t.scale)), set1(-INFINITY)));
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
    attend_of<Dtype::bf16>(t);
}

constexpr Kernels make_kernels(const char* name, void (*tile)(const uint8_t*, const int8_t*, int, int, int32_t*),
                               int64_t (*peak)(int64_t)) {
    return {name, tile, ternary_store, embed, row, dense, rope, cache_write, attend, add_rows, screen, peak};
}

}  // namespace
