#include "screen.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace bitnet {

namespace {

// With more rows an input left behind 6 bits, or behind 8, logits are so flat that 8 bits are read sooner than rows.
constexpr size_t kFewOf6 = 200, kFewOf8 = 3;
constexpr size_t kFewBest = 8;       // for so many of an input 6 bits do, where 8 take two products
constexpr int64_t kManyRows = 1024;  // threads take them in larger parts, in which more of them are fetched ahead
constexpr int64_t kStrideTiles = 4;  // as the sampler's blocks have 64 rows
constexpr int64_t kCostOfCode = 2;   // of a weight, in ternary ones
// The codes of a head that is no larger stay in the second cache of a core, which screens so many inputs by itself.
constexpr int64_t kSmallHead = 1 << 20, kFewInputs = 2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

HeadErrors errors_of(const RowErrors& errors, int64_t row) {
    return {&errors.error[size_t(row)], &errors.size[size_t(row)]};
}

}  // namespace

// What a thread has seen of an input: its k largest lower ends with their rows, in a heap, the smallest on top.
struct Screen::Best {
    float least = -kInfinity;  // what k rows reach
    std::vector<std::pair<float, int32_t>> lower = {};

    void see(float end, int64_t row, size_t k) {
        if (!(end > least) || end == kInfinity) return;
        const auto greater = std::greater<>();
        if (lower.size() == k) {
            std::pop_heap(lower.begin(), lower.end(), greater);
            lower.pop_back();
        }
        lower.emplace_back(end, int32_t(row));
        std::push_heap(lower.begin(), lower.end(), greater);
        if (lower.size() == k) least = lower.front().first;
    }
};

Screen::Screen(const DenseWeight& head, Executor& executor)
    : head_(head),
      ternary_(head.codes),
      quantised_(ternary_ ? nullptr : std::make_unique<QuantisedHead>(head, 8, executor)) {}
Screen::Screen(const DenseWeight& head, const QuantisedHead::Parts& parts, Executor& executor)
    : head_(head), quantised_(std::make_unique<QuantisedHead>(head.rows, head.columns, parts, executor)) {}

InputForm Screen::form_of(const Kernels& kernels, int count, size_t k) const {
    const InputForm form = ternary_ ? InputForm::whole : quantised_->form(kernels, count);
    const bool is_fast = quantised_ && kernels.head_matrix && k == 1;  // with AMX, VNNI too is as fast as the memory
    return form == InputForm::whole && count >= kernels.rough_inputs && !is_fast ? InputForm::rough : form;
}

// How many bits of the weights are read: 6 while that leaves few rows to compute.
int Screen::bits_of(const Kernels& kernels, InputForm form, size_t k) const {
    const bool is_rough = form == InputForm::rough, is_flat = form != InputForm::whole && is_flat_;
    if (kernels.whole_bytes) return k > 1 || is_flat ? 8 : 6;
    return k > (is_rough ? 1 : kFewBest) ? 8 : 6;
}

int64_t Screen::bytes_read(const Kernels& kernels, int num_inputs) const {
    return ternary_ ? ternary_->bytes() : bytes() / 8 * bits_of(kernels, form_of(kernels, num_inputs, 1), 1);
}

// Up to kInputsInMatrix inputs at a time: with all threads, or of a small head each thread some of its own.
void Screen::in_groups(Executor& executor, int64_t num_inputs,
                       const std::function<void(Desk&, int64_t, int)>& work) const {
    const auto lock = mutex_.lock();
    const int64_t size = head_.rows * head_.columns, threads = executor.num_threads();
    const bool is_small = size <= kSmallHead;
    const int64_t fewest = (num_inputs + kInputsInMatrix - 1) / kInputsInMatrix;
    const int64_t count = is_small ? std::max(fewest, std::min(threads, num_inputs / kFewInputs)) : fewest;
    desks_.resize(size_t(threads));
    const auto work_at = [&](Desk& desk, int64_t first, int64_t last) {
        for (int64_t group = first; group < last; group++) {
            const int64_t begin = num_inputs * group / count;
            work(desk, begin, int(num_inputs * (group + 1) / count - begin));
        }
    };
    if (!is_small || count <= 1) return work_at(desks_[0], 0, count);
    executor.each(count, kWorthApart * kCostOfCode * size * num_inputs / count, 1,
                  [&](int64_t first, int64_t last, int thread) { work_at(desks_[size_t(thread)], first, last); });
}

