#include "screen.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "lanes_generic.h"

namespace bitnet {

namespace {

constexpr int kInputsAtOnce = 4;
constexpr double kRoundoff = 1.0 / (1 << 24);
constexpr double kMaxNorm = 1e18;

float round_up(double x) { return std::nextafter(float(x), std::numeric_limits<float>::infinity()); }

// A row of the head in float32; what is beyond its columns stays 0.
void read_row(const DenseWeight& w, int64_t row, float* out) {
    const auto* p = static_cast<const uint8_t*>(w.data) + row * w.row_bytes();
    if (w.dtype == Dtype::f32) {
        std::memcpy(out, p, size_t(w.row_bytes()));
        return;
    }
    const auto* bits = reinterpret_cast<const uint16_t*>(p);
    for (int64_t k = 0; k < w.columns; k++)
        out[k] = w.dtype == Dtype::f16 ? half_to_float(bits[k]) : bits_to_float(uint32_t(bits[k]) << 16);
}

// 16 codes of a row into a step: low 4 bits in two planes of 64 bytes, high 2 bits in a third.
void pack_step(const uint8_t* codes, uint8_t* out) {
    uint32_t field[4];
    std::memcpy(field, codes, 16);
    constexpr uint32_t low = 0x0f0f0f0f, two = 0x03030303;
    const uint32_t planes[3] = {
        (field[0] & low) | (field[1] & low) << 4, (field[2] & low) | (field[3] & low) << 4,
        (field[0] >> 4 & two) | (field[1] >> 4 & two) << 2 | (field[2] >> 4 & two) << 4 | (field[3] >> 4 & two) << 6};
    for (int i = 0; i < 3; i++) std::memcpy(out + 64 * i, planes + i, 4);
}

}  // namespace

// Up to kInputsAtOnce inputs as codes, with the constants of their bounds.
struct Screen::Inputs {
    int count;
    std::vector<int8_t> codes;                      // [columns / 4][2 count][4]
    float high[kInputsAtOnce], low[kInputsAtOnce];  // a, b
    int32_t high_sum[kInputsAtOnce], low_sum[kInputsAtOnce];
    float error_factor[kInputsAtOnce], size_factor[kInputsAtOnce];  // c, f

    Inputs(const float* x, int count_, int64_t columns, int64_t steps)
        : count(count_), codes(size_t(steps * kStepColumns * 2 * count_)) {
        for (int i = 0; i < count; i++) quantise(x + i * columns, i, columns);
    }

