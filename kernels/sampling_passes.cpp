#include "sampling_passes.h"

#include <algorithm>
#include <limits>

#include "sampling_math.h"

namespace bitnet {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kAhead = 2048;  // so many logits ahead are fetched: a row that was just computed is not near

// More lanes where the processor has them, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GLIBC__)
#define BITNET_WIDER __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define BITNET_WIDER
#endif

// Into every version of the pass that calls it.
#define BITNET_INLINE __attribute__((always_inline)) inline

BITNET_INLINE float greater(float a, float b) { return a > b ? a : b; }

// The maximum of a block, in lanes that compilers turn into vectors; unordered[lane] becomes 1 where there is a NaN.
BITNET_INLINE float max_of_block(const float* x, int32_t* unordered) {
    float lanes[kLanes];
    for (size_t j = 0; j < kLanes; ++j) lanes[j] = x[j];
    for (size_t i = kLanes; i < kBlock; i += kLanes) {
        for (size_t j = 0; j < kLanes; ++j) lanes[j] = greater(x[i + j], lanes[j]);
    }
    for (size_t i = 0; i < kBlock; i += kLanes) {
        for (size_t j = 0; j < kLanes; ++j) unordered[j] |= x[i + j] != x[i + j];
    }
    for (size_t j = 0; j < 8; ++j) lanes[j] = greater(lanes[j + 8], lanes[j]);
    for (size_t j = 0; j < 4; ++j) lanes[j] = greater(lanes[j + 4], lanes[j]);
    return greater(greater(lanes[0], lanes[1]), greater(lanes[2], lanes[3]));
}

// The sum of weight_of(x), whose upper bits are those of 4096.0 and are taken off together: sums of integers wrap.
BITNET_INLINE uint64_t mass_of(const float* relative) {
    uint64_t mass = 0;
    for (size_t j = 0; j < kBlock; ++j) mass += bit_cast<uint64_t>(static_cast<double>(relative[j]) + 4096.0);
    return mass - kBlock * bit_cast<uint64_t>(4096.0);
}

// Bit j is byte j, which is 0 or 1.
BITNET_INLINE uint64_t bits_of(const uint8_t* bytes) {
    uint64_t bits = 0;
    for (size_t i = 0; i < kBlock; i += 8) {
        uint64_t eight = 0;
        for (size_t j = 0; j < 8; ++j) eight |= uint64_t{bytes[i + j]} << (8 * j);
        bits |= (eight * 0x0102040810204080u >> 56) << i;
    }
    return bits;
}

}  // namespace

BITNET_WIDER bool find_maxima(const float* x, size_t num_blocks, float* maxima) {
    int32_t unordered[kLanes] = {};
    for (size_t block = 0; block < num_blocks; ++block, x += kBlock) {
        for (size_t j = 0; j < kBlock; j += kLanes) __builtin_prefetch(x + kAhead + j, 0, 2);
        maxima[block] = max_of_block(x, unordered);
    }
    return std::count(unordered, unordered + kLanes, 0) == kLanes;
}

BITNET_WIDER void keep_better(const float* x, size_t length, float bar, int32_t last_tied, float* kept) {
    for (size_t j = 0; j < length; ++j) {
        const bool is_tied = (x[j] == bar) & (static_cast<int32_t>(j) <= last_tied);
        kept[j] = ((x[j] > bar) | is_tied) ? x[j] : -std::numeric_limits<float>::infinity();
    }
}

BITNET_WIDER void weigh_tokens(const float* x, size_t num_blocks, float max, float scale, uint64_t* weights) {
    for (size_t block = 0; block < num_blocks; ++block, x += kBlock, weights += kBlock) {
        float relative[kBlock];
        for (size_t j = 0; j < kBlock; ++j) relative[j] = exp_of_minus((max - x[j]) * scale);
        for (size_t j = 0; j < kBlock; ++j) weights[j] = weight_of(relative[j]);
    }
}

BITNET_WIDER void weigh_blocks(const float* x, size_t num_blocks, const float* maxima, float max, float scale,
                               uint64_t* masses, float* relative) {
    float unwanted[kBlock];
    for (size_t block = 0; block < num_blocks; ++block, x += kBlock) {
        masses[block] = 0;
        if (!((max - maxima[block]) * scale < kWeightless)) continue;
        float* out = relative == nullptr ? unwanted : relative + block * kBlock;
        for (size_t j = 0; j < kBlock; ++j) out[j] = exp_of_minus((max - x[j]) * scale);
        masses[block] = mass_of(out);
    }
}

BITNET_WIDER void split_blocks(const float* x, size_t num_blocks, const float* maxima, float max, float scale,
                               const Span& span, const float* relative, uint64_t* before, uint64_t* inside) {
    const float first = span.first, last = span.last;
    for (size_t block = 0; block < num_blocks; ++block, x += kBlock, relative += kBlock) {
        before[block] = inside[block] = 0;
        if (!((max - maxima[block]) * scale < last)) continue;
        float distance[kBlock], better[kBlock];
        uint8_t is_inside[kBlock];
        for (size_t j = 0; j < kBlock; ++j) distance[j] = (max - x[j]) * scale;
        for (size_t j = 0; j < kBlock; ++j) better[j] = distance[j] < first ? relative[j] : 0.0f;
        before[block] = mass_of(better);
        for (size_t j = 0; j < kBlock; ++j) is_inside[j] = (distance[j] >= first) & (distance[j] < last);
        inside[block] = bits_of(is_inside);
    }
}

}  // namespace bitnet
