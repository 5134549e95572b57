// The sampler's passes over a row of logits, in vectors of whatever width the processor has; nothing rounds
// differently. A row is so many whole blocks of logits; its best has the logit `max`, and (max - logit) * scale is how
// far a token is from the best. Weights are those of sampling_math.h, masses are sums of them.
#pragma once

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

// Which tokens of a block may have a score (sampling_math.h) of `least` and more, as bits: all that have, and some few
// others; those with NaN too. `block` tells its place in the vocabulary.
uint64_t contenders(const float* x, size_t block, uint64_t noise, float max, float scale, double least);

}  // namespace bitnet
