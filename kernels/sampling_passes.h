// The sampler's passes over a row of logits, in vectors of whatever width the processor has; nothing rounds
// differently. A row is so many whole blocks of logits; its best has the logit `max`, and (max - logit) * scale is how
// far a token is from the best. Weights are those of sampling_math.h, masses are sums of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bitnet {

constexpr size_t kBlock = 64;
constexpr float kWeightless = 29.0f;  // exp(-29) * kWeightOfBest < 0.5: what is so far off weighs nothing

// Distances from the best, from `first` on and below `last`.
struct Span {
    float first;
    float last;
};

// The maximum of each block. False if there is a NaN.
bool find_maxima(const float* x, size_t num_blocks, float* maxima);

// The logits above the bar, and those that equal it up to the index `last_tied`; -infinity for the others.
void keep_better(const float* x, size_t length, float bar, int32_t last_tied, float* kept);

// The weight of each token.
void weigh_tokens(const float* x, size_t num_blocks, float max, float scale, uint64_t* weights);

// The mass of each block; `maxima` as found, or anything below infinity that is not less. Leaves the weights, as parts
// of that of the best, of all blocks that weigh anything in `relative`, unless that is null.
void weigh_blocks(const float* x, size_t num_blocks, const float* maxima, float max, float scale, uint64_t* masses,
                  float* relative);

// Of each block the mass of the tokens before the span, which are the better ones, and as bits those inside. `relative`
// as left by weigh_blocks; the span ends before kWeightless.
void split_blocks(const float* x, size_t num_blocks, const float* maxima, float max, float scale, const Span& span,
                  const float* relative, uint64_t* before, uint64_t* inside);

}  // namespace bitnet
