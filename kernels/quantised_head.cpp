#include "quantised_head.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "lanes_generic.h"
#include "ternary_table.h"

namespace bitnet {

namespace {

constexpr int kMatrixInputs = 5;  // from so many inputs on a matrix product is faster
constexpr int kRoundings = 4;     // of a score, of terms no larger than it can be

// 16 codes of a row into a step: bits 2..5 in two planes of 64 bytes, bits 6..7 in a third.
void pack_high(const uint8_t* codes, uint8_t* out) {
    uint32_t field[4];
    std::memcpy(field, codes, 16);
    for (uint32_t& each : field) each = each >> 2 & 0x3f3f3f3f;
    constexpr uint32_t low = 0x0f0f0f0f, two = 0x03030303;
    const uint32_t planes[3] = {
        (field[0] & low) | (field[1] & low) << 4, (field[2] & low) | (field[3] & low) << 4,
        (field[0] >> 4 & two) | (field[1] >> 4 & two) << 2 | (field[2] >> 4 & two) << 4 | (field[3] >> 4 & two) << 6};
    for (int i = 0; i < 3; i++) std::memcpy(out + 64 * i, planes + i, 4);
}

void pack_low(const uint8_t* codes, uint8_t* out) {
    uint32_t field[4];
    std::memcpy(field, codes, 16);
    constexpr uint32_t two = 0x03030303;
    const uint32_t plane = (field[0] & two) | (field[1] & two) << 2 | (field[2] & two) << 4 | (field[3] & two) << 6;
    std::memcpy(out, &plane, 4);
}

}  // namespace

QuantisedHead::QuantisedHead(int64_t rows, int64_t columns, int bits)
    : rows_(rows),
      columns_(columns),
      steps_((columns + kStepColumns - 1) / kStepColumns),
      tiles_((rows + kHeadRows - 1) / kHeadRows) {
    if (columns_ > kMaxHeadColumns) throw std::invalid_argument("a quantised head has at most 32768 columns");
    weights6_ = Memory(tiles_ * steps_ * kHeadBytes6);
    if (bits == 8) weights2_ = Memory(tiles_ * steps_ * kHeadBytes2);
    for (auto* each : {&half_scales_, &errors6.error, &errors6.size, &errors8.error, &errors8.size})
        each->resize(size_t(tiles_ * kHeadRows));
}

QuantisedHead::QuantisedHead(const DenseWeight& head, int bits, Executor& executor)
    : QuantisedHead(head.rows, head.columns, bits) {
    executor.each(head.rows, 8 * head.columns, 64, [&](int64_t first, int64_t last, int) {
        std::vector<float> w(size_t(steps_ * kStepColumns));
        std::vector<uint8_t> codes(w.size());
        for (int64_t row = first; row < last; row++) {
            read_row(executor.kernels(), head, row, w.data());  // what is beyond its columns stays 0
            quantise_row(row, w, codes);
        }
    });
}

QuantisedHead::QuantisedHead(int64_t rows, int64_t columns, const Parts& parts, Executor& executor)
    : QuantisedHead(rows, columns, 8) {
    // On all threads: what takes its time is the first touch of new memory, and of the file's pages.
    executor.each(tiles_, kHeadRows * columns_, 64, [&](int64_t first, int64_t last, int) {
        const auto copy = [&](Memory& to, const uint8_t* from, int64_t tile) {
            std::memcpy(to.data() + first * tile, from + first * tile, size_t((last - first) * tile));
        };
        copy(weights6_, parts.high, steps_ * kHeadBytes6);
        copy(weights2_, parts.low, steps_ * kHeadBytes2);
    });
    const float* in = parts.numbers;
    for (auto* each : {&half_scales_, &errors6.error, &errors6.size, &errors8.error, &errors8.size})
        for (float& number : *each) {
            number = *in++;
            // Then no row's upper end is below its lower one, so that k rows are always kept.
            if (!(number >= 0) || (each == &half_scales_ && !std::isfinite(number)))
                throw std::invalid_argument("a scale or a bound of the screen is negative or no number");
        }
}

bool QuantisedHead::is_finite() const {
    return std::all_of(errors8.error.begin(), errors8.error.end(), [](float e) { return std::isfinite(e); });
}

void QuantisedHead::copy_numbers(float* out) const {
    for (const auto* each : {&half_scales_, &errors6.error, &errors6.size, &errors8.error, &errors8.size})
        out = std::copy(each->begin(), each->end(), out);
}

void QuantisedHead::quantise_row(int64_t row, const std::vector<float>& w, std::vector<uint8_t>& codes) {
    Lanes top = set1(0.0f);
    for (size_t k = 0; k < w.size(); k += 16) top = max(top, abs(load(&w[k])));
    const float largest = reduce_max(top);
    const float half = largest > 1e-30f && std::isfinite(largest) ? largest / 254.0f : 0.5f, inverse = 0.5f / half;
    float lost6[16] = {}, lost8[16] = {};
    int32_t kept6[16] = {}, kept8[16] = {};  // in halves of s
    for (size_t k = 0; k < w.size(); k += 16) {
        int32_t code[16];
        for (size_t i = 0; i < 16; i++) {
            const float x = w[k + i] * inverse + 128.5f;  // any code will do: its error is measured
            code[i] = int(x > 255.0f ? 255.0f : x >= 1.0f ? x : 1.0f);
        }
        for (size_t i = 0; i < 16; i++) {
            const int rough = 8 * (code[i] >> 2) - 253, fine = 2 * code[i] - 256;
            const float d6 = w[k + i] - half * float(rough), d8 = w[k + i] - half * float(fine);
            kept6[i] += rough * rough, kept8[i] += fine * fine;
            lost6[i] += d6 * d6, lost8[i] += d8 * d8;
        }
        for (size_t i = 0; i < 16; i++) codes[k + i] = uint8_t(code[i]);
    }
    const int64_t tile = row / kHeadRows, place = 4 * (row % kHeadRows);
    for (int64_t s = 0; s < steps_; s++) {
        pack_high(&codes[size_t(s * kStepColumns)], weights6_.data() + (tile * steps_ + s) * kHeadBytes6 + place);
        if (!weights2_.bytes()) continue;
        pack_low(&codes[size_t(s * kStepColumns)], weights2_.data() + (tile * steps_ + s) * kHeadBytes2 + place);
    }
    half_scales_[size_t(row)] = half;
    const auto root = [](const auto* lanes) { return std::sqrt(std::accumulate(lanes, lanes + 16, 0.0)); };
    errors6.set(row, root(lost6), half * root(kept6));
    errors8.set(row, root(lost8), half * root(kept8));
}

HeadInputs QuantisedHead::inputs(Executor& executor, const float* x, int count, InputForm form) const {
    return {executor, x, count, columns_, form, executor.kernels().head_vectors, kRoundings};
}

InputForm QuantisedHead::form(const Kernels& kernels, int count) const {
    return kernels.head_matrix && count >= kMatrixInputs ? InputForm::matrix : InputForm::whole;
}

HeadTask QuantisedHead::task(int64_t tile, int count, const int8_t* codes, int vectors, int32_t* acc) const {
    return {.weights6 = weights6_.data() + tile * steps_ * kHeadBytes6,
            .weights2 = weights2_.bytes() ? weights2_.data() + tile * steps_ * kHeadBytes2 : nullptr,
            .tiles = count,
            .steps = int(steps_),
            .codes = codes,
            .code_stride = 0,
            .vectors = vectors,
            .acc = acc};
}

void QuantisedHead::sums(const Kernels& kernels, const HeadInputs& inputs, int input_tile, int64_t tile, int count,
                         int bits, Sums* sums) const {
    HeadTask of_tiles = task(tile, count, inputs.codes(input_tile), inputs.vectors_of(input_tile), sums[0]);
    of_tiles.code_stride = inputs.padded_columns();
    if (bits == 6) of_tiles.weights2 = nullptr;
    const bool in_matrix = inputs.form() == InputForm::matrix;
    const auto of_bits = bits == 8 ? kernels.head_sums8 : bits == 6 ? kernels.head_sums6 : kernels.head_sums2;
    (in_matrix ? kernels.head_matrix : of_bits)(of_tiles);
}

HeadScores QuantisedHead::scores_of(const HeadInputs& inputs, int input_tile, int64_t tile, int bits,
                                    const Sums& sums) const {
    return {.half_scale = half_scales_.data() + tile * kHeadRows,
            .inputs = &inputs[inputs.first_of(input_tile)],
            .count = inputs.count_of(input_tile),
            .sums = sums,
            .vectors_each = inputs.vectors_each(),
            .shift = bits == 6 ? 3 : 1,
            .offset = bits == 6   ? 253u
                      : bits == 8 ? 256u
                                  : 3u};
}

void QuantisedHead::scores(Executor& executor, const float* x, int64_t num_inputs, float* out) const {
    for (int64_t begin = 0; begin < num_inputs; begin += kInputsInMatrix) {
        const int count = int(std::min<int64_t>(kInputsInMatrix, num_inputs - begin));
        const HeadInputs of_pass = inputs(executor, x + begin * columns_, count, form(executor.kernels(), count));
        executor.each(tiles_, kHeadRows * columns_ * count, 8, [&](int64_t first_tile, int64_t last_tile, int) {
            const Kernels& kernels = executor.kernels();
            const int bits = weights2_.bytes() ? 8 : 6;
            each_tile(kernels, of_pass, first_tile, last_tile, bits, [&](int t, int64_t tile, const Sums& of_tile) {
                float scores[kInputsInMatrix][kHeadRows];
                kernels.head_scores(scores_of(of_pass, t, tile, bits, of_tile), scores[0]);
                const int64_t row = tile * kHeadRows, length = std::min<int64_t>(kHeadRows, rows_ - row);
                for (int i = 0; i < of_pass.count_of(t); i++)
                    std::copy_n(scores[i], length, out + (begin + of_pass.first_of(t) + i) * rows_ + row);
            });
        });
    }
}

}  // namespace bitnet