int64_t Screen::top(Executor& executor, const float* x, int64_t num_inputs, int64_t k, int32_t* ids,
                    float* logits) const {
    if (k < 1 || k > head_.rows) throw std::invalid_argument("k lies outside 1 .. the number of rows");
    std::atomic<int64_t> computed{0};
    in_groups(executor, num_inputs, [&](Desk& desk, int64_t begin, int count) {
        const InputForm form = form_of(executor.kernels(), count, size_t(k));
        const int bits = bits_of(executor.kernels(), form, size_t(k));
        size_t left = 0;
        int64_t at = begin * k;
        for (Logits& all : top_of_some(executor, desk, x + begin * head_.columns, count, size_t(k), bits)) {
            left += all.size();
            std::partial_sort(all.begin(), all.begin() + k, all.end());
            for (int64_t j = 0; j < k; j++, at++) ids[at] = all[size_t(j)].row, logits[at] = all[size_t(j)].value;
        }
        computed += int64_t(left);
        if (form != InputForm::whole && k == 1) is_flat_ = left > size_t(count) * (bits == 6 ? kFewOf6 : kFewOf8);
    });
    return computed;
}

// The rows with the k largest lower ends of each input, and what has been seen of them all.
std::vector<RowNumbers> Screen::look(Executor& executor, Desk& desk, const float* x, int count, size_t k,
                                     int bits) const {
    const Kernels& kernels = executor.kernels();
    const RowErrors& errors = ternary_ ? ternary_->errors : bits == 6 ? quantised_->errors6 : quantised_->errors8;
    std::vector<Best> best(size_t(executor.num_threads() * count));
    desk.seen.reserve(num_tiles(), count);
    score(executor, x, count, form_of(kernels, count, k), bits,
          [&](int first, int64_t tile, const HeadScores& scores, int thread) {
              look_at_tile(kernels, desk.seen, first, tile, scores, errors_of(errors, tile * kHeadRows), k,
                           &best[size_t(thread * count)]);
          });
    std::vector<RowNumbers> rows(static_cast<size_t>(count));
    for (size_t i = 0; i < rows.size(); i++) rows[i] = best_rows(best, i, size_t(count), k);
    return rows;
}

// The scores of all rows.
void Screen::score(Executor& executor, const float* x, int count, InputForm form, int bits, const Look& look) const {
    const Kernels& kernels = executor.kernels();
    const auto each = [&](int64_t tiles, const auto& work) {
        executor.each(num_tiles(), kCostOfCode * kHeadRows * head_.columns * count, tiles, work);
    };
    if (ternary_) {
        const TernaryTable::Inputs inputs = ternary_->inputs(executor, x, count, form);
        std::vector<TernaryTable::Room> rooms(size_t(executor.num_threads()));
        each(std::max(kTilesOnEnd, 2 * inputs.groups_at_once()), [&](int64_t first, int64_t last, int thread) {
            ternary_->each_tile(kernels, inputs, first, last, rooms[size_t(thread)],
                                [&](int t, int64_t tile, const HeadScores& scores) {
                                    look(inputs.codes.first_of(t), tile, scores, thread);
                                });
        });
        return;
    }
    const HeadInputs inputs = quantised_->inputs(executor, x, count, form);
    each(kTilesOnEnd, [&](int64_t first, int64_t last, int thread) {
        quantised_->each_tile(
            kernels, inputs, first, last, bits, [&](int t, int64_t tile, const QuantisedHead::Sums& sums) {
                look(inputs.first_of(t), tile, quantised_->scores_of(inputs, t, tile, bits, sums), thread);
            });
    });
}

