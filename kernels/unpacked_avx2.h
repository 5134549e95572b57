// U2 in registers of 256 bits, packed or not; and products of many tokens, for which weights become bytes once. That
// saves the shifts and masks of every tile, and two registers at a time share the broadcast activations of six tokens.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "tile_parts.h"

namespace {

using namespace bitnet;

constexpr int kUnpackedSteps = 40;  // 20 KB, which stay in the first cache
constexpr int kUnpackedTokens = 6;

inline int least(int x, int y) { return x < y ? x : y; }

inline __m256i load_register(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

inline __m256i broadcast(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return _mm256_set1_epi32(four);
}

// Steps of R registers with four fields of 2 bits.
template <int R>
struct Packed {
    static constexpr int kRegisters = R, kBytes = 32 * R, kFields = 4;
    BITNET_INLINE static __m256i field(const uint8_t* w, int p, int r) {
        const __m256i x = load_register(w + 32 * r);
        return _mm256_and_si256(p ? _mm256_srli_epi16(x, 2 * p) : x, _mm256_set1_epi8(3));
    }
    BITNET_INLINE static void fetch_step(const uint8_t* w) {
#pragma GCC unroll 2
        for (int line = 0; line < kBytes; line += 64) fetch_ahead(w + line);
    }
};

// Lines of a group of rows with one bit a weight, whose eight fields are those of two steps.
struct OneBit : Packed<4> {
    static constexpr int kFields = 8;
    BITNET_INLINE static __m256i field(const uint8_t* w, int p, int r) {
        const __m256i x = load_register(w + 32 * r);
        const int by = p < 4 ? 2 * p : 2 * p - 9;
        const __m256i shifted = by < 0 ? _mm256_slli_epi16(x, 1) : by ? _mm256_srli_epi16(x, by) : x;
        return _mm256_and_si256(shifted, _mm256_set1_epi8(2));
    }
};

// Steps of a group of rows with a byte for each field.
struct Unpacked {
    static constexpr int kRegisters = 4, kFields = 4, kFieldBytes = 32 * kRegisters, kBytes = kFields * kFieldBytes;
    BITNET_INLINE static __m256i field(const uint8_t* w, int p, int r) {
        return load_register(w + kFieldBytes * p + 32 * r);
    }
    BITNET_INLINE static void fetch_step(const uint8_t*) {}
};

inline void unpack(const uint8_t* w, int steps, uint8_t* to) {
    for (int s = 0; s < steps; s++, w += kStepBytes, to += Unpacked::kBytes) {
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++)
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++)
                _mm256_store_si256((__m256i*)(to + Unpacked::kFieldBytes * p + 32 * r), Packed<4>::field(w, p, r));
    }
}

// Kernels::many_product: some steps of the weights after the others. Tile::run<T> takes bytes, codes that stand
// `stride` bytes apart, and adds to what is in acc if `more`.
template <class Tile>
void unpacked_product(const ManyTask& task) {
    alignas(64) uint8_t unpacked[kUnpackedSteps * Unpacked::kBytes];
    for (int begin = 0; begin < task.steps; begin += kUnpackedSteps) {
        const int steps = least(kUnpackedSteps, task.steps - begin);
        unpack(task.weights + begin * kStepBytes, steps, unpacked);
        each_tile(task, [&](int first, int tokens, int index) {
            fetch_beside(task, {begin, steps, task.steps, kStepBytes}, index, first, tokens).rest();
            const int8_t* codes = task.codes + first * task.padded + int64_t(begin) * kStepColumns * tokens;
            const int parts = (tokens + kUnpackedTokens - 1) / kUnpackedTokens;
            for (int i = 0; i < parts; i++) {
                const int t = tokens * i / parts;
                with_count<kUnpackedTokens>(tokens * (i + 1) / parts - t, [&](auto n) {
                    Tile::template run<n.value>(unpacked, codes + 4 * t, 4 * tokens, steps,
                                                task.acc + (first + t) * kGroupRows, begin > 0);
                });
            }
        });
    }
}

}  // namespace
