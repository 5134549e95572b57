#include "ternary_table.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "lanes_generic.h"

namespace bitnet {

namespace {

constexpr int64_t kPartRows = 4096;  // are read at a time
constexpr float kLeast = 1e-30f;     // of a scale: so that no product of it is smaller than the smallest normal number

// What a group of weights consists of. Float is their bits.
template <class Float>
struct GroupReader {
    static constexpr Float kSign = Float(1) << (8 * sizeof(Float) - 1);
    // Their codes; false where these are not ternary. `largest` is the magnitude of those that are not 0.
    static bool read(const Float* w, int64_t count, int8_t* codes, Float* largest) {
        Float most = 0, other = 0;
        for (int64_t i = 0; i < count; i++) most = std::max(most, Float(w[i] & ~kSign));
        for (int64_t i = 0; i < count; i++) {
            const Float magnitude = w[i] & ~kSign;
            other |= Float(magnitude != 0) & Float(magnitude != most);
            codes[i] = int8_t((w[i] & kSign) != 0 ? -1 : 1);
        }
        // Of zeros alone any codes will do: these leave weights of one bit as they are.
        if (most != 0)
            for (int64_t i = 0; i < count; i++) codes[i] = (w[i] & ~kSign) != 0 ? codes[i] : int8_t(0);
        *largest = most;
        return other == 0;
    }
};

// The codes and the scale of some columns of a row of the table.
bool read_group(const DenseWeight& table, int64_t row, int64_t column, int64_t count, int8_t* codes, float* scale) {
    const auto* p = static_cast<const uint8_t*>(table.data) + row * table.row_bytes();
    if (table.dtype == Dtype::f32) {
        uint32_t bits;
        if (!GroupReader<uint32_t>::read(reinterpret_cast<const uint32_t*>(p) + column, count, codes, &bits))
            return false;
        *scale = bits_to_float(bits);
    } else {
        uint16_t bits;
        if (!GroupReader<uint16_t>::read(reinterpret_cast<const uint16_t*>(p) + column, count, codes, &bits))
            return false;
        *scale = table.dtype == Dtype::f16 ? half_to_float(bits) : bits_to_float(uint32_t(bits) << 16);
    }
    return *scale == 0 || (*scale >= kLeast && std::isfinite(*scale));
}

std::vector<int64_t> parts_of(int64_t rows) {
    std::vector<int64_t> parts(size_t((rows - 1) / kPartRows), kPartRows);
    parts.push_back(rows - kPartRows * int64_t(parts.size()));
    return parts;
}

}  // namespace

TernaryTable::TernaryTable(int64_t rows, int64_t columns, int64_t group_columns)
    : weight_(columns, parts_of(rows), Format::u2, group_columns) {
    for (auto* each : {&errors.error, &errors.size}) each->resize(weight_.groups().size() * kGroupRows);
}

std::unique_ptr<TernaryTable> TernaryTable::of(const DenseWeight& table, Executor& executor) {
    for (const int64_t group_columns : {128, 64}) {
        std::unique_ptr<TernaryTable> ternary(new TernaryTable(table.rows, table.columns, group_columns));
        if (ternary->pack(table, executor)) return ternary;
    }
    return nullptr;
}

TernaryTable::TernaryTable(const Codes& codes) : TernaryTable(codes.rows, codes.columns, codes.group_columns) {
    const int64_t groups = weight_.column_groups();
    const int64_t row_bytes = codes.layout == Layout::signs ? (codes.columns + 7) / 8 : codes.columns;
    for (int64_t part = 0; part < weight_.num_parts(); part++) {
        const int64_t row = part * kPartRows;
        weight_.pack(int(part), codes.data + row * row_bytes, codes.layout, codes.scales + row * groups);
    }
    for (int64_t row = 0; row < codes.rows; row++) {
        double squares = 0;  // as if no code were 0: the bound may be larger than it need be
        for (int64_t g = 0; g < groups; g++) {
            const int64_t count = std::min(codes.group_columns, codes.columns - g * codes.group_columns);
            const float scale = codes.scales[row * groups + g];
            if (scale != 0 && std::fabs(scale) < kLeast) throw std::invalid_argument("a scale is too small");
            squares += double(scale) * scale * double(count);
        }
        errors.set(row, 0, std::sqrt(squares));
    }
}

// False where a weight is another one.
bool TernaryTable::pack(const DenseWeight& table, Executor& executor) {
    const int64_t columns = table.columns, groups = weight_.column_groups();
    std::vector<int8_t> codes(size_t(std::min(kPartRows, table.rows) * columns));
    std::vector<float> scales(size_t(std::min(kPartRows, table.rows) * groups));
    for (int64_t part = 0; part < weight_.num_parts(); part++) {
        std::atomic<bool> is_ternary = true;
        const auto read_row = [&](int64_t row) {
            const int64_t of_table = part * kPartRows + row;
            double squares = 0;
            for (int64_t g = 0; g < groups && is_ternary; g++) {
                const int64_t column = g * weight_.group_columns();
                const int64_t count = std::min(weight_.group_columns(), columns - column);
                int8_t* of_group = &codes[size_t(row * columns + column)];
                float* scale = &scales[size_t(row * groups + g)];
                if (!read_group(table, of_table, column, count, of_group, scale)) is_ternary = false;
                squares += double(*scale) * *scale * double(count - std::count(of_group, of_group + count, 0));
            }
            errors.set(of_table, 0, std::sqrt(squares));
        };
        executor.each(weight_.part_rows(int(part)), 4 * columns, 64, [&](int64_t first, int64_t last, int) {
            for (int64_t row = first; row < last && is_ternary; row++) read_row(row);
        });
        if (!is_ternary) return false;
        weight_.pack(int(part), reinterpret_cast<const uint8_t*>(codes.data()), Layout::codes, scales.data());
    }
    return true;
}

void TernaryTable::read(const Kernels& kernels, int64_t row, float* out) const {
    const int64_t group = row / kGroupRows;
    kernels.group_row({weight_.group_data(group), weight_.one_bit(), weight_.group_scales(group), int(row % kGroupRows),
                       group_steps(), int(weight_.columns()), out});
}

void read_row(const Kernels& kernels, const DenseWeight& weight, int64_t row, float* out) {
    if (weight.codes) return weight.codes->read(kernels, row, out);
    const auto* data = static_cast<const uint8_t*>(weight.data) + row * weight.row_bytes();
    kernels.embed(data, weight.dtype, int(weight.columns), out);
}

// A score is rounded once a group in each of its two sums, and by the two products with a and b and their sum.
TernaryTable::Inputs TernaryTable::inputs(Executor& executor, const float* x, int count, InputForm form) const {
    const int groups = int(weight_.column_groups()), steps = int(weight_.steps());
    const Kernels& kernels = executor.kernels();
    const bool are_looked_up = weight_.looks_up(kernels, count * vectors_of(form));
    const int most = are_looked_up ? kernels.signs_tile : kMaxTileTokens;
    Inputs inputs{{executor, x, count, weight_.columns(), form, most, groups + 3}, groups, are_looked_up, {}};
    inputs.minus_sums.resize(size_t(count * inputs.codes.vectors_each() * groups));
    for (int t = 0; t < inputs.codes.num_tiles(); t++)
        for (int v = 0, vectors = inputs.codes.vectors_of(t); v < vectors; v++)
            kernels.group_sums(inputs.codes.codes(t) + 4 * v, vectors, steps, group_steps(),
                               &inputs.minus_sums[size_t(inputs.first_sum(t) + v * groups)]);
    return inputs;
}

void TernaryTable::sum(const Kernels& kernels, const Inputs& inputs, int input_tile, int64_t begin, int64_t end,
                       Room& room) const {
    const uint8_t* data = weight_.group_data(begin);
    const ScaleLines scales = weight_.group_scales(begin);
    const int steps = int(weight_.steps()), vectors = inputs.codes.vectors_of(input_tile);
    const int8_t* codes = inputs.codes.codes(input_tile);
    const int32_t* minus_sums = &inputs.minus_sums[size_t(inputs.first_sum(input_tile))];
    if (inputs.are_looked_up)
        kernels.signs_product({data, weight_.group_bytes(), scales, int(end - begin), steps, group_steps(), vectors,
                               codes, minus_sums, inputs.groups, room.tables, room.sums});
    else
        kernels.group_tile({data, weight_.one_bit(), scales, steps, group_steps(), vectors, codes, minus_sums,
                            inputs.groups, room.sums});
}

HeadScores TernaryTable::scores_of(const HeadInputs& inputs, int input_tile, const float* sums) {
    return {.half_scale = nullptr,
            .inputs = &inputs[inputs.first_of(input_tile)],
            .count = inputs.count_of(input_tile),
            .sums = nullptr,
            .vectors_each = inputs.vectors_each(),
            .shift = 0,
            .offset = 0,
            .scaled_sums = sums};
}

}  // namespace bitnet