    void quantise(const float* x, int i, int64_t columns) {
        float largest = 0;
        double squares = 0;  // not a number, or infinite, where an element is
        for (int64_t k = 0; k < columns; k++) {
            largest = std::max(largest, std::fabs(x[k]));
            squares += double(x[k]) * x[k];
        }
        const bool finite = std::sqrt(squares) <= kMaxNorm;
        const float a = high[i] = std::max(largest / 127.0f, std::numeric_limits<float>::min());
        const float b = low[i] = std::max(a / 254.0f, std::numeric_limits<float>::min());
        if (!finite) {  // bounds that are not numbers: every row is kept
            error_factor[i] = size_factor[i] = std::numeric_limits<float>::quiet_NaN();
            high_sum[i] = low_sum[i] = 0;
            return;
        }
        double size = 0, error = 0, highs = 0, lows = 0;
        int32_t high_total = 0, low_total = 0;
        for (int64_t k = 0; k < columns; k++) {
            const double h = std::clamp(std::nearbyint(double(x[k]) / a), -127.0, 127.0);
            const double rest = double(x[k]) - a * h, l = std::clamp(std::nearbyint(rest / b), -127.0, 127.0);
            const double e = rest - b * l;
            size += double(x[k]) * x[k], error += e * e, highs += h * h, lows += l * l;
            const size_t at = size_t((k / 4 * 2 * count + 2 * i) * 4 + k % 4);
            codes[at] = int8_t(h), codes[at + 4] = int8_t(l);
            high_total += int32_t(h), low_total += int32_t(l);
        }
        high_sum[i] = high_total, low_sum[i] = low_total;
        const double norm = std::sqrt(size) * (1 + 1e-9), g = (double(columns) / 16 + 6) * kRoundoff * 1.01;
        const double terms = a * std::sqrt(highs) + b * std::sqrt(lows);
        error_factor[i] = round_up((1 + g) * norm);
        size_factor[i] = round_up(std::sqrt(error) * (1 + 1e-6) + g * norm + 4 * kRoundoff * terms * 1.01);
    }
};

Screen::Screen(const DenseWeight& head, Executor& executor)
    : head_(head),
      steps_((head.columns + kStepColumns - 1) / kStepColumns),
      tiles_((head.rows + kScreenRows - 1) / kScreenRows),
      weights_(tiles_ * steps_ * kScreenStepBytes),
      scales_(size_t(tiles_ * kScreenRows)),
      sizes_(scales_.size()),
      errors_(scales_.size()) {
    executor.each(head.rows, 8 * head.columns, 64, [&](int64_t first, int64_t last, int) {
        std::vector<float> w(size_t(steps_ * kStepColumns));
        std::vector<uint8_t> codes(w.size());
        for (int64_t row = first; row < last; row++) quantise_row(row, w, codes);
    });
}

void Screen::quantise_row(int64_t row, std::vector<float>& w, std::vector<uint8_t>& q) {
    read_row(head_, row, w.data());
    Lanes top = set1(0.0f);
    for (size_t k = 0; k < w.size(); k += 16) top = max(top, abs(load(&w[k])));
    const float largest = reduce_max(top), s = largest > 0 && std::isfinite(largest) ? largest / 31.0f : 1.0f;
    const float inverse = 1.0f / s;
    double error[16] = {};
    int32_t squares = 0;
    for (size_t k = 0; k < w.size(); k += 16)
        for (size_t i = 0; i < 16; i++) {
            const float x = w[k + i] * inverse + 32.5f;  // any code will do: its error is measured
            const int code = x > 63.0f ? 63 : x >= 1.0f ? int(x) : 1;
            const double d = double(w[k + i]) - double(s) * (code - 32);
            q[k + i] = uint8_t(code);
            squares += (code - 32) * (code - 32);
            error[i] += d * d;
        }
    uint8_t* out = weights_.data() + row / kScreenRows * steps_ * kScreenStepBytes + 4 * (row % kScreenRows);
    for (size_t k = 0; k < w.size(); k += 16, out += kScreenStepBytes) pack_step(&q[k], out);
    scales_[size_t(row)] = s;
    const double size = double(s) * std::sqrt(double(squares)) * (1 + 1e-9);
    const double lost = std::sqrt(std::accumulate(error, error + 16, 0.0)) * (1 + 1e-9);
    const bool sound = size + lost <= kMaxNorm;
    sizes_[size_t(row)] = sound ? round_up(size) : std::numeric_limits<float>::infinity();
    errors_[size_t(row)] = sound ? round_up(lost) : std::numeric_limits<float>::infinity();
}

// Bounds of the exact logits of 16 rows, for each input: upper and lower are [count][rows of all tiles].
void Screen::score_tile(const Kernels& kernels, const Inputs& inputs, int64_t tile, float* upper, float* lower) const {
    int32_t acc[2 * kInputsAtOnce * kScreenRows];
    kernels.screen(weights_.data() + tile * steps_ * kScreenStepBytes, inputs.codes.data(), int(steps_),
                   2 * inputs.count, acc);
    for (int i = 0; i < inputs.count; i++) {
        const int32_t *highs = acc + 2 * i * kScreenRows, *lows = highs + kScreenRows;
        const float a = inputs.high[i], b = inputs.low[i], c = inputs.error_factor[i], f = inputs.size_factor[i];
        for (int r = 0; r < kScreenRows; r++) {
            const size_t row = size_t(tile * kScreenRows + r), at = size_t(i) * scales_.size() + row;
            const float score = scales_[row] * (a * float(highs[r] - 32 * inputs.high_sum[i]) +
                                                b * float(lows[r] - 32 * inputs.low_sum[i]));
            // Up by three roundings of the bound itself and one of each end.
            const float bound = (errors_[row] * c + sizes_[row] * f) * 1.000001f + std::fabs(score) * 1.2e-7f +
                                std::numeric_limits<float>::min();
            upper[at] = score + bound;
            lower[at] = score - bound;
        }
    }
}

namespace {

// The k-th largest of the finite numbers among `values`; -inf where there are fewer.
float kth_largest(const float* values, int64_t count, int64_t k) {
    if (k == 1 && count % 16 == 0) {  // a lower end is never +inf: it would have an infinite bound
        Lanes best = set1(-std::numeric_limits<float>::infinity());
        for (int64_t i = 0; i < count; i += 16) best = max(load(values + i), best);  // keeps `best` where one is NaN
        return reduce_max(best);
    }
    std::vector<float> best;  // a heap with the smallest on top
    const auto greater = std::greater<float>();
    for (int64_t i = 0; i < count; i++) {
        if (int64_t(best.size()) == k && !(values[i] > best.front())) continue;
        if (!std::isfinite(values[i])) continue;
        if (int64_t(best.size()) == k) {
            std::pop_heap(best.begin(), best.end(), greater);
            best.pop_back();
        }
        best.push_back(values[i]);
        std::push_heap(best.begin(), best.end(), greater);
    }
    return int64_t(best.size()) == k ? best.front() : -std::numeric_limits<float>::infinity();
}

}  // namespace

int64_t Screen::top(Executor& executor, const float* x, int64_t num_inputs, int64_t k, int32_t* ids, float* logits) {
    if (k < 1 || k > head_.rows) throw std::invalid_argument("k lies outside 1 .. the number of rows");
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t computed = 0;
    const int64_t padded = int64_t(scales_.size());
    upper_.resize(size_t(kInputsAtOnce * padded));
    lower_.resize(upper_.size());
    for (int64_t begin = 0; begin < num_inputs; begin += kInputsAtOnce) {
        const int count = int(std::min<int64_t>(kInputsAtOnce, num_inputs - begin));
        const Inputs inputs(x + begin * head_.columns, count, head_.columns, steps_);
        executor.each(tiles_, kScreenRows * head_.columns, 8, [&](int64_t first, int64_t last, int) {
            for (int64_t tile = first; tile < last; tile++)
                score_tile(executor.kernels(), inputs, tile, upper_.data(), lower_.data());
        });
        for (int i = 0; i < count; i++) {
            const float* ends = upper_.data() + i * padded;
            const float least = kth_largest(lower_.data() + i * padded, head_.rows, k);
            std::vector<int32_t> kept;
            for (int64_t row = 0; row < head_.rows; row++)
                if (!(ends[row] < least)) kept.push_back(int32_t(row));
            computed += int64_t(kept.size());
            const float* input = x + (begin + i) * head_.columns;
            std::vector<float> exact(kept.size());
            executor.each(int64_t(kept.size()), head_.columns, 16, [&](int64_t first, int64_t last, int) {
                for (int64_t j = first, end; j < last; j = end) {
                    for (end = j + 1; end < last && kept[size_t(end)] == kept[size_t(end - 1)] + 1;) end++;
                    const auto* row = static_cast<const uint8_t*>(head_.data) + kept[size_t(j)] * head_.row_bytes();
                    executor.kernels().dense({row, head_.dtype, end - j, int(head_.columns), input, head_.columns, 1,
                                              &exact[size_t(j)], end - j, nullptr, 0});
                }
            });
            std::vector<int32_t> order(kept.size());
            std::iota(order.begin(), order.end(), 0);
            // Not-a-number first, so that whoever reads the result sees it; then by value, then by row.
            const auto before = [&](int32_t p, int32_t q) {
                const float a = exact[size_t(p)], b = exact[size_t(q)];
                if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && (!std::isnan(b) || p < q);
                return a != b ? a > b : p < q;
            };
            std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
            for (int64_t j = 0; j < k; j++) {
                ids[(begin + i) * k + j] = kept[size_t(order[size_t(j)])];
                logits[(begin + i) * k + j] = exact[size_t(order[size_t(j)])];
            }
        }
    }
    return computed;
}

}  // namespace bitnet
