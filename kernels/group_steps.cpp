#include "group_steps.h"

#include <algorithm>

namespace bitnet {

namespace {

// So many tokens at a time in a matrix product: their sums and totals, 128 bytes each, stay in the nearest cache.
constexpr int64_t kBlock = 64;
// Groups of 32 rows that lookups do at a time: with the tables of so few they are about as fast as products, and the
// totals of so many are 128 to 192 KB.
constexpr int64_t kLeastGroups = 4, kMostGroups = 128;
constexpr int64_t kPartsEach = 2;  // of a thread, at least, while there are groups

int group_steps(const TernaryWeight& weight) { return int(weight.group_columns() / kStepColumns); }

struct GroupSums {
    int64_t offset, stride;
    int32_t* at(const Context& c, int64_t token) const {
        return reinterpret_cast<int32_t*>(c.arena + offset * c.num_tokens) + token * stride;
    }
};

struct GroupSumsStep final : Step {
    const TernaryWeight* weight;
    Codes x;
    GroupSums sums;
    GroupSumsStep(const TernaryWeight* w, Codes c, GroupSums s) : weight(w), x(c), sums(s) {}
    void work(const Context& c, int64_t first, int64_t last, int) const override {
        const Tiles tiles(c);
        for (int64_t t = first; t < last; t++) {
            const int64_t tile = tiles.of(t), begin = tiles.begin(tile);
            const int8_t* codes = c.codes(x) + begin * x.padded + 4 * (t - begin);
            c.kernels.group_sums(codes, int(tiles.begin(tile + 1) - begin), int(weight->steps()), group_steps(*weight),
                                 sums.at(c, t));
        }
    }
};

struct GroupProductStep final : Step {
    const TernaryWeight* weight;
    Codes x;
    GroupSums sums;
    Rows out, residual{};
    bool has_residual;
    GroupProductStep(const TernaryWeight* w, Codes c, GroupSums s, Rows o, const Rows* r)
        : weight(w), x(c), sums(s), out(o), has_residual(r != nullptr) {
        if (r) residual = *r;
    }
    int64_t num_groups() const { return int64_t(weight->groups().size()); }
    bool looks_up(const Context& c) const { return weight->looks_up(c.kernels, c.num_tokens); }
    // Of lookups a unit is a tile of tokens and a part of the groups.
    int64_t parts(const Context& c) const {
        const int64_t tiles = Tiles(c).count, threads = int64_t(c.scratch.size());
        const int64_t shared = std::min((kPartsEach * threads + tiles - 1) / tiles, num_groups() / kLeastGroups);
        return std::max<int64_t>({1, shared, (num_groups() + kMostGroups - 1) / kMostGroups});
    }
    int64_t units(const Context& c) const override { return looks_up(c) ? Tiles(c).count * parts(c) : num_groups(); }
    int64_t chunk(const Context& c) const override {
        if (looks_up(c) || c.num_tokens > kMaxTileTokens) return 1;
        return std::max<int64_t>(1, kChunkBytes / weight->group_bytes());
    }
    // For lookups their tables, and the totals of a part; for a matrix product the sums and the totals of a block of
    // tokens, and a group of columns in two bits.
    int64_t scratch_floats(int64_t num_tokens) const override {
        const int64_t lookups = kSignsTableBytes / 4 + kMostGroups * kMaxTileTokens * kGroupRows,
                      matrix = 2 * kBlock * kGroupRows + group_steps(*weight) * kStepBytes / 4;
        return std::max(weight->one_bit() && num_tokens > 1 ? lookups : 0, num_tokens < kMatrixTokens ? 0 : matrix);
    }
    void work(const Context& c, int64_t first, int64_t last, int thread) const override {
        for (int64_t unit = first; unit < last; unit++)
            if (looks_up(c))
                look_up(c, unit, c.scratch_of(thread));
            else if (c.tile_tokens == 1 && c.num_tokens > 1)
                for (int64_t t = 0; t < c.num_tokens; t += kBlock)
                    matrix(c, unit, t, int(std::min(kBlock, c.num_tokens - t)), c.scratch_of(thread));
            else
                tiles(c, unit);
    }
    void look_up(const Context& c, int64_t unit, float* scratch) const {
        const Tiles tiles(c);
        const int64_t part = unit / tiles.count, tile = unit % tiles.count, t = tiles.begin(tile);
        const int64_t begin = num_groups() * part / parts(c), end = num_groups() * (part + 1) / parts(c);
        const int tokens = int(tiles.begin(tile + 1) - t);
        float* totals = scratch + kSignsTableBytes / 4;
        c.kernels.signs_product({weight->group_data(begin), weight->group_bytes(), weight->group_scales(begin),
                                 int(end - begin), int(weight->steps()), group_steps(*weight), tokens,
                                 c.codes(x) + t * x.padded, sums.at(c, t), sums.stride,
                                 reinterpret_cast<uint8_t*>(scratch), totals});
        for (int64_t g = begin; g < end; g++, totals += tokens * kGroupRows) store(c, g, totals, t, tokens);
    }
    void matrix(const Context& c, int64_t g, int64_t t, int tokens, float* scratch) const {
        auto* acc = reinterpret_cast<int32_t*>(scratch);
        float* totals = scratch + kBlock * kGroupRows;
        auto* expanded = reinterpret_cast<uint8_t*>(totals + kBlock * kGroupRows);
        std::fill(totals, totals + kBlock * kGroupRows, 0.0f);
        const int8_t* codes = c.codes(x) + t * x.padded;
        for (int s = 0, i = 0; s < int(weight->steps()); s += group_steps(*weight), i++) {
            const int steps = std::min(group_steps(*weight), int(weight->steps()) - s);
            c.kernels.matrix_product({two_bits(g, s, steps, expanded), false, 1, steps, codes + s * kStepColumns,
                                      x.padded, tokens, acc, int(kBlock)});
            c.kernels.group_add(acc, tokens, weight->group_scales(g, i), sums.at(c, t) + i, sums.stride, totals);
        }
        store(c, g, totals, t, tokens);
    }
    const uint8_t* two_bits(int64_t g, int first, int steps, uint8_t* expanded) const {
        if (!weight->one_bit()) return weight->group_data(g) + first * kStepBytes;
        expand_lines(weight->group_data(g) + first / 2 * kStepBytes, steps / 2, expanded);
        return expanded;
    }
    void tiles(const Context& c, int64_t g) const {
        alignas(64) float totals[kMaxTileTokens * kGroupRows];
        const Tiles tiles(c);
        for (int64_t tile = 0; tile < tiles.count; tile++) {
            const int64_t t = tiles.begin(tile);
            const int tokens = int(tiles.begin(tile + 1) - t);
            c.kernels.group_tile({weight->group_data(g), weight->one_bit(), weight->group_scales(g),
                                  int(weight->steps()), group_steps(*weight), tokens, c.codes(x) + t * x.padded,
                                  sums.at(c, t), sums.stride, totals});
            store(c, g, totals, t, tokens);
        }
    }
    void store(const Context& c, int64_t g, const float* totals, int64_t t, int tokens) const {
        const TernaryWeight::Group& group = weight->groups()[size_t(g)];
        c.kernels.group_store(totals, tokens, group.rows, c.scales(x) + t, c.at(out, t) + group.first_row, out.stride,
                              has_residual ? c.at(residual, t) + group.first_row : nullptr, residual.stride);
    }
};

}  // namespace

std::unique_ptr<Step> group_sums_step(const TernaryWeight* weight, Codes x, int64_t sums_offset) {
    return std::make_unique<GroupSumsStep>(weight, x, GroupSums{sums_offset, weight->column_groups()});
}

std::unique_ptr<Step> group_product_step(const TernaryWeight* weight, Codes x, int64_t sums_offset, Rows out,
                                         const Rows* residual) {
    return std::make_unique<GroupProductStep>(weight, x, GroupSums{sums_offset, weight->column_groups()}, out,
                                              residual);
}

}  // namespace bitnet
