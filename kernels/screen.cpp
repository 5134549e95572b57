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

// How many bits of the weights every row is scored with. More are read along where products of several inputs take
// longer than fetching the rows, and whole bytes are one product and not two.
int first_bits(const Kernels& kernels, InputForm form) {
    return form == InputForm::together || (form == InputForm::apart && !kernels.whole_bytes) ? 6 : 8;
}

// Not-a-number first, so that whoever reads the result sees it; then by value, then by row.
bool is_better(const Logit& p, const Logit& q) {
    if (std::isnan(p.value) || std::isnan(q.value))
        return std::isnan(p.value) && (!std::isnan(q.value) || p.row < q.row);
    return p.value != q.value ? p.value > q.value : p.row < q.row;
}

}  // namespace

// What a thread knows of an input: its k largest lower ends in a heap, the smallest on top, and the rows that it kept.
struct Screen::Best {
    float least = -kInfinity;                          // what k rows are known to reach
    std::vector<float> lower = {};                     // the largest lower ends above it, k at most
    std::vector<std::pair<int32_t, float>> kept = {};  // rows with their upper ends

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
    const bool at_once = form == InputForm::matrix;  // the first scores are the last ones
    std::vector<Best> best(size_t(executor.num_threads()) * kInputsInMatrix);
    const auto pass = [&](int64_t chunk, const auto& work) {
        executor.each(quantised_.num_tiles(), kHeadRows * head_.columns * count, chunk,
                      [&](int64_t first, int64_t last, int thread) {
                          work(executor.kernels(), first, last, &best[size_t(thread) * kInputsInMatrix]);
                      });
    };
    const std::lock_guard<std::mutex> lock(seen_.mutex);
    if (!at_once) seen_.reserve(quantised_.num_tiles(), inputs);
    pass(8, [&](const Kernels& kernels, int64_t first, int64_t last, Best* own) {
        quantised_.each_tile(kernels, inputs, first, last, first_bits(kernels, form),
                             [&](int input_tile, int64_t tile, QuantisedHead::Sums& sums) {
                                 if (at_once)
                                     keep_of_tile(kernels, inputs, input_tile, tile, sums, nullptr, k, own);
                                 else
                                     look_at_tile(kernels, inputs, input_tile, tile, sums, k, own);
                             });
    });
    float least[kInputsInMatrix];
    for (int i = 0; i < count; i++) least[i] = least_of(best, i, k, -kInfinity);
    if (!at_once) {
        for (size_t i = 0; i < best.size(); i++) best[i] = {.least = least[i % kInputsInMatrix]};
        pass(64, [&](const Kernels& kernels, int64_t first, int64_t last, Best* own) {
            for (int64_t tile = first; tile < last; tile++)
                for (int t = 0; t < inputs.num_tiles(); t++)
                    keep_of_tile(kernels, inputs, t, tile, seen_.sums(inputs, t, tile), seen_.ends(inputs, t, tile), k,
                                 own);
        });
    }
    std::vector<int32_t> rows;    // to compute, of all inputs
    std::vector<int64_t> starts;  // where those of an input begin
    for (int i = 0; i < count; i++) {
        starts.push_back(int64_t(rows.size()));
        keep_best(best, i, k, least_of(best, i, k, least[i]), rows);
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

void Screen::Seen::reserve(int64_t num_tiles, const HeadInputs& inputs) {
    const int64_t sums_bytes = num_tiles * inputs.num_vectors() * kHeadRows * 4,
                  ends_bytes = num_tiles * inputs.count() * 4;
    if (sums_.bytes() < sums_bytes) sums_ = Memory(sums_bytes);
    if (ends_.bytes() < ends_bytes) ends_ = Memory(ends_bytes);
}

int32_t* Screen::Seen::sums(const HeadInputs& inputs, int input_tile, int64_t tile) {
    return reinterpret_cast<int32_t*>(sums_.data()) +
           (tile * inputs.num_vectors() + inputs.first_vector_of(input_tile)) * kHeadRows;
}

float* Screen::Seen::ends(const HeadInputs& inputs, int input_tile, int64_t tile) {
    return reinterpret_cast<float*>(ends_.data()) + tile * inputs.count() + inputs.first_of(input_tile);
}

HeadEnds Screen::bound(const Kernels& kernels, const HeadInputs& inputs, int index, int64_t tile, int bits,
                       const int32_t* high, const int32_t* low, Ends& ends) const {
    const QuantisedHead::Errors& errors = bits == 6 ? quantised_.errors6 : quantised_.errors8;
    const auto& input = inputs[index];
    HeadErrors of_rows{&errors.error[size_t(tile * kHeadRows)], &errors.size[size_t(tile * kHeadRows)],
                       input.error_factor, low ? input.size_factor : input.high_size_factor};
    HeadScores scores = quantised_.scores_of(inputs, index, tile, high, low ? low : high);
    if (!low) scores.low = 0;
    return kernels.head_bounds(scores, of_rows, ends.upper, ends.lower);
}

// The first scores of a tile, for each input of a tile of inputs.
void Screen::look_at_tile(const Kernels& kernels, const HeadInputs& inputs, int input_tile, int64_t tile,
                          const QuantisedHead::Sums& sums, size_t k, Best* best) const {
    const int first = inputs.first_of(input_tile), each = inputs.vectors_each();
    const int64_t rows = std::min<int64_t>(kHeadRows, head_.rows - tile * kHeadRows);
    const int bits = first_bits(kernels, inputs.form());
    float* top = seen_.ends(inputs, input_tile, tile);
    bool any = false;
    for (int i = 0; i < inputs.count_of(input_tile); i++) {
        const int32_t* high = sums + each * i * kHeadRows;
        Best& of_input = best[first + i];
        Ends ends;
        const HeadEnds most =
            bound(kernels, inputs, first + i, tile, bits, high, each == 2 ? high + kHeadRows : nullptr, ends);
        top[i] = most.upper;
        any |= !(most.upper < of_input.least);
        if (most.lower > of_input.least)
            for (int64_t r = 0; r < rows; r++) of_input.see(ends.lower[r], k);
    }
    if (any) std::copy(sums, sums + inputs.vectors_of(input_tile) * kHeadRows, seen_.sums(inputs, input_tile, tile));
}

// The rows of a tile that may be among the best, for each input of a tile of inputs; `top`, if given, is what was seen
// of them before.
void Screen::keep_of_tile(const Kernels& kernels, const HeadInputs& inputs, int input_tile, int64_t tile, int32_t* sums,
                          const float* top, size_t k, Best* best) const {
    const int first = inputs.first_of(input_tile), count = inputs.count_of(input_tile), each = inputs.vectors_each();
    const auto is_out = [&](int i) { return top && top[i] < best[first + i].least; };
    int num_out = 0;
    for (int i = 0; i < count; i++) num_out += is_out(i);
    if (num_out == count) return;
    if (first_bits(kernels, inputs.form()) == 6) quantised_.refine(kernels, inputs, input_tile, tile, sums);
    for (int i = 0; i < count; i++) {
        const int32_t* high = sums + each * i * kHeadRows;
        Ends ends;
        QuantisedHead::Sums low;
        const auto is_above = [&](const int32_t* of_low) {
            const HeadEnds most = bound(kernels, inputs, first + i, tile, 8, high, of_low, ends);
            return !(most.upper < best[first + i].least);
        };
        if (is_out(i) || !is_above(each == 2 ? high + kHeadRows : nullptr)) continue;
        if (each == 1) {
            quantised_.low_sums(kernels, inputs, first + i, tile, low);
            if (!is_above(low)) continue;
        }
        keep_rows(tile, ends, k, best[first + i]);
    }
}

void Screen::keep_rows(int64_t tile, const Ends& ends, size_t k, Best& best) const {
    const int64_t row = tile * kHeadRows, count = std::min<int64_t>(kHeadRows, head_.rows - row);
    for (int64_t r = 0; r < count; r++) best.see(ends.lower[r], k);
    for (int64_t r = 0; r < count; r++)
        if (!(ends.upper[r] < best.least)) best.kept.emplace_back(int32_t(row + r), ends.upper[r]);
}

// The k-th largest lower end that any thread has seen, if it lies above `least`.
float Screen::least_of(const std::vector<Best>& best, int index, size_t k, float least) {
    Best all{.least = least};
    for (size_t i = size_t(index); i < best.size(); i += kInputsInMatrix)
        for (const float end : best[i].lower) all.see(end, k);
    return all.least;
}

// Appends the rows, in ascending order, that no thread can rule out once all know what each has found: k at least, if
// the bounds are true; those of a damaged file may be false, and then it is all rows.
void Screen::keep_best(const std::vector<Best>& best, int index, size_t k, float least,
                       std::vector<int32_t>& rows) const {
    const auto first = std::ptrdiff_t(rows.size());
    for (size_t i = size_t(index); i < best.size(); i += kInputsInMatrix)
        for (const auto& [row, upper] : best[i].kept)
            if (!(upper < least)) rows.push_back(row);
    if (rows.size() - size_t(first) < k) {
        rows.resize(size_t(first + head_.rows));
        std::iota(rows.begin() + first, rows.end(), 0);
    }
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
