// Rotary embeddings: the angles of a position.
#pragma once
#include <cstdint>

namespace bitnet {

// Cosine and sine of position * inverse_frequency, for so many of them.
void rotation(int32_t position, const float* inverse_frequencies, int count, float* cosine, float* sine);

}  // namespace bitnet
