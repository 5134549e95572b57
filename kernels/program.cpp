// The steps that a program is made of, and the checks at its border.
#include "program.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "attention_steps.h"
#include "dense_step.h"
#include "group_steps.h"
#include "int8_step.h"
#include "rotation.h"
#include "ternary_step.h"
#include "ternary_table.h"
#include "tile_parts.h"

namespace bitnet {

namespace {

// Where matrix products begin to be faster: with scales every 64 and 128 columns, from 32 and 16 tokens on.
constexpr int64_t kMatrixTokenColumns = 2048, kInt8MatrixTokens = 10;
// A multiply-add of floats takes as long as this many of ternary products, and on some processors twice that.
constexpr int64_t kCostOfFloat = 4;

struct EmbedStep final : Step {
    const DenseWeight* table;
    Rows out;
    float scale;
    const float* row_scales;
    EmbedStep(const DenseWeight* t, Rows o, float s, const float* r) : table(t), out(o), scale(s), row_scales(r) {}
    void work(const Context& c, int64_t first, int64_t last, int) const override {
        for (int64_t t = first; t < last; t++) {
            float* row = c.at(out, t);
            const int32_t id = c.batch->token_ids[t];
            read_row(c.kernels, *table, id, row);
            for (int64_t i = 0; i < out.width && row_scales; i++) row[i] *= row_scales[id];
            for (int64_t i = 0; i < out.width && scale != 1.0f; i++) row[i] *= scale;
        }
    }
};

struct RotationsStep final : Step {
    std::vector<float> frequencies;
    Rows out;
    RotationsStep(std::vector<float> f, Rows o) : frequencies(std::move(f)), out(o) {}
    void work(const Context& c, int64_t first, int64_t last, int) const override {
        const int half = int(frequencies.size());
        for (int64_t t = first; t < last; t++)
            rotation(c.batch->positions[t], frequencies.data(), half, c.at(out, t), c.at(out, t) + half);
    }
};

struct RowStep final : Step {
    RowsStep what;
    Rows up{}, out{};
    Codes codes{};
    std::shared_ptr<const CodesUse> use;  // of codes; null where they are none
    RowStep(RowsStep w, Rows o) : what(w), out(o) { own_up(); }
    RowStep(RowsStep w, Codes o, std::shared_ptr<const CodesUse> u) : what(w), codes(o), use(std::move(u)) { own_up(); }
    void own_up() {
        if (!what.up) return;
        up = *what.up;
        what.up = &up;
    }
    static constexpr int64_t kTokensAtOnce = 4;  // whose codes are written side by side
    int64_t row_floats() const { return (what.x.width + 15) / 16 * 16; }
    // Where several threads wrote one tile, every line of it would go back and forth between their caches: the codes of
    // a token stand in a row first, and then each thread moves some columns of all to where products read them.
    bool is_staged(const Context& c) const {
        return use && c.scratch.size() > 1 && c.num_tokens > 1 && Tiles(c).count == 1;
    }
    int8_t* staged(const Context& c, int64_t token) const {
        return reinterpret_cast<int8_t*>(c.scratch_of(0) + row_floats()) + token * codes.padded;
    }
    int64_t chunk(const Context& c) const override { return use && !is_staged(c) ? kTokensAtOnce : 1; }
    int64_t scratch_floats(int64_t) const override {
        return row_floats() + (use ? kMaxTileTokens * codes.padded / 4 : 0);
    }
    void work(const Context& c, int64_t first, int64_t last, int thread) const override {
        if (is_staged(c)) {
            for (int64_t t = first; t < last; t++) compute(c, t, thread, staged(c, t));
            return;
        }
        const Tiles tiles(c);
        for (int64_t t = first, count = 1; t < last; t += count) {
            if (!use) {
                compute(c, t, thread, nullptr);
                continue;
            }
            const int64_t tile = tiles.of(t), begin = tiles.begin(tile), end = tiles.begin(tile + 1);
            count = std::min({kTokensAtOnce, end - t, last - t});
            int8_t* to = c.codes(codes) + begin * codes.padded + 4 * (t - begin);
            const bool alone = end - begin == 1;
            int8_t* rows = alone ? to : reinterpret_cast<int8_t*>(c.scratch_of(thread) + row_floats());
            for (int64_t i = 0; i < count; i++) compute(c, t + i, thread, rows + i * codes.padded);
            if (!alone)
                with_count<kTokensAtOnce>(int(count), [&](auto n) { interleave<n.value>(rows, to, end - begin); });
        }
    }
    static constexpr int64_t kColumns = 640;  // a unit of those that are moved
    int64_t units_behind(const Context& c) const override {
        return is_staged(c) ? (codes.padded + kColumns - 1) / kColumns : 0;
    }
    void work_behind(const Context& c, int64_t unit) const override {
        const int64_t padded = codes.padded, tokens = c.num_tokens, first = unit * kColumns;
        const int8_t* from = staged(c, 0);
        int8_t* to = c.codes(codes) + first * tokens;
        for (int64_t k = first; k < std::min(first + kColumns, padded); k += 4)
            for (int64_t t = 0; t < tokens; t++, to += 4) std::memcpy(to, from + t * padded + k, 4);
    }
    // Of N tokens four codes each side by side, as products of a tile of `tokens` read them.
    template <int N>
    void interleave(const int8_t* rows, int8_t* to, int64_t tokens) const {
        const int64_t padded = codes.padded;  // bytes that are written might be its own
        for (int64_t k = 0; k < padded; k += 4, to += 4 * tokens)
            for (int i = 0; i < N; i++) std::memcpy(to + 4 * i, rows + i * padded + k, 4);
    }
    void compute(const Context& c, int64_t token, int thread, int8_t* row) const {
        RowTask task{};
        task.x = c.at(what.x, token);
        task.up = what.up ? c.at(up, token) : nullptr;
        task.weight = what.norm;
        task.eps = what.eps;
        task.activation = what.activation;
        task.width = int(what.x.width / what.parts);
        task.scratch = c.scratch_of(thread);
        if (use) {
            task.codes = row;
            task.padded_width = int(codes.padded);
            task.inverse_scale = c.scales(codes) + token;
            task.code_sum = c.sums(codes) + token;
        } else {
            task.out = c.at(out, token);
        }
        for (int64_t part = 0; part < what.parts; part++, task.x += task.width, task.out += task.width)
            c.kernels.row(task);
        if (use && use->in_ternary && c.kernels.pair_row && are_many(c.kernels, c.num_tokens))
            c.kernels.pair_row(row, task.padded_width, !use->elsewhere, c.pair_offsets(codes) + token,
                               c.pair_list(codes, token));
    }
};

struct AddStep final : Step {
    Rows x, y, out;
    AddStep(Rows x_, Rows y_, Rows o) : x(x_), y(y_), out(o) {}
    void work(const Context& c, int64_t first, int64_t last, int) const override {
        for (int64_t t = first; t < last; t++) c.kernels.add(c.at(x, t), c.at(y, t), out.width, c.at(out, t));
    }
};

struct BiasStep final : Step {
    Rows x, out;
    const float* bias;
    BiasStep(Rows x_, const float* b, Rows o) : x(x_), out(o), bias(b) {}
    void work(const Context& c, int64_t first, int64_t last, int) const override {
        for (int64_t t = first; t < last; t++) c.kernels.add(c.at(x, t), bias, out.width, c.at(out, t));
    }
};

// Moves the rows of the wanted tokens together, to where they are with no more tokens than these: never behind where
// they were, nor onto rows that are still to be moved.
struct SelectStep final : Step {
    std::vector<Rows> kept;  // in the order of the arena
    explicit SelectStep(std::vector<Rows> k) : kept(std::move(k)) {}
    int64_t units(const Context& c) const override { return c.batch->has_choice(); }
    void work(const Context& c, int64_t, int64_t, int) const override {
        const Batch& batch = *c.batch;
        for (const Rows& rows : kept)
            for (int64_t i = 0; i < batch.num_wanted; i++)
                std::memmove(c.arena + rows.offset * batch.num_wanted + i * rows.stride, c.at(rows, batch.wanted[i]),
                             size_t(rows.width) * sizeof(float));
    }
};

}  // namespace

float* Context::at(const Rows& rows, int64_t token) const {
    float* base = rows.base == Base::arena    ? arena + rows.offset * num_tokens
                  : rows.base == Base::output ? output
                                              : const_cast<float*>(input);
    return base + token * rows.stride + rows.column;
}

Program::Program(int64_t arena_floats) : arena_floats_(arena_floats) {
    require(arena_floats >= 0 && arena_floats <= kMaxArena, "the arena's size is impossible");
}

void Program::push(std::unique_ptr<Step> step) {
    require(!sealed_, "a program that has run takes no more steps");
    steps_.push_back(std::move(step));
}

void Program::check(const Rows& rows, int64_t width) {
    require(rows.width == width, "a tensor of the plan has another width than its step needs");
    require(rows.stride > 0 && rows.stride <= kMaxWidth, "a row is 1 to 2^30 floats long");
    require(rows.column >= 0 && rows.width > 0 && rows.width <= rows.stride && rows.column <= rows.stride - rows.width,
            "columns lie outside a row");
    if (rows.base == Base::arena)
        require(rows.offset >= 0 && rows.offset <= arena_floats_ - rows.stride, "a tensor lies outside the arena");
    int64_t* external = rows.base == Base::input ? &input_width_ : rows.base == Base::output ? &output_width_ : nullptr;
    if (!external) return;
    require(!*external || *external == rows.stride, "the plan's input or output has two widths");
    *external = rows.stride;
}

void Program::check_written(const Rows& rows, int64_t width) {
    require(rows.base != Base::input, "the plan's input cannot be written");
    check(rows, width);
}

void Program::check(const Codes& codes, int64_t columns) {
    require(codes.padded >= columns && codes.padded <= kMaxWidth && codes.padded % kStepColumns == 0,
            "codes are padded to whole steps");
    max_padded_ = std::max(max_padded_, codes.padded);
    require(codes.offset >= 0 && codes.offset % 16 == 0 && codes.offset <= arena_floats_ - codes.floats(),
            "codes lie outside the arena");
}

// Of codes that are multiplied: a product in pairs has counted on all of their columns, which it must meet.
CodesUse& Program::source(const Codes& codes, int64_t columns) const {
    const auto fits = [&](const Written& each) {
        return each.codes.offset == codes.offset && each.codes.padded == codes.padded && each.width <= columns;
    };
    const auto found = std::find_if(codes_.begin(), codes_.end(), fits);
    require(found != codes_.end(), "a product takes codes that a step has written, of rows as wide");
    return *found->use;
}

void Program::check(const RowsStep& step, int64_t width) {
    check(step.x, width);
    if (step.up) check(*step.up, width);
    require((step.up != nullptr) == (step.activation != Activation::none), "a gate has an activation");
    require(step.up || step.norm || step.x.base != Base::output, "the plan's output cannot be read");
    require(step.parts >= 1 && step.x.width % step.parts == 0, "a row is cut into equal parts");
}

void Program::use(const Cache* cache, int64_t layer) {
    require(!cache_ || cache_ == cache, "a plan has one cache");
    require(layer >= 0 && layer < cache->num_layers(), "the cache has no such layer");
    cache_ = cache;
    needs_batch_ = true;
}

// The ids and the slots of a batch are not chosen from.
void Program::require_all_tokens() const {
    require(select_at_ > steps_.size(),
            "tokens are embedded, and their keys written, before some of them are selected");
}

void Program::embed(const DenseWeight* table, Rows out, float scale, const float* row_scales) {
    check_written(out, table->columns);
    require(!vocab_size_ || vocab_size_ == table->rows, "a plan has one vocabulary");
    require_all_tokens();
    vocab_size_ = table->rows;
    needs_batch_ = true;
    push(std::make_unique<EmbedStep>(table, out, scale, row_scales));
}

void Program::rotations(std::vector<float> inverse_frequencies, Rows out) {
    check_written(out, 2 * int64_t(inverse_frequencies.size()));
    // Beyond, the angle of a position could leave what sine_cosine reduces.
    for (float f : inverse_frequencies) require(f >= 0.0f && f <= 1e6f, "a frequency lies outside 0 .. 1e6");
    needs_batch_ = true;
    push(std::make_unique<RotationsStep>(std::move(inverse_frequencies), out));
}

void Program::rows_to_floats(RowsStep step, Rows out) {
    check(step, out.width);
    check_written(out, out.width);
    require(step.up || step.norm, "a row step does something");
    require(step.parts == 1 || !step.up, "a gated row is normed as a whole");
    push(std::make_unique<RowStep>(step, out));
}

void Program::rows_to_codes(RowsStep step, Codes out) {
    check(step, step.x.width);
    check(out, step.x.width);
    require(step.parts == 1, "codes have one scale a row: parts of it are normed to floats");
    std::erase_if(codes_, [&](const auto& each) { return each.codes.offset == out.offset; });
    codes_.push_back({out, step.x.width, std::make_shared<CodesUse>()});
    push(std::make_unique<RowStep>(step, out, codes_.back().use));
}

void Program::ternary(const TernaryWeight* weight, Codes x, Rows out, const Rows* residual) {
    check(x, weight->padded_columns());
    check_written(out, weight->rows());
    if (residual) check(*residual, weight->rows());
    require(weight->is_packed(), "a part of the ternary weight was never packed");
    CodesUse& use = source(x, weight->columns());
    (weight->group_columns() ? use.elsewhere : use.in_ternary) = true;
    cost_ += weight->rows() * weight->columns();
    if (!weight->group_columns()) return push(ternary_step(weight, x, out, residual));
    matrix_tokens_ = std::max(matrix_tokens_, kMatrixTokenColumns / weight->group_columns());
    own_floats_ = std::max(own_floats_, weight->column_groups());
    push(group_sums_step(weight, x, arena_floats_));
    push(group_product_step(weight, x, arena_floats_, out, residual));
}

void Program::dense(const DenseWeight* weight, Rows x, Rows out, const Rows* residual) {
    check(x, weight->columns);
    check_written(out, weight->rows);
    if (residual) check(*residual, weight->rows);
    cost_ += kCostOfFloat * weight->rows * weight->columns;
    push(dense_step(weight, x, out, residual));
}

void Program::int8(const QuantisedHead* weight, Codes x, Rows out, const Rows* residual) {
    check(x, weight->num_steps() * kStepColumns);
    require(x.padded % 64 == 0, "codes of int8 products are padded to lines of 64");
    check_written(out, weight->rows());
    if (residual) check(*residual, weight->rows());
    require(weight->low() != nullptr, "int8 products take 8 bits, not 6");
    source(x, weight->columns()).elsewhere = true;
    cost_ += weight->rows() * weight->columns();
    takes_int8_ = true;
    matrix_tokens_ = std::max(matrix_tokens_, kInt8MatrixTokens);
    push(int8_step(weight, x, out, residual));
}

void Program::rope_write(const Cache* cache, int64_t layer, Rows q, Rows k, Rows v, Rows rotations) {
    use(cache, layer);
    require_all_tokens();
    const int64_t dim = cache->layout().head_dim, keys = dim * cache->layout().num_kv_heads;
    check_written(q, q.width);
    require(q.width % keys == 0, "query heads come in whole groups of key heads");
    check_written(k, keys);
    check(v, keys);
    check(rotations, rotations.width);
    require(rotations.width <= dim && rotations.width % 2 == 0, "rotations are of pairs of a head's features");
    push(rope_write_step(cache, layer, q, k, v, rotations));
}

void Program::attend(const Cache* cache, int64_t layer, Rows q, Rows out, float scale, int64_t window) {
    require(window >= 0 && window <= kMaxWidth, "a window is 0 to 2^30 positions");
    use(cache, layer);
    check(q, q.width);
    require(q.width % (int64_t(cache->layout().head_dim) * cache->layout().num_kv_heads) == 0,
            "query heads come in whole groups of key heads");
    check_written(out, q.width);
    push(attend_step(cache, layer, q, out, scale, int(window)));
    piece_floats_ = std::max(piece_floats_, attend_piece_floats(cache->layout(), q.width));
}

void Program::add(Rows x, Rows y, Rows out) {
    check(x, out.width);
    check(y, out.width);
    check_written(out, out.width);
    push(std::make_unique<AddStep>(x, y, out));
}

void Program::bias(Rows x, const float* bias, Rows out) {
    check(x, out.width);
    check_written(out, out.width);
    push(std::make_unique<BiasStep>(x, bias, out));
}

void Program::select(std::vector<Rows> kept) {
    require(select_at_ > steps_.size(), "a program selects once");
    require(!output_width_, "the output has a row for each selected token: no step before uses it");
    int64_t end = 0;
    for (const Rows& rows : kept) {
        check(rows, rows.width);
        require(rows.base == Base::arena && !rows.column, "whole rows of the arena go on");
        require(rows.offset >= end, "rows that go on stand in the order of the arena, apart from each other");
        end = rows.offset + rows.stride;
    }
    needs_batch_ = true;
    select_at_ = steps_.size();
    push(std::make_unique<SelectStep>(std::move(kept)));
}

int64_t Program::scratch_floats(int64_t num_tokens) const {
    int64_t most = 0;
    for (const auto& step : steps_) most = std::max(most, step->scratch_floats(num_tokens));
    return most;
}

}  // namespace bitnet
