// 16 float lanes in plain C++: the definition of every operation in the other lanes_*.h.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

struct Lanes {
    float v[16];
};
// So many sums stay in registers.
constexpr int kLaneSums = 4;

template <class F>
BITNET_INLINE Lanes each(F f) {
    Lanes r;
    for (int i = 0; i < 16; i++) r.v[i] = f(i);
    return r;
}

BITNET_INLINE float bits_to_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

BITNET_INLINE float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000 | (mantissa ? 0x400000 : 0) | mantissa << 13);
    if (exponent == 0) {
        float f = float(mantissa) * 5.9604644775390625e-08f;  // 2^-24: subnormal halves are exact in float32
        return sign ? -f : f;
    }
    return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

BITNET_INLINE Lanes set1(float x) {
    return each([&](int) { return x; });
}
BITNET_INLINE Lanes load(const float* p) {
    return each([&](int i) { return p[i]; });
}
BITNET_INLINE Lanes load_bf16(const uint16_t* p) {
    return each([&](int i) { return bits_to_float(uint32_t(p[i]) << 16); });
}
BITNET_INLINE Lanes load_f16(const uint16_t* p) {
    return each([&](int i) { return half_to_float(p[i]); });
}
// Of 16 lanes x 2 interleaved bfloat16 the first or the second of each lane.
BITNET_INLINE Lanes load_even_bf16(const uint16_t* p) {
    return each([&](int i) { return bits_to_float(uint32_t(p[2 * i]) << 16); });
}
BITNET_INLINE Lanes load_odd_bf16(const uint16_t* p) {
    return each([&](int i) { return bits_to_float(uint32_t(p[2 * i + 1]) << 16); });
}
BITNET_INLINE Lanes load_i8(const int8_t* p) {
    return each([&](int i) { return float(p[i]); });
}
BITNET_INLINE void store(float* p, const Lanes& x) { std::memcpy(p, x.v, sizeof x.v); }
BITNET_INLINE Lanes add(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return x.v[i] + y.v[i]; });
}
BITNET_INLINE Lanes sub(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return x.v[i] - y.v[i]; });
}
BITNET_INLINE Lanes mul(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return x.v[i] * y.v[i]; });
}
BITNET_INLINE Lanes div(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return x.v[i] / y.v[i]; });
}
BITNET_INLINE Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) {
    return each([&](int i) { return std::fma(x.v[i], y.v[i], z.v[i]); });
}
// Where an operand is not a number the second is returned, as x86 does.
BITNET_INLINE Lanes max(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; });
}
BITNET_INLINE Lanes min(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; });
}
BITNET_INLINE Lanes abs(const Lanes& x) {
    return each([&](int i) { return std::fabs(x.v[i]); });
}
// The first n lanes of x, then those of y.
BITNET_INLINE Lanes first(int n, const Lanes& x, const Lanes& y) {
    return each([&](int i) { return i < n ? x.v[i] : y.v[i]; });
}
// Lanes of y where test < bound, else of x.
BITNET_INLINE Lanes below(const Lanes& test, const Lanes& bound, const Lanes& x, const Lanes& y) {
    return each([&](int i) { return test.v[i] < bound.v[i] ? y.v[i] : x.v[i]; });
}
// Whether x < y in any lane.
BITNET_INLINE bool any_below(const Lanes& x, const Lanes& y) {
    bool any = false;
    for (int i = 0; i < 16; i++) any |= x.v[i] < y.v[i];
    return any;
}
// Round half to even; |x| < 2^22.
BITNET_INLINE Lanes round(const Lanes& x) {
    return each([&](int i) { return std::nearbyintf(x.v[i]); });
}
// x * 2^n for whole n in [-126, 127].
BITNET_INLINE Lanes scaled(const Lanes& x, const Lanes& n) {
    return each(
        [&](int i) { return x.v[i] * bits_to_float(uint32_t(n.v[i] == n.v[i] ? int32_t(n.v[i]) + 127 : 0) << 23); });
}
BITNET_INLINE void store_int8(int8_t* p, const Lanes& x) {
    for (int i = 0; i < 16; i++) {
        float r = std::nearbyintf(x.v[i]);
        p[i] = int8_t(r > 127.0f ? 127 : r >= -128.0f ? int(r) : -128);
    }
}
// Pairs at distance 8, then 4, 2 and 1.
BITNET_INLINE float reduce_add(const Lanes& x) {
    float s[8];
    for (int i = 0; i < 8; i++) s[i] = x.v[i] + x.v[i + 8];
    for (int i = 0; i < 4; i++) s[i] = s[i] + s[i + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}
BITNET_INLINE float reduce_max(const Lanes& x) {
    float s[8];
    for (int i = 0; i < 8; i++) s[i] = x.v[i] > x.v[i + 8] ? x.v[i] : x.v[i + 8];
    for (int i = 0; i < 4; i++) s[i] = s[i] > s[i + 4] ? s[i] : s[i + 4];
    for (int i = 0; i < 2; i++) s[i] = s[i] > s[i + 2] ? s[i] : s[i + 2];
    return s[0] > s[1] ? s[0] : s[1];
}

// 16 rows of 4 unsigned bytes, and a 32-bit sum for each row.
struct Bytes {
    uint8_t v[64];
};
struct Sums {
    int32_t v[16];
};
// So many tokens, and vectors of a head, at a time: more sums than that do not stay in registers.
constexpr int kTileSums = 4, kHeadVectors = 8;
constexpr bool kWholeBytes = true;  // whether `dot` takes bytes above 127

template <class F>
BITNET_INLINE Bytes each_byte(F f) {
    Bytes r;
    for (int i = 0; i < 64; i++) r.v[i] = uint8_t(f(i));
    return r;
}

BITNET_INLINE Bytes load_bytes(const uint8_t* p) {
    return each_byte([&](int i) { return p[i]; });
}
BITNET_INLINE Bytes masked(const Bytes& x, uint8_t mask) {
    return each_byte([&](int i) { return x.v[i] & mask; });
}
// (x & mask) | y
BITNET_INLINE Bytes mask_or(const Bytes& x, uint8_t mask, const Bytes& y) {
    return each_byte([&](int i) { return (x.v[i] & mask) | y.v[i]; });
}
// x where the mask has ones, y where it has none.
BITNET_INLINE Bytes choose_bits(const Bytes& x, uint8_t mask, const Bytes& y) {
    return each_byte([&](int i) { return (x.v[i] & mask) | (y.v[i] & ~mask); });
}
// Bits that cross a byte are garbage in the vector versions: mask them out.
template <int N>
BITNET_INLINE Bytes shift_left(const Bytes& x) {
    return each_byte([&](int i) { return x.v[i] << N; });
}
template <int N>
BITNET_INLINE Bytes shift_right(const Bytes& x) {
    return each_byte([&](int i) { return x.v[i] >> N; });
}
BITNET_INLINE Bytes no_bytes() {
    return each_byte([](int) { return 0; });
}
BITNET_INLINE Bytes set_bytes(uint8_t x) {
    return each_byte([&](int) { return x; });
}
BITNET_INLINE Sums no_sums() { return {}; }
BITNET_INLINE Sums set_sums(int32_t x) {
    Sums r;
    for (int i = 0; i < 16; i++) r.v[i] = x;
    return r;
}
BITNET_INLINE Sums load_sums(const int32_t* p) {
    Sums r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
BITNET_INLINE Sums add_sums(Sums x, const Sums& y) {
    for (int i = 0; i < 16; i++) x.v[i] += y.v[i];
    return x;
}
// x * 2^shift - minus, modulo 2^32.
BITNET_INLINE Sums scale_sums(Sums x, int shift, int32_t minus) {
    for (int i = 0; i < 16; i++) x.v[i] = int32_t((uint32_t(x.v[i]) << shift) - uint32_t(minus));
    return x;
}
// The 16 weights of a row in a step of U2, in the order of their columns.
BITNET_INLINE Lanes code_weights(uint32_t word, float scale) {
    return each([&](int i) { return (float(word >> (8 * (i % 4) + 2 * (i / 4)) & 3) - 1) * scale; });
}
// Of sums that four divides.
BITNET_INLINE Sums quarter_sums(Sums x) {
    for (int i = 0; i < 16; i++) x.v[i] /= 4;
    return x;
}
BITNET_INLINE Lanes to_lanes(const Sums& sums) {
    return each([&](int i) { return float(sums.v[i]); });
}
// Adds the products of each row's 4 bytes (at most 63 without kWholeBytes) and the 4 codes.
BITNET_INLINE Sums dot(Sums sums, const Bytes& x, const int8_t* codes) {
    for (int i = 0; i < 64; i++) sums.v[i / 4] += x.v[i] * codes[i % 4];
    return sums;
}
BITNET_INLINE void store_sums(int32_t* p, const Sums& sums) { std::memcpy(p, sums.v, sizeof sums.v); }

}  // namespace
