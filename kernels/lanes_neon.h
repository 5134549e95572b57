// 16 float lanes in four NEON registers; lanes_generic.h says what each operation means.
#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "kernels.h"

namespace {

struct Lanes {
    float32x4_t v[4];
};
constexpr int kLaneSums = 4;

template <class F>
BITNET_INLINE Lanes each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}

BITNET_INLINE float32x4_t widen_bf16(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }

BITNET_INLINE Lanes set1(float x) {
    return each([&](int) { return vdupq_n_f32(x); });
}
BITNET_INLINE Lanes load(const float* p) {
    return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
BITNET_INLINE Lanes load_bf16(const uint16_t* p) {
    return each([&](int i) { return widen_bf16(vld1_u16(p + 4 * i)); });
}
BITNET_INLINE Lanes load_f16(const uint16_t* p) {
    return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
BITNET_INLINE Lanes load_even_bf16(const uint16_t* p) {
    Lanes r;
    for (int i = 0; i < 4; i++)
        r.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(p + 8 * i)), 16));
    return r;
}
BITNET_INLINE Lanes load_odd_bf16(const uint16_t* p) {
    Lanes r;
    for (int i = 0; i < 4; i++)
        r.v[i] = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(p + 8 * i)), vdupq_n_u32(0xffff0000)));
    return r;
}
BITNET_INLINE Lanes load_i8(const int8_t* p) {
    int8x16_t x = vld1q_s8(p);
    int16x8_t a = vmovl_s8(vget_low_s8(x)), b = vmovl_s8(vget_high_s8(x));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(a))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(b)))}};
}
BITNET_INLINE void store(float* p, const Lanes& x) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]);
}
BITNET_INLINE Lanes add(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
BITNET_INLINE Lanes sub(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
BITNET_INLINE Lanes mul(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
BITNET_INLINE Lanes div(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return vdivq_f32(x.v[i], y.v[i]); });
}
BITNET_INLINE Lanes fma(const Lanes& x, const Lanes& y, const Lanes& z) {
    return each([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
BITNET_INLINE Lanes max(const Lanes& x, const Lanes& y) {  // vmaxq differs where an operand is not a number
    return each([&](int i) { return vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
BITNET_INLINE Lanes min(const Lanes& x, const Lanes& y) {
    return each([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
BITNET_INLINE Lanes abs(const Lanes& x) {
    return each([&](int i) { return vabsq_f32(x.v[i]); });
}
BITNET_INLINE Lanes first(int n, const Lanes& x, const Lanes& y) {
    static const int32_t count[4] = {0, 1, 2, 3};
    int32x4_t lane = vld1q_s32(count);
    return each([&](int i) { return vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n - 4 * i)), x.v[i], y.v[i]); });
}
BITNET_INLINE Lanes below(const Lanes& test, const Lanes& bound, const Lanes& x, const Lanes& y) {
    return each([&](int i) { return vbslq_f32(vcltq_f32(test.v[i], bound.v[i]), y.v[i], x.v[i]); });
}
BITNET_INLINE bool any_below(const Lanes& x, const Lanes& y) {
    uint32_t any = 0;
    for (int i = 0; i < 4; i++) any |= vmaxvq_u32(vcltq_f32(x.v[i], y.v[i]));
    return any != 0;
}
BITNET_INLINE Lanes round(const Lanes& x) {
    return each([&](int i) { return vrndnq_f32(x.v[i]); });
}
BITNET_INLINE Lanes scaled(const Lanes& x, const Lanes& n) {
    return each([&](int i) {
        int32x4_t e = vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127));
        return vmulq_f32(x.v[i], vreinterpretq_f32_s32(vshlq_n_s32(e, 23)));
    });
}
BITNET_INLINE void store_int8(int8_t* p, const Lanes& x) {
    int16x8_t a = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.v[0])), vqmovn_s32(vcvtnq_s32_f32(x.v[1])));
    int16x8_t b = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.v[2])), vqmovn_s32(vcvtnq_s32_f32(x.v[3])));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(a), vqmovn_s16(b)));
}
BITNET_INLINE float reduce_add(const Lanes& x) {
    float32x4_t s = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
BITNET_INLINE float reduce_max(const Lanes& x) {
    float s[16];
    store(s, x);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) s[i] = s[i] > s[i + step] ? s[i] : s[i + step];
    return s[0];
}

