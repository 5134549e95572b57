#include "ternary_step.h"

#include <algorithm>

namespace bitnet {

namespace {

// So many bytes of codes stay in the second cache of a core while matrices go by; so many tokens at least, which take
// longer than the weights from memory.
constexpr int64_t kCodesAtOnce = 3 << 18, kTokensAtOnce = 64;

struct TernaryStep final : Step {
    const TernaryWeight* weight;
    Codes x;
    Rows out, residual{};
    bool has_residual;
    TernaryStep(const TernaryWeight* w, Codes c, Rows o, const Rows* r)
        : weight(w), x(c), out(o), has_residual(r != nullptr) {
        if (r) residual = *r;
    }
    static constexpr int64_t kGroupsAtOnce = 2;  // of a matrix product
    bool is_t5() const { return weight->format() == Format::t5; }
    // All groups with the first part of the tokens, then with the next.
    int64_t num_groups() const { return int64_t(weight->groups().size()); }
    int64_t parts(const Context& c) const {
        const int64_t whole = (c.num_tokens * x.padded + kCodesAtOnce - 1) / kCodesAtOnce;
        return std::max<int64_t>(1, std::min(whole, c.num_tokens / kTokensAtOnce));
    }
    int64_t units(const Context& c) const override { return num_groups() * parts(c); }
    int64_t chunk(const Context& c) const override {
        if (c.num_tokens > kMaxTileTokens) return kGroupsAtOnce;
        return std::max<int64_t>(1, kChunkBytes / weight->group_bytes());
    }
    // The sums of all tokens, and behind them expanded T5.
    int64_t scratch_floats(int64_t num_tokens) const override {
        return sums_floats(num_tokens) + (is_t5() ? weight->steps() * kStepBytes / 4 : 0);
    }
    static int64_t sums_floats(int64_t num_tokens) { return kGroupsAtOnce * matrix_tokens(num_tokens) * kGroupRows; }
    static int64_t matrix_tokens(int64_t num_tokens) {
        return (num_tokens + kMatrixTile - 1) / kMatrixTile * kMatrixTile;
    }
    void work(const Context& c, int64_t first, int64_t last, int thread) const override {
        for (int64_t unit = first, end; unit < last; unit = end) {
            const int64_t part = unit / num_groups(), before = part * num_groups();
            end = std::min(last, before + num_groups());
            multiply(c, unit - before, end - before, Range(c, part, parts(c)), c.scratch[size_t(thread)].data());
        }
    }
    // Whole tiles of tokens; of a matrix product, whole tiles of its own two at a time.
    struct Range {
        int64_t first_tile, last_tile, first, last;
        Range(const Context& c, int64_t part, int64_t parts) {
            const Tiles tiles(c);
            const auto cut = [&](int64_t i) {
                const int64_t tile = tiles.count * i / parts;
                return c.tile_tokens > 1 || i == parts ? tile : tile / (2 * kMatrixTile) * (2 * kMatrixTile);
            };
            first_tile = cut(part), last_tile = cut(part + 1);
            first = tiles.begin(first_tile), last = tiles.begin(last_tile);
        }
    };
    void multiply(const Context& c, int64_t begin, int64_t end, const Range& tokens, uint8_t* scratch) const {
        if (c.tile_tokens == 1 && c.num_tokens > 1) {
            for (int64_t g = begin; g < end; g += kGroupsAtOnce)
                matrix(c, g, std::min(kGroupsAtOnce, end - g), tokens, reinterpret_cast<int32_t*>(scratch));
            return;
        }
        for (int64_t g = begin; g < end; g++) {
            const uint8_t* data = weight->group_data(g);
            const bool stays_t5 = is_t5() && c.kernels.block_tile;
            if (is_t5() && !stays_t5) {
                uint8_t* expanded = scratch + 4 * sums_floats(c.num_tokens);
                expand_blocks(data, int(weight->steps() / kBlockSteps), expanded);
                data = expanded;
            }
            if (are_many(c.kernels, c.num_tokens))
                many(c, g, data, stays_t5, tokens, reinterpret_cast<int32_t*>(scratch));
            else
                tiles(c, g, data, stays_t5, tokens);
        }
    }
    void many(const Context& c, int64_t group, const uint8_t* data, bool stays_t5, const Range& tokens,
              int32_t* acc) const {
        c.kernels.many_product({data, stays_t5, int(weight->steps()), c.codes(x), x.padded, int(c.num_tokens),
                                int(Tiles(c).count), int(tokens.first_tile), int(tokens.last_tile), c.pair_offsets(x),
                                c.pair_list(x, 0), acc, c.at(out, 0) + first_row(group), out.stride});
        store(c, group, acc + tokens.first * kGroupRows, tokens.first, int(tokens.last - tokens.first));
    }
    void matrix(const Context& c, int64_t first, int64_t count, const Range& tokens, int32_t* acc) const {
        const int steps = int(weight->group_bytes() / kStepBytes), num_tokens = int(tokens.last - tokens.first);
        const int acc_tokens = int(matrix_tokens(num_tokens));
        c.kernels.matrix_product({weight->group_data(first), is_t5(), int(count), steps,
                                  c.codes(x) + tokens.first * x.padded, x.padded, num_tokens, acc, acc_tokens,
                                  c.at(out, tokens.first) + first_row(first), out.stride});
        for (int64_t g = first; g < first + count; g++, acc += acc_tokens * kGroupRows)
            store(c, g, acc, tokens.first, num_tokens);
    }
    void tiles(const Context& c, int64_t group, const uint8_t* data, bool stays_t5, const Range& range) const {
        alignas(64) int32_t acc[kMaxTileTokens * kGroupRows];
        const Tiles tiles(c);
        for (int64_t tile = range.first_tile; tile < range.last_tile; tile++) {
            const int64_t t = tiles.begin(tile);
            const int tokens = int(tiles.begin(tile + 1) - t);
            const int8_t* codes = c.codes(x) + t * x.padded;
            if (stays_t5)
                c.kernels.block_tile(data, codes, int(weight->steps() / kBlockSteps), tokens, acc);
            else
                c.kernels.ternary_tile(data, codes, int(weight->steps()), tokens, acc);
            store(c, group, acc, t, tokens);
        }
    }
    int64_t first_row(int64_t group) const { return weight->groups()[size_t(group)].first_row; }
    void store(const Context& c, int64_t group, const int32_t* acc, int64_t t, int tokens) const {
        const int64_t row = first_row(group);
        c.kernels.ternary_store(acc, tokens, weight->groups()[size_t(group)].rows, weight->row_scales(group),
                                c.scales(x) + t, c.sums(x) + t, c.at(out, t) + row, out.stride,
                                has_residual ? c.at(residual, t) + row : nullptr, residual.stride);
    }
};

}  // namespace

std::unique_ptr<Step> ternary_step(const TernaryWeight* weight, Codes x, Rows out, const Rows* residual) {
    return std::make_unique<TernaryStep>(weight, x, out, residual);
}

}  // namespace bitnet
