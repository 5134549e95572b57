// ARM NEON with dotprod: `sdot` multiplies four codes by four broadcast activations; a step is eight registers of 4
// rows.
#include "lanes_neon.h"
#include "tile_parts.h"
#include "verbs.h"

namespace {

inline int8x16_t broadcast(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

// Two of the eight registers of a step, starting with register `first`, for T tokens that stand among `stride`.
template <int T>
inline void tile_part(const uint8_t* w, const int8_t* a, int steps, int stride, int first, int32_t* acc) {
    int32x4_t sums[2][T];
    for (int q = 0; q < 2; q++)
        for (int t = 0; t < T; t++) sums[q][t] = vdupq_n_s32(0);
    const uint8x16_t mask = vdupq_n_u8(3);
    w += 16 * first;
    for (int s = 0; s < steps; s++, w += kStepBytes, a += 16 * stride) {
        const uint8x16_t x = vld1q_u8(w), y = vld1q_u8(w + 16);
        const int8x16_t fields[2][4] = {
            {vreinterpretq_s8_u8(vandq_u8(x, mask)), vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(x, 2), mask)),
             vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(x, 4), mask)), vreinterpretq_s8_u8(vshrq_n_u8(x, 6))},
            {vreinterpretq_s8_u8(vandq_u8(y, mask)), vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(y, 2), mask)),
             vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(y, 4), mask)), vreinterpretq_s8_u8(vshrq_n_u8(y, 6))}};
        for (int p = 0; p < 4; p++)
            for (int t = 0; t < T; t++) {
                const int8x16_t b = broadcast(a + 4 * (p * stride + t));
                sums[0][t] = vdotq_s32(sums[0][t], fields[0][p], b);
                sums[1][t] = vdotq_s32(sums[1][t], fields[1][p], b);
            }
    }
    for (int t = 0; t < T; t++)
        for (int q = 0; q < 2; q++) vst1q_s32(acc + t * kGroupRows + 4 * (first + q), sums[q][t]);
}

struct TokenTile {
    template <int T>
    static void run(const uint8_t* w, const int8_t* a, int steps, int stride, int32_t* acc) {
        for (int first = 0; first < 8; first += 2) tile_part<T>(w, a, steps, stride, first, acc);
    }
};

int64_t int8_peak(int64_t iterations) {
    int32x4_t sums[12];
    for (int32x4_t& sum : sums) sum = vdupq_n_s32(0);
    int8x16_t w = vdupq_n_s8(1), a = vdupq_n_s8(3);
    for (int64_t i = 0; i < iterations; i++)
#pragma GCC unroll 12
        for (int32x4_t& sum : sums) sum = vdotq_s32(sum, w, a);
    for (int32x4_t& sum : sums) asm volatile("" : : "w"(sum));
    return iterations * 12 * 16;
}

}  // namespace

const bitnet::Kernels* bitnet::neon_kernels() {
    static constexpr Kernels kernels = make_kernels("neon", tile_in_parts<TokenTile, 8>, int8_peak);
    return &kernels;
}
