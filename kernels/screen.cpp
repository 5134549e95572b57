#include "screen.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace bitnet {

namespace {

constexpr int kInputsApart = 4;  // from so many inputs on their products take longer than fetching the rows
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Logit {
    int32_t row;
    float value;
};

// Not-a-number first, so that whoever reads the result sees it; then by value, then by row.
bool is_better(const Logit& p, const Logit& q) {
    if (std::isnan(p.value) || std::isnan(q.value))
        return std::isnan(p.value) && (!std::isnan(q.value) || p.row < q.row);
    return p.value != q.value ? p.value > q.value : p.row < q.row;
}

}  // namespace

// What a thread knows of an input: its k largest lower ends, the smallest on top, and the rows that it kept.
struct Screen::Best {
    std::vector<float> lower;
    float least = -kInfinity;                     // the k-th largest lower end
    std::vector<std::pair<int32_t, float>> kept;  // rows with their upper ends

    void see(float end, size_t k) {
        if (!(end > least) || end == kInfinity) return;
        const auto greater = std::greater<float>();
        if (lower.size() == k) {
            std::pop_heap(lower.begin(), lower.end(), greater);
            lower.pop_back();
        }
        lower.push_back(end);
        std::push_heap(lower.begin(), lower.end(), greater);
        if (lower.size() == k) least = lower.front();
    }
};

Screen::Screen(const DenseWeight& head, Executor& executor) : head_(head), quantised_(head, 8, executor) {}
Screen::Screen(const DenseWeight& head, const QuantisedHead::Parts& parts, Executor& executor)
    : head_(head), quantised_(head.rows, head.columns, parts, executor) {}

int64_t Screen::top(Executor& executor, const float* x, int64_t num_inputs, int64_t k, int32_t* ids,
                    float* logits) const {
    if (k < 1 || k > head_.rows) throw std::invalid_argument("k lies outside 1 .. the number of rows");
    int64_t computed = 0;
    for (int64_t begin = 0; begin < num_inputs; begin += kInputsInMatrix) {
        const int count = int(std::min<int64_t>(kInputsInMatrix, num_inputs - begin));
        computed +=
            top_of_some(executor, x + begin * head_.columns, count, size_t(k), ids + begin * k, logits + begin * k);
    }
    return computed;
}

int64_t Screen::top_of_some(Executor& executor, const float* x, int count, size_t k, int32_t* ids,
                            float* logits) const {
    InputForm form = quantised_.form(executor.kernels(), count);
    if (!executor.kernels().head_matrix && count >= kInputsApart) form = InputForm::apart;
    const HeadInputs inputs(executor, x, count, head_.columns, form);
    std::vector<Best> best(size_t(executor.num_threads()) * kInputsInMatrix);
    executor.each(quantised_.num_tiles(), kHeadRows * head_.columns * count, 8,
                  [&](int64_t first, int64_t last, int thread) {
                      const Kernels& kernels = executor.kernels();
                      Best* own = &best[size_t(thread) * kInputsInMatrix];
                      quantised_.each_tile(kernels, inputs, first, last, form == InputForm::together ? 6 : 8,
                                           [&](int input_tile, int64_t tile, QuantisedHead::Sums& sums) {
                                               keep_of_tile(kernels, inputs, input_tile, tile, sums, k, own);
                                           });
                  });
    std::vector<int32_t> rows;    // to compute, of all inputs
    std::vector<int64_t> starts;  // where those of an input begin
    for (int i = 0; i < count; i++) {
        starts.push_back(int64_t(rows.size()));
        keep_best(best, i, k, rows);
    }
    starts.push_back(int64_t(rows.size()));
    const std::vector<float> exact = compute(executor, x, rows, starts);
    for (int i = 0; i < count; i++) {
        std::vector<Logit> all;
        for (int64_t j = starts[size_t(i)]; j < starts[size_t(i) + 1]; j++)
            all.push_back({rows[size_t(j)], exact[size_t(j)]});
        std::partial_sort(all.begin(), all.begin() + int64_t(k), all.end(), is_better);
        for (size_t j = 0; j < k; j++) *ids++ = all[j].row, *logits++ = all[j].value;
    }
    return int64_t(rows.size());
}

