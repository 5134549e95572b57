#include "int8_step.h"

#include <algorithm>

namespace bitnet {

namespace {

struct Int8Step final : Step {
    const QuantisedHead* weight;
    Codes x;
    Rows out, residual{};
    bool has_residual;
    Int8Step(const QuantisedHead* w, Codes c, Rows o, const Rows* r)
        : weight(w), x(c), out(o), has_residual(r != nullptr) {
        if (r) residual = *r;
    }
    int64_t units(const Context&) const override { return weight->num_tiles(); }
    int64_t chunk(const Context&) const override {
        return std::max(kTilesAtOnce, kChunkBytes / (weight->num_steps() * (kHeadBytes6 + kHeadBytes2)));
    }
    void work(const Context& c, int64_t first, int64_t last, int) const override {
        if (c.tile_tokens == 1 && c.num_tokens > 1)
            for (int64_t tile = first; tile < last; tile += kTilesAtOnce)
                multiply(c, tile, int(std::min(kTilesAtOnce, last - tile)));
        else
            for (int64_t tile = first; tile < last; tile += kTilesAtOnce)
                tiles(c, tile, int(std::min(kTilesAtOnce, last - tile)));
    }
    void multiply(const Context& c, int64_t tile, int count) const {
        alignas(64) int32_t acc[kTilesAtOnce * kHeadTaskVectors * kHeadRows];
        for (int64_t t = 0; t < c.num_tokens; t += kHeadTaskVectors) {
            const int tokens = int(std::min<int64_t>(kHeadTaskVectors, c.num_tokens - t));
            HeadTask task = weight->task(tile, count, c.codes(x) + t * x.padded, tokens, acc);
            task.code_stride = x.padded;
            c.kernels.head_matrix(task);
            for (int i = 0; i < count; i++) store(c, tile + i, acc + i * kHeadTaskVectors * kHeadRows, t, tokens);
        }
    }
    void tiles(const Context& c, int64_t tile, int count) const {
        alignas(64) int32_t acc[kTilesAtOnce * kHeadTaskVectors * kHeadRows];
        const Tiles tokens(c);
        for (int64_t i = 0; i < tokens.count; i++) {
            const int64_t t = tokens.begin(i);
            const int num_tokens = int(tokens.begin(i + 1) - t);
            c.kernels.head_sums8(weight->task(tile, count, c.codes(x) + t * x.padded, num_tokens, acc));
            for (int j = 0; j < count; j++) store(c, tile + j, acc + j * kHeadTaskVectors * kHeadRows, t, num_tokens);
        }
    }
    // The codes of weights are 128 too large, so each sum loses 128 times the sum of its token's codes.
    void store(const Context& c, int64_t tile, const int32_t* acc, int64_t t, int tokens) const {
        const int64_t row = tile * kHeadRows, rows = std::min<int64_t>(kHeadRows, weight->rows() - row);
        const float* half_scales = weight->half_scales() + row;
        for (int i = 0; i < tokens; i++, acc += kHeadRows) {
            const float inverse = c.scales(x)[t + i];
            const int32_t minus = 128 * c.sums(x)[t + i];
            float* to = c.at(out, t + i) + row;
            const float* from = has_residual ? c.at(residual, t + i) + row : nullptr;
            for (int64_t r = 0; r < rows; r++) {
                const float y = float(acc[r] - minus) * (2.0f * half_scales[r] * inverse);
                to[r] = from ? from[r] + y : y;
            }
        }
    }
};

}  // namespace

std::unique_ptr<Step> int8_step(const QuantisedHead* weight, Codes x, Rows out, const Rows* residual) {
    return std::make_unique<Int8Step>(weight, x, out, residual);
}

}  // namespace bitnet
