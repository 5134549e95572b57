// Rotary embedding, and what is written into the paged cache.
#pragma once
#include "cache_tiles.h"
#include "verbs_rows.h"

namespace {

using namespace bitnet;

// x[j], x[j + half] of every head turned by the angle of j (NeoX halves); all of a head, or its first features.
void rope(float* x, int num_heads, int head_dim, int half, const float* cosine, const float* sine) {
    for (int h = 0; h < num_heads; h++, x += head_dim)
        for (int j = 0; j < half; j++) {
            const float a = x[j], b = x[j + half];
            x[j] = a * cosine[j] - b * sine[j];
            x[j + half] = b * cosine[j] + a * sine[j];
        }
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

}  // namespace