// The logits of all rows that may be among the k best, k at least, of each input.
std::vector<Screen::Logits> Screen::top_of_some(Executor& executor, Desk& desk, const float* x, int count, size_t k,
                                                int bits) const {
    std::vector<RowNumbers> rows = look(executor, desk, x, count, k, bits);
    const std::vector<Logits> first = compute(executor, x, rows);
    executor.each(count, num_tiles(), 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; i++) rows[size_t(i)] = rows_above(desk.seen, int(i), first[size_t(i)], k);
    });
    return compute(executor, x, rows);
}

// Before another: not-a-number first, so that whoever reads the result sees it; then by value, then by row.
bool Screen::Logit::operator<(const Logit& other) const {
    if (std::isnan(value) || std::isnan(other.value))
        return std::isnan(value) && (!std::isnan(other.value) || row < other.row);
    return value != other.value ? value > other.value : row < other.row;
}

void Screen::Seen::reserve(int64_t num_tiles, int count) {
    stride_ = (num_tiles + kStrideTiles - 1) / kStrideTiles * kStrideTiles;
    const int64_t bytes = stride_ * count * (1 + kHeadRows) * 4;
    if (memory_.bytes() < bytes) memory_ = Memory(bytes);
    most_ = reinterpret_cast<float*>(memory_.data());
    upper_ = most_ + stride_ * count;
}

// The upper ends of a tile, for each input of a tile of inputs, and the largest lower ends.
void Screen::look_at_tile(const Kernels& kernels, const Seen& seen, int first, int64_t tile, const HeadScores& scores,
                          const HeadErrors& errors, size_t k, Best* best) const {
    const int64_t row = tile * kHeadRows, rows = std::min<int64_t>(kHeadRows, head_.rows - row);
    float lower[kInputsInMatrix][kHeadRows], least[kInputsInMatrix];
    const HeadEnds ends = seen.ends(first, tile, lower[0], least);
    const int64_t soon = kTilesAtOnce * kHeadRows;  // what has not been near since the last token
    for (const float* next : {errors.error, errors.size, scores.half_scale})
        if (next) __builtin_prefetch(next + soon);
    for (int i = 0; i < scores.count; i++) {
        __builtin_prefetch(ends.upper + i * ends.upper_stride + soon, 1);
        least[i] = best[first + i].least;
    }
    uint32_t higher = kernels.head_bounds(scores, errors, ends);
    for (; higher != 0; higher &= higher - 1) {
        const int i = std::countr_zero(higher);
        for (int64_t r = 0; r < rows; r++) best[first + i].see(lower[i][r], row + r, k);
    }
}

// The upper ends of some of so many inputs by what has not been looked at: the low 2 bits of weights, or where a head
// is ternary, the low codes of inputs.
void Screen::refine(Executor& executor, const Seen& seen, const float* x, int count,
                    const std::vector<int>& indices) const {
    const InputForm form = form_of(executor.kernels(), count, 1);
    std::vector<float> some;
    for (const int index : indices) some.insert(some.end(), x + index * head_.columns, x + (index + 1) * head_.columns);
    if (ternary_) {
        const auto lower_ends = [&](int first, int64_t tile, const HeadScores& scores, int) {
            float upper[kInputsInMatrix][kHeadRows], lower[kInputsInMatrix][kHeadRows];
            float most[kInputsInMatrix], least[kInputsInMatrix] = {};
            executor.kernels().head_bounds(scores, errors_of(ternary_->errors, tile * kHeadRows),
                                           {upper[0], kHeadRows, most, 1, lower[0], least});
            for (int i = 0; i < scores.count; i++) {
                float* before = seen.upper(indices[size_t(first + i)], tile);
                for (int r = 0; r < kHeadRows; r++) before[r] = upper[i][r] < before[r] ? upper[i][r] : before[r];
            }
        };
        return score(executor, some.data(), int(indices.size()), InputForm::whole, 8, lower_ends);
    }
    const HeadInputs inputs = quantised_->inputs(executor, some.data(), int(indices.size()),
                                                 form == InputForm::rough ? form : InputForm::whole);
    const auto refine_tile = [&](int input_tile, int64_t tile, const QuantisedHead::Sums& sums) {
        const int64_t row = tile * kHeadRows;
        HeadScores low = quantised_->scores_of(inputs, input_tile, tile, 2, sums);
        const int *index = &indices[size_t(inputs.first_of(input_tile))], *end = index + low.count;
        for (; index < end; index++, low.inputs++, low.sums += low.vectors_each * kHeadRows)
            executor.kernels().head_refine(low, errors_of(quantised_->errors6, row),
                                           errors_of(quantised_->errors8, row), seen.upper(*index, tile));
    };
    executor.each(num_tiles(), kHeadRows * head_.columns * int64_t(indices.size()), 8,
                  [&](int64_t first, int64_t last, int) {
                      quantised_->each_tile(executor.kernels(), inputs, first, last, 2, refine_tile);
                  });
}

