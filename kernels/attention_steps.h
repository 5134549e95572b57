// The steps that write the cache and attend to it.
#pragma once
#include <memory>

#include "executor.h"

namespace bitnet {

// Rotates q and k in place and writes k and v into the layer's cache.
std::unique_ptr<Step> rope_write_step(const Cache* cache, int64_t layer, Rows q, Rows k, Rows v, Rows rotations);
// With a window, each token attends to the last so many positions, its own too; with 0 to all up to its own.
std::unique_ptr<Step> attend_step(const Cache* cache, int64_t layer, Rows q, Rows out, float scale, int window);
// What a segment of attention with queries of this width leaves for a token, Context::pieces.
int64_t attend_piece_floats(const CacheLayout& layout, int64_t width);

}  // namespace bitnet
