// How keys and values stand in the paged cache, as floats, bfloat16 and int8: tiles of 16 lanes by 2.
#pragma once
#include <cstring>

#include "exp.h"
#include "fetch.h"
#include "kernels.h"

namespace {

using namespace bitnet;

BITNET_INLINE uint16_t to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;  // f != f would keep loops from becoming vectors
    return uint16_t(is_nan ? bits >> 16 | 0x40 : rounded);
}

BITNET_INLINE float from_bf16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// Numbers below 2^111 with the 8 bits of a bfloat16 (T. J. Dekker, "A floating-point technique for extending the
// available precision", 1971).
BITNET_INLINE Lanes round_to_bf16(const Lanes& x) {
    const Lanes scaled = mul(x, set1(65537.0f));
    return sub(scaled, sub(scaled, x));
}

template <Dtype D>
struct Tile;  // 16 lanes x 2 in the cache: item [lane, which] stands at lane * lane_step + which * which_step

template <>
struct Tile<Dtype::bf16> {
    using Item = uint16_t;
    static constexpr int bytes = 64, lane_step = 2, which_step = 1;
    BITNET_INLINE static Item item(float x) { return to_bf16(x); }
    template <int Which>
    BITNET_INLINE static Lanes get(const uint8_t* tile) {
        return Which ? load_odd_bf16((const uint16_t*)tile) : load_even_bf16((const uint16_t*)tile);
    }
};

template <>
struct Tile<Dtype::f32> {
    using Item = float;
    static constexpr int bytes = 128, lane_step = 1, which_step = 16;
    BITNET_INLINE static Item item(float x) { return x; }
    template <int Which>
    BITNET_INLINE static Lanes get(const uint8_t* tile) {
        return load((const float*)tile + 16 * Which);
    }
};

template <>
struct Tile<Dtype::i8> {
    using Item = int8_t;
    static constexpr int bytes = 32, lane_step = 1, which_step = 16;
    BITNET_INLINE static Item item(float x) { return int8_t(x == x ? std::nearbyint(x) : 0.0f); }
    template <int Which>
    BITNET_INLINE static Lanes get(const uint8_t* tile) {
        return load_i8((const int8_t*)tile + 16 * Which);
    }
};

// The scales of a head's keys in a block of an int8 cache, one a position; those of its values follow.
inline float* scales_of(const CacheLayout& c, const uint8_t* head) {
    return (float*)(head + c.head_bytes - 2 * kBlockTokens * 4);
}

}  // namespace
