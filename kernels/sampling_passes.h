// The sampler's passes over a row of logits, in vectors of whatever width the processor has; nothing rounds
// differently. A row is so many whole blocks of logits; its best has the logit `max`, and (max - logit) * scale is how
// far a token is from the best. Weights are those of sampling_math.h, masses are sums of them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "sampling_math.h"

namespace bitnet {

constexpr float kWeightless = 29.0f;  // exp(-29) * kWeightOfBest < 0.5: what is so far off weighs nothing

// The maximum of each block. False if there is a NaN.
bool find_maxima(const float* x, size_t num_blocks, float* maxima);

// The logits above the bar, and those that equal it up to the index `last_tied`; -infinity for the others.
void keep_better(const float* x, size_t length, float bar, int32_t last_tied, float* kept);

// The logits of the tokens whose bits are set, -infinity for the others; may be `x` itself. See Draw for the mask.
void apply_mask(const float* x, const uint32_t* mask, size_t length, float* masked);

// The mass of each block; `maxima` as found, or anything below infinity that is not less.
void weigh_blocks(const float* x, size_t num_blocks, const float* maxima, float max, float scale, uint64_t* masses);

// The race (sampling_math.h) of tokens, of which the best has the logit `max`.
struct RaceOf {
    uint64_t noise;
    float max, scale;
};

// The words of the first token of a block, and of its place.
struct First {
    uint32_t word, place;
};

// Which tokens of a block may have a score of `least` and more, as bits: all that have, and some few others; those with
// NaN too. `block` tells its place in the vocabulary.
uint64_t contenders(const RaceOf& race, const float* x, size_t block, const First& first, double least);

// Of the blocks from `begin` to `end`, at most to the next multiple of 64, those that may have such tokens, by their
// maxima, and the words of all 64; the lowest bit, and the first word, is that of the multiple before.
uint64_t leading_blocks(const RaceOf& race, const float* maxima, size_t begin, size_t end, double least,
                        uint32_t* words, uint32_t* places);

// Calls f with each of the blocks from `begin` to `end` that may have a token with a score of `least`, which f may
// raise, and with its first.
template <class F>
void each_leading_block(const RaceOf& race, const float* maxima, size_t begin, size_t end, const double& least,
                        const F& f) {
    uint32_t words[kBlock], places[kBlock];
    for (size_t group; begin < end; begin = group + kBlock) {
        group = begin / kBlock * kBlock;
        uint64_t bits = leading_blocks(race, maxima, begin, end, least, words, places);
        for (; bits != 0; bits &= bits - 1) {
            const size_t i = size_t(std::countr_zero(bits));
            f(group + i, First{words[i], places[i]});
        }
    }
}

}  // namespace bitnet
