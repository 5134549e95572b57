#include "head_inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bitnet {

namespace {

constexpr int64_t kMatrixColumns = 64;  // of a step of a matrix product
constexpr double kRoundoff = 1.0 / (1 << 24);
constexpr double kMaxNorm = 1e18;

// Half to even, for what a double holds exactly.
double round_whole(double x) { return (x + 6755399441055744.0) - 6755399441055744.0; }

float round_up(double x) { return std::nextafter(float(x), std::numeric_limits<float>::infinity()); }

}  // namespace

// `lost` and `kept` are the norms of what the codes leave out and of what they say. The first is a float32 sum of at
// most 2,048 squares a lane, of differences that are off by 2^-24 of both sides, of which tiny ones vanish.
void RowErrors::set(int64_t row, double lost, double kept) {
    lost = lost * (1 + 2e-4) + kept * 2 * kRoundoff + 1e-20;
    const bool sound = kept + lost <= kMaxNorm;
    error[size_t(row)] = sound ? round_up(lost) : std::numeric_limits<float>::infinity();
    size[size_t(row)] = sound ? round_up(kept * (1 + 1e-9)) : std::numeric_limits<float>::infinity();
}

HeadInputs::HeadInputs(Executor& executor, const float* x, int count, int64_t columns, InputForm form, int most_vectors,
                       int roundings)
    : count_(count), most_vectors_(most_vectors), roundings_(roundings), form_(form) {
    const bool in_matrix = form == InputForm::matrix;
    const int64_t whole = in_matrix ? kMatrixColumns : kStepColumns;
    padded_ = (columns + whole - 1) / whole * whole;
    lines_.resize(size_t((vectors_each() * (in_matrix ? kInputsInMatrix : count) * padded_ + 63) / 64));
    executor.each(count, 16 * columns, 1, [&](int64_t first, int64_t last, int) {
        for (int64_t i = first; i < last; i++) quantise(x + i * columns, int(i), columns);
    });
}

HeadInputs::Place HeadInputs::place_of(int index, int8_t* unread) {
    int tile = 0;
    while (first_of(tile + 1) <= index) tile++;
    const int64_t of_tile = index - first_of(tile), inputs = count_of(tile);
    int8_t* high = const_cast<int8_t*>(codes(tile));
    switch (form_) {
        case InputForm::whole:
            return {high + 8 * of_tile, high + 8 * of_tile + 4, 8 * inputs, 8 * inputs};
        case InputForm::rough:
            return {high + 4 * of_tile, unread, 4 * inputs, 0};
        case InputForm::matrix:
            break;
    }
    return {high + 2 * of_tile * padded_, high + (2 * of_tile + 1) * padded_, 4, 4};
}

void HeadInputs::quantise(const float* x, int index, int64_t columns) {
    HeadInput& input = inputs_[index];
    float largest = 0;
    double squares = 0;  // not a number, or infinite, where an element is
    for (int64_t k = 0; k < columns; k++) {
        largest = std::max(largest, std::fabs(x[k]));
        squares += double(x[k]) * x[k];
    }
    const float a = input.high = std::max(largest / 127.0f, std::numeric_limits<float>::min());
    const float b = input.low =
        form_ == InputForm::rough ? 0.0f : std::max(a / 254.0f, std::numeric_limits<float>::min());
    input.high_total = input.low_total = 0;
    input.error_factor = input.size_factor = input.rounding = std::numeric_limits<float>::quiet_NaN();
    if (!(std::sqrt(squares) <= kMaxNorm)) return;  // bounds that are not numbers: every row is kept

    int8_t unread[4];
    auto [high, low, to_high, to_low] = place_of(index, unread);
    double error = 0, highs = 0, lows = 0;
    for (int64_t k = 0; k < columns; k += 4, high += to_high, low += to_low) {
        for (int64_t j = k; j < std::min(k + 4, columns); j++) {
            const double h = std::clamp(round_whole(double(x[j]) / a), -127.0, 127.0);
            const double rest = double(x[j]) - a * h, l = b > 0 ? std::clamp(round_whole(rest / b), -127.0, 127.0) : 0;
            const double e = rest - b * l;
            error += e * e, highs += h * h, lows += l * l;
            high[j - k] = int8_t(h), low[j - k] = int8_t(l);
            input.high_total += int32_t(h), input.low_total += int32_t(l);
        }
    }
    const double norm = std::sqrt(squares) * (1 + 1e-9), g = (double(columns) / 16 + 6) * kRoundoff * 1.01;
    const double rounding = roundings_ * kRoundoff * (a * std::sqrt(highs) + b * std::sqrt(lows)) * 1.01;
    input.error_factor = round_up((1 + g) * norm);
    input.size_factor = round_up(std::sqrt(error) * (1 + 1e-6) + g * norm + rounding);
    input.rounding = round_up(rounding);
}

}  // namespace bitnet
