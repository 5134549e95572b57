#include "sampling_passes.h"

#include <algorithm>
#include <limits>

#include "sampling_math.h"

namespace bitnet {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kAhead = 2048;  // so many logits ahead are fetched: a row that was just computed is not near

// More lanes where the processor has them, chosen when the library is loaded. Clang 14 to 16 make the widest alone, and
// every other processor ends there; 19 is the first that was seen to choose. GCC 11 knows no levels of x86-64.
#if !defined(__x86_64__) || !defined(__GLIBC__) || (defined(__clang__) && __clang_major__ < 19)
#define BITNET_WIDER
#elif !defined(__clang__) && __GNUC__ < 12
#define BITNET_WIDER __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define BITNET_WIDER __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#endif

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

BITNET_WIDER void apply_mask(const float* x, const uint32_t* mask, size_t length, float* masked) {
    constexpr float kOut = -std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < length / 32; ++i, x += 32, masked += 32) {
        const uint32_t word = mask[i];
        for (uint32_t j = 0; j < 32; ++j) masked[j] = (word & (uint32_t{1} << j)) != 0 ? x[j] : kOut;
    }
    for (size_t j = 0; j < length % 32; ++j) masked[j] = ((mask[length / 32] >> j) & 1) != 0 ? x[j] : kOut;
}

BITNET_WIDER void weigh_blocks(const float* x, size_t num_blocks, const float* maxima, float max, float scale,
                               uint64_t* masses) {
    for (size_t block = 0; block < num_blocks; ++block, x += kBlock) {
        masses[block] = 0;
        if (!((max - maxima[block]) * scale < kWeightless)) continue;
        float relative[kBlock];
        for (size_t j = 0; j < kBlock; ++j) relative[j] = exp_of_minus((max - x[j]) * scale);
        masses[block] = mass_of(relative);
    }
}

// What noise is at most whose exponential variable is a part of that of a word. -log(-log(1 - u)) <= -log(u), and on
// each octave log2(u) >= the line between its ends, which is what the bits of a float tell. u is rounded down to 24
// bits: from 0 they make a bound that is far too high, as once in 2^24 words.
BITNET_INLINE float most_noise(uint32_t word, float log2_parts) {
    const float u = static_cast<float>(static_cast<int32_t>(word >> 8));
    const float log2 = static_cast<float>(bit_cast<int32_t>(u)) * 0x1p-23f;  // plus 127, and u is times 2^24
    return (151.0f + log2_parts - log2) * 0.69314718f;
}

BITNET_INLINE float bar_of(double least) {
    constexpr float kRounding = 1e-3f;  // of distances up to 30: no noise is more
    return static_cast<float>(least) - kRounding;
}

constexpr float kLog2Block = 6.0f;

// No token is before the first of its block; the others are as late as their own variables tell, and that much later.
BITNET_WIDER uint64_t contenders(const RaceOf& race, const float* x, size_t block, const First& first, double least) {
    const float bar = bar_of(least), most = most_noise(first.word, kLog2Block);
    uint32_t words[kBlock];
    words_of(race.noise, block, Word::token, words);
    words[first.place >> 26] = 0;
    int32_t may_win[kBlock], any = 0;
    for (size_t j = 0; j < kBlock; ++j) {
        const float own = most_noise(words[j], 0.0f), noise = own < most ? own : most;
        may_win[j] = !(noise - (race.max - x[j]) * race.scale < bar);
        any |= may_win[j];
    }
    uint64_t bits = 0;
    for (size_t j = 0; any != 0 && j < kBlock; ++j) bits |= static_cast<uint64_t>(may_win[j]) << j;
    return bits;
}

BITNET_WIDER uint64_t leading_blocks(const RaceOf& race, const float* maxima, size_t begin, size_t end, double least,
                                     uint32_t* words, uint32_t* places) {
    const size_t group = begin / kBlock, last = std::min(end, group * kBlock + kBlock);
    words_of(race.noise, group, Word::block, words);
    words_of(race.noise, group, Word::place, places);
    const float bar = bar_of(least);
    uint64_t bits = 0;
    for (size_t block = begin; block < last; ++block) {
        const size_t i = block % kBlock;
        const bool may_win = !(most_noise(words[i], kLog2Block) - (race.max - maxima[block]) * race.scale < bar);
        bits |= static_cast<uint64_t>(may_win) << i;
    }
    return bits;
}

}  // namespace bitnet