// The rows of a tile that may be among the best, for each input of a tile of inputs.
void Screen::keep_of_tile(const Kernels& kernels, const HeadInputs& inputs, int input_tile, int64_t tile,
                          QuantisedHead::Sums& sums, size_t k, Best* best) const {
    const int first = inputs.first_of(input_tile), count = inputs.count_of(input_tile);
    float upper[kHeadRows], lower[kHeadRows];
    const auto may_reach = [&](const QuantisedHead::Errors& errors, int i, const int32_t* high, const int32_t* low) {
        const auto& input = inputs[first + i];
        HeadErrors of_rows{&errors.error[size_t(tile * kHeadRows)], &errors.size[size_t(tile * kHeadRows)],
                           input.error_factor, low ? input.size_factor : input.high_size_factor};
        HeadScores scores = quantised_.scores_of(inputs, first + i, tile, high, low ? low : high);
        if (!low) scores.low = 0;
        return kernels.head_bounds(scores, of_rows, best[first + i].least, upper, lower);
    };
    const auto both_may_reach = [&](const QuantisedHead::Errors& errors, int i) {
        const int32_t* high = sums + 2 * i * kHeadRows;
        return may_reach(errors, i, high, high + kHeadRows);
    };
    if (inputs.form() == InputForm::apart) {
        for (int i = 0; i < count; i++) {
            const int32_t* high = sums + i * kHeadRows;
            if (!may_reach(quantised_.errors8, i, high, nullptr)) continue;
            QuantisedHead::Sums low;
            quantised_.low_sums(kernels, inputs, first + i, tile, low);
            if (may_reach(quantised_.errors8, i, high, low)) keep_rows(tile, upper, lower, k, best[first + i]);
        }
        return;
    }
    if (inputs.form() == InputForm::together) {
        bool any = false;
        for (int i = 0; i < count && !any; i++) any = both_may_reach(quantised_.errors6, i);
        if (!any) return;
        quantised_.sums(kernels, inputs, input_tile, tile, 1, 8, &sums);
    }
    for (int i = 0; i < count; i++)
        if (both_may_reach(quantised_.errors8, i)) keep_rows(tile, upper, lower, k, best[first + i]);
}

void Screen::keep_rows(int64_t tile, const float* upper, const float* lower, size_t k, Best& best) const {
    const int64_t row = tile * kHeadRows, count = std::min<int64_t>(kHeadRows, head_.rows - row);
    for (int64_t r = 0; r < count; r++) best.see(lower[r], k);
    for (int64_t r = 0; r < count; r++)
        if (!(upper[r] < best.least)) best.kept.emplace_back(int32_t(row + r), upper[r]);
}

// Appends the rows, in ascending order, that no thread can rule out once all know what each has found.
void Screen::keep_best(std::vector<Best>& best, int index, size_t k, std::vector<int32_t>& rows) {
    Best all;
    for (size_t i = size_t(index); i < best.size(); i += kInputsInMatrix)
        for (const float end : best[i].lower) all.see(end, k);
    const auto first = std::ptrdiff_t(rows.size());
    for (size_t i = size_t(index); i < best.size(); i += kInputsInMatrix)
        for (const auto& [row, upper] : best[i].kept)
            if (!(upper < all.least)) rows.push_back(row);
    std::sort(rows.begin() + first, rows.end());
}

// The exact logits of rows[starts[i] .. starts[i + 1]] for input i.
std::vector<float> Screen::compute(Executor& executor, const float* x, const std::vector<int32_t>& rows,
                                   const std::vector<int64_t>& starts) const {
    std::vector<float> exact(rows.size());
    executor.each(int64_t(rows.size()), head_.columns, 8, [&](int64_t first, int64_t last, int) {
        for (int64_t j = first, end; j < last; j = end) {
            const auto next = std::upper_bound(starts.begin(), starts.end(), j);  // the first row of the next input
            for (end = j + 1; end < std::min(last, *next) && rows[size_t(end)] == rows[size_t(end - 1)] + 1;) end++;
            const auto* row = static_cast<const uint8_t*>(head_.data) + rows[size_t(j)] * head_.row_bytes();
            const float* input = x + (next - starts.begin() - 1) * head_.columns;
            executor.kernels().dense({row, head_.dtype, end - j, int(head_.columns), input, head_.columns, 1,
                                      &exact[size_t(j)], end - j, nullptr, 0});
        }
    });
    return exact;
}

}  // namespace bitnet