// The k rows with the largest lower ends that any thread has seen, or fewer where those are not finite.
RowNumbers Screen::best_rows(const std::vector<Best>& best, size_t index, size_t count, size_t k) {
    Best all;
    for (size_t i = index; i < best.size(); i += count)
        for (const auto& [end, row] : best[i].lower) all.see(end, row, k);
    RowNumbers rows;
    for (const auto& [end, row] : all.lower) rows.push_back(row);
    std::sort(rows.begin(), rows.end());
    return rows;
}

// The rows that may have logits as large as the least of k known ones: k at least, if the bounds are true; those of a
// damaged file may be false, and then it is all rows.
RowNumbers Screen::rows_above(const Seen& seen, int index, const Logits& known, size_t k) const {
    float least = known.size() == k ? kInfinity : -kInfinity;
    for (const Logit& logit : known) least = std::isnan(logit.value) ? -kInfinity : std::min(least, logit.value);
    RowNumbers rows;
    for (int64_t tile = 0; tile < num_tiles(); tile++) {
        if (seen.most(index, tile) < least) continue;
        const float* upper = seen.upper(index, tile);
        const int64_t row = tile * kHeadRows, count = std::min<int64_t>(kHeadRows, head_.rows - row);
        for (int64_t r = 0; r < count; r++)
            if (!(upper[r] < least)) rows.push_back(int32_t(row + r));
    }
    if (rows.size() < k) {
        rows.resize(size_t(head_.rows));
        std::iota(rows.begin(), rows.end(), 0);
    }
    return rows;
}

void Screen::dense_rows(const Kernels& kernels, const float* input, const int32_t* rows, int64_t count,
                        float* out) const {
    const int columns = int(head_.columns);
    if (!ternary_)
        return kernels.dense({head_.data, head_.dtype, count, columns, input, columns, 1, out, 1, nullptr, 0, rows});
    std::vector<float> row(size_t(head_.columns));
    for (int64_t i = 0; i < count; i++) {
        ternary_->read(kernels, rows[i], row.data());
        kernels.dense({row.data(), Dtype::f32, 1, columns, input, columns, 1, out + i, 1, nullptr, 0, nullptr});
    }
}

// The exact logits of rows, in ascending order, of each input.
std::vector<Screen::Logits> Screen::compute(Executor& executor, const float* x,
                                            const std::vector<RowNumbers>& rows) const {
    RowNumbers all;
    std::vector<int64_t> starts = {0};  // where the rows of an input begin
    for (const RowNumbers& of_input : rows) {
        all.insert(all.end(), of_input.begin(), of_input.end());
        starts.push_back(int64_t(all.size()));
    }
    std::vector<float> exact(all.size());
    const int64_t count = int64_t(all.size());
    executor.each(count, head_.columns, count < kManyRows ? 8 : 64, [&](int64_t first, int64_t last, int) {
        for (int64_t j = first, end; j < last; j = end) {
            const auto next = std::upper_bound(starts.begin(), starts.end(), j);  // where the next input begins
            const float* input = x + (next - starts.begin() - 1) * head_.columns;
            end = std::min(*next, last);
            dense_rows(executor.kernels(), input, &all[size_t(j)], end - j, &exact[size_t(j)]);
        }
    });
    std::vector<Logits> logits(rows.size());
    for (size_t i = 0; i < rows.size(); i++)
        for (int64_t j = starts[i]; j < starts[i + 1]; j++) logits[i].push_back({all[size_t(j)], exact[size_t(j)]});
    return logits;
}

}  // namespace bitnet