struct Bytes {
    uint8x16_t v[4];
};
struct Sums {
    int32x4_t v[4];
};
constexpr int kTileSums = 4, kHeadVectors = 8;
constexpr bool kWholeBytes = false;  // `vdotq_s32` reads them as signed

template <class F>
BITNET_INLINE Bytes each_byte(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}

BITNET_INLINE Bytes load_bytes(const uint8_t* p) {
    return each_byte([&](int i) { return vld1q_u8(p + 16 * i); });
}
BITNET_INLINE Bytes masked(const Bytes& x, uint8_t mask) {
    return each_byte([&](int i) { return vandq_u8(x.v[i], vdupq_n_u8(mask)); });
}
BITNET_INLINE Bytes mask_or(const Bytes& x, uint8_t mask, const Bytes& y) {
    return each_byte([&](int i) { return vorrq_u8(vandq_u8(x.v[i], vdupq_n_u8(mask)), y.v[i]); });
}
BITNET_INLINE Bytes choose_bits(const Bytes& x, uint8_t mask, const Bytes& y) {
    return each_byte([&](int i) { return vbslq_u8(vdupq_n_u8(mask), x.v[i], y.v[i]); });
}
template <int N>
BITNET_INLINE Bytes shift_left(const Bytes& x) {
    return each_byte([&](int i) { return vshlq_n_u8(x.v[i], N); });
}
template <int N>
BITNET_INLINE Bytes shift_right(const Bytes& x) {
    return each_byte([&](int i) { return vshrq_n_u8(x.v[i], N); });
}
BITNET_INLINE Bytes no_bytes() {
    return each_byte([](int) { return vdupq_n_u8(0); });
}
BITNET_INLINE Bytes set_bytes(uint8_t x) {
    return each_byte([&](int) { return vdupq_n_u8(x); });
}
BITNET_INLINE Sums no_sums() { return {{vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}}; }
BITNET_INLINE Sums set_sums(int32_t x) { return {{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}}; }
BITNET_INLINE Sums load_sums(const int32_t* p) {
    return {{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}};
}
BITNET_INLINE Sums add_sums(Sums x, const Sums& y) {
    for (int i = 0; i < 4; i++) x.v[i] = vaddq_s32(x.v[i], y.v[i]);
    return x;
}
BITNET_INLINE Sums scale_sums(Sums x, int shift, int32_t minus) {
    for (int i = 0; i < 4; i++) x.v[i] = vsubq_s32(vshlq_s32(x.v[i], vdupq_n_s32(shift)), vdupq_n_s32(minus));
    return x;
}
BITNET_INLINE Lanes code_weights(uint32_t word, float scale) {
    constexpr int32_t right[4] = {0, -8, -16, -24};
    const uint32x4_t x = vshlq_u32(vdupq_n_u32(word), vld1q_s32(right));
    return each([&](int i) {
        const uint32x4_t code = vandq_u32(vshlq_u32(x, vdupq_n_s32(-2 * i)), vdupq_n_u32(3));
        return vmulq_n_f32(vsubq_f32(vcvtq_f32_u32(code), vdupq_n_f32(1)), scale);
    });
}
BITNET_INLINE Sums quarter_sums(Sums x) {
    for (int i = 0; i < 4; i++) x.v[i] = vshrq_n_s32(x.v[i], 2);
    return x;
}
BITNET_INLINE Lanes to_lanes(const Sums& sums) {
    return each([&](int i) { return vcvtq_f32_s32(sums.v[i]); });
}
BITNET_INLINE Sums dot(Sums sums, const Bytes& x, const int8_t* codes) {
    int32_t four;
    __builtin_memcpy(&four, codes, 4);
    const int8x16_t c = vreinterpretq_s8_s32(vdupq_n_s32(four));
    for (int i = 0; i < 4; i++) sums.v[i] = vdotq_s32(sums.v[i], vreinterpretq_s8_u8(x.v[i]), c);
    return sums;
}
BITNET_INLINE void store_sums(int32_t* p, const Sums& sums) {
    for (int i = 0; i < 4; i++) vst1q_s32(p + 4 * i, sums.v[i]);
}

}  // namespace
