#include "weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "lanes_generic.h"
#include "t5.h"

namespace bitnet {

namespace {

constexpr int64_t kMaxRows = 1 << 30;
constexpr uint64_t kLowBits = 0x0303030303030303;
constexpr uint8_t kHighBits = 0xaa;  // of the four codes of a byte

// The codes 0..2 of a row, one a byte, whatever the source layout; `out` has room for whole steps of 8.
uint64_t read_row(const uint8_t* row, int64_t columns, int shift, bool signed_codes, uint8_t* out) {
    uint64_t bad = 0;
    int64_t k = 0;
    for (; k + 8 <= columns; k += 8) {
        uint64_t x;
        std::memcpy(&x, row + k, 8);
        const uint64_t top = 0x8080808080808080;  // -1, 0, 1 -> 0, 1, 2 without a carry between bytes
        x = signed_codes ? ((x & ~top) + 0x0101010101010101) ^ (x & top) : x >> shift & kLowBits;
        bad |= (x & ~kLowBits) | (x & x >> 1 & 0x0101010101010101);  // anything above 2
        std::memcpy(out + k, &x, 8);
    }
    for (; k < columns; k++) {
        out[k] = signed_codes ? uint8_t(row[k] + 1) : row[k] >> shift & 3;
        bad |= out[k] > 2;
    }
    return bad;
}

// Each bit of a byte as a code, 0 or 2.
struct SignCodes {
    uint8_t of[256][8] = {};
    constexpr SignCodes() {
        for (int x = 0; x < 256; x++)
            for (int i = 0; i < 8; i++) of[x][i] = uint8_t(x >> i & 1) * 2;
    }
};
constexpr SignCodes kSignCodes;

void read_signs(const uint8_t* row, int64_t columns, uint8_t* out) {
    int64_t k = 0;
    for (; k + 8 <= columns; k += 8) std::memcpy(out + k, kSignCodes.of[*row++], 8);
    std::memcpy(out + k, kSignCodes.of[k < columns ? *row : 0], size_t(columns - k));
}

[[noreturn]] void refuse(const uint8_t* codes, int64_t row, int64_t columns) {
    int64_t column = 0;
    while (column < columns - 1 && codes[column] <= 2) column++;
    throw std::invalid_argument("row " + std::to_string(row) + ", column " + std::to_string(column) +
                                " holds no ternary code");
}

[[noreturn]] void refuse_group(int64_t group) {
    throw std::invalid_argument("one of the rows from " + std::to_string(group * kGroupRows) +
                                " on holds no ternary code");
}

// A byte of T5 by its fifth code and the byte of U2 with the other four.
struct U2ToT5 {
    uint8_t byte[4][256] = {};
    constexpr U2ToT5() {
        for (int fifth = 0; fifth < 3; fifth++)
            for (int x = 0; x < 256; x++) {
                const int q = (x & 3) + 3 * (x >> 2 & 3) + 9 * (x >> 4 & 3) + 27 * (x >> 6);
                byte[fifth][x] = kT5.pack[(q + 81 * fifth) % 256];  // others hold the fourth pattern
            }
    }
};
constexpr U2ToT5 kU2ToT5;

// Four codes a field: their bytes of U2, or of T5 with the fifth fields. No sum carries into the next byte.
uint32_t u2_bytes(const uint32_t* field) { return field[0] | field[1] << 2 | field[2] << 4 | field[3] << 6; }
uint32_t t5_bytes(const uint32_t* field, uint32_t fifth) {
    const uint32_t q = field[0] + 3 * field[1] + 9 * field[2] + 27 * field[3] + 81 * fifth;
    return kT5.pack[q & 255] | uint32_t(kT5.pack[q >> 8 & 255]) << 8 | uint32_t(kT5.pack[q >> 16 & 255]) << 16 |
           uint32_t(kT5.pack[q >> 24]) << 24;
}

// Four columns of four rows, eight times: a byte has a row's four columns before, and a column's four rows behind.
void transpose(uint64_t rows[4]) {
    const uint64_t halves = 0x0f0f0f0f0f0f0f0f, pairs = 0x3333333333333333;
    for (int i = 0; i < 2; i++) {
        const uint64_t x = (rows[i] >> 4 ^ rows[i + 2]) & halves;
        rows[i] ^= x << 4;
        rows[i + 2] ^= x;
    }
    for (int i = 0; i < 4; i += 2) {
        const uint64_t x = (rows[i] >> 2 ^ rows[i + 1]) & pairs;
        rows[i] ^= x << 2;
        rows[i + 1] ^= x;
    }
}

}  // namespace

bool has_invalid(const uint8_t* bytes, int64_t count) {
    uint64_t bad = 0, x = 0;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        std::memcpy(&x, bytes + i, 8);
        bad |= x & x >> 1;
    }
    x = 0;
    std::memcpy(&x, bytes + i, size_t(count - i));
    return (bad | (x & x >> 1)) & 0x5555555555555555;
}

bool to_quarters(const CodeBlocks& from, uint8_t* quarters) {
    const int64_t num_quarters = from.rows / 4, part = num_quarters * from.row_bytes;
    uint64_t bad = 0;
    for (int64_t row = 0; row < num_quarters; row++) {
        const uint8_t* block = from.data + row * from.row_bytes;
        for (int64_t b = 0; b < from.row_bytes; b += from.block_bytes, block += from.block_bytes)
            for (int64_t at = 0; at < from.code_bytes; at += 32, quarters += 128)
                for (int word = 0; word < 32; word += 8) {
                    uint64_t x[4];
                    for (int i = 0; i < 4; i++) std::memcpy(&x[i], block + at + word + i * part, 8);
                    transpose(x);
                    for (int i = 0; i < 4; i++) {
                        bad |= x[i] & x[i] >> 1;
                        std::memcpy(quarters + 32 * (from.first_highest ? 3 - i : i) + word, &x[i], 8);
                    }
                }
    }
    return bad & 0x5555555555555555;
}

TernaryWeight::TernaryWeight(int64_t columns, const std::vector<int64_t>& rows, Format format, int64_t group_columns,
                             Arena* arena)
    : format_(format), arena_(arena), columns_(columns), group_columns_(group_columns), part_rows_(rows) {
    if (columns < 1 || columns > kMaxColumns) throw std::invalid_argument("a ternary matrix has 1 to 262144 columns");
    if (group_columns && group_columns != 64 && group_columns != 128)
        throw std::invalid_argument("64 or 128 columns share a scale, or all of them");
    if (group_columns && format != Format::u2)
        throw std::invalid_argument("weights with a scale for each group of columns are u2");
    if (group_columns) column_groups_ = (columns + group_columns - 1) / group_columns;
    const int64_t blocks = (columns + kBlockColumns - 1) / kBlockColumns;
    steps_ = format == Format::t5 ? blocks * kBlockSteps : (columns + kStepColumns - 1) / kStepColumns;
    group_bytes_ = format == Format::t5 ? blocks * kBlockBytes : steps_ * kStepBytes;
    if (rows.empty()) throw std::invalid_argument("a ternary weight has at least one part");
    int64_t num_groups = 0;
    for (int64_t part : rows) {
        if (part < 1 || part > kMaxRows) throw std::invalid_argument("a ternary matrix has 1 to 2^30 rows");
        num_groups += (part + kGroupRows - 1) / kGroupRows;
        if (num_groups > kMaxRows / kGroupRows) throw std::invalid_argument("the stacked matrices have too many rows");
    }
    const int64_t bytes = num_groups * group_bytes_;
    memory_ = group_columns ? Memory(bytes) : take(bytes);  // before anything else: it may be more than there is
    scales_ = GroupScales(num_groups * column_groups_ * kGroupRows);
    first_groups_.push_back(0);
    for (int64_t part : rows) {
        for (int64_t r = 0; r < part; r += kGroupRows)
            groups_.push_back(
                {rows_ + r, int(part - r < kGroupRows ? part - r : kGroupRows), int(first_groups_.size()) - 1});
        rows_ += part;
        first_groups_.push_back(int64_t(groups_.size()));
    }
    packed_.resize(rows.size());
    row_scales_.resize(rows.size());
}

void TernaryWeight::pack_row(int64_t group, int row_in_group, const uint8_t* codes) {
    uint8_t* out = memory_.data() + group * group_bytes_ + 4 * row_in_group;
    const uint8_t* fifths = codes + group_bytes_ / kStepBytes * kStepColumns;  // of T5
    for (int64_t s = 0; s < group_bytes_; s += kStepBytes, codes += 16, fifths += 4, out += kStepBytes) {
        uint32_t field[4], fifth = 0, bytes;
        std::memcpy(field, codes, 16);
        if (format_ == Format::t5) std::memcpy(&fifth, fifths, 4);
        bytes = format_ == Format::t5 ? t5_bytes(field, fifth) : u2_bytes(field);
        std::memcpy(out, &bytes, 4);
    }
}

void TernaryWeight::pack(int part, const uint8_t* data, Layout layout, float scale) {
    unsettle(part);
    read(part, data, layout);
    row_scales_[size_t(part)].assign(kGroupRows, scale);
    packed_[size_t(part)] = 1;
}

void TernaryWeight::pack_rows(int part, const uint8_t* data, Layout layout, const float* scales) {
    unsettle(part);
    read(part, data, layout);
    const int64_t rows = part_rows_[size_t(part)];
    for (int64_t row = 0; row < rows; row++)
        if (!std::isfinite(scales[row]))
            throw std::invalid_argument("the scale of row " + std::to_string(row) + " is no finite number");
    std::vector<float>& kept = row_scales_[size_t(part)];
    kept.assign(scales, scales + rows);
    kept.resize(size_t((rows + kGroupRows - 1) / kGroupRows * kGroupRows));
    packed_[size_t(part)] = 1;
}

void TernaryWeight::pack(int part, const uint8_t* data, Layout layout, const float* scales) {
    unsettle(part);
    read(part, data, layout);
    float* out = scales_.floats() + first_groups_[size_t(part)] * column_groups_ * kGroupRows;
    for (int64_t row = 0; row < part_rows_[size_t(part)]; row++)
        for (int64_t g = 0; g < column_groups_; g++) {
            const float scale = scales[row * column_groups_ + g];
            if (!std::isfinite(scale))
                throw std::invalid_argument("the scale of row " + std::to_string(row) + ", group " + std::to_string(g) +
                                            " is no finite number");
            out[(row / kGroupRows * column_groups_ + g) * kGroupRows + row % kGroupRows] = scale;
        }
    settle(part);
}

// Before a part is packed, perhaps once more: all codes in two bits.
void TernaryWeight::unsettle(int part) {
    packed_[size_t(part)] = 0;
    if (!one_bit_) return;
    Memory steps(int64_t(groups_.size()) * group_bytes_);
    write(steps.data());
    memory_ = steps;
    one_bit_ = false;
}

// When a part is packed: after the last one the matrix moves to where it stays.
void TernaryWeight::settle(int part) {
    packed_[size_t(part)] = 1;
    if (!is_packed()) return;
    bool fits = steps_ % 2 == 0;
    for (int64_t g = 0; g < int64_t(groups_.size()) && fits; g++) fits = !has_zero(g);
    Memory settled = take(memory_.bytes() / (fits ? 2 : 1));
    uint8_t* out = settled.data();
    if (!fits) std::memcpy(out, memory_.data(), size_t(memory_.bytes()));
    for (int64_t at = 0; fits && at < memory_.bytes(); at += 2 * kStepBytes)
        for (int i = 0; i < kStepBytes; i++, out++)
            *out =
                uint8_t((memory_.data()[at + i] & kHighBits) | (memory_.data()[at + kStepBytes + i] & kHighBits) >> 1);
    memory_ = settled;
    one_bit_ = fits;
    scales_.settle([this](int64_t bytes) { return take(bytes); });
}

// Whether a code of its rows is not 0 or 2; what pads them may be.
bool TernaryWeight::has_zero(int64_t group) const {
    uint8_t low[kStepBytes] = {};
    const uint8_t* step = memory_.data() + group * group_bytes_;
    for (int64_t s = 0; s < steps_; s++, step += kStepBytes)
        for (int i = 0; i < kStepBytes; i++) low[i] |= step[i] & ~kHighBits;
    return std::any_of(low, low + 4 * groups_[size_t(group)].rows, [](uint8_t bits) { return bits != 0; });
}

void TernaryWeight::read(int part, const uint8_t* data, Layout layout) {
    if (layout == Layout::u2) return copy_u2(part, data);
    if (layout == Layout::t5) return copy_t5(part, data);
    pack_codes(part, data, layout);
}

void TernaryWeight::pack_codes(int part, const uint8_t* data, Layout layout) {
    const int64_t rows = part_rows_[size_t(part)], quarter = (rows + 3) / 4;
    const int64_t first = first_groups_[size_t(part)], last = first_groups_[size_t(part) + 1];
    const bool signed_codes = layout == Layout::codes;
    std::vector<uint8_t> codes(size_t(steps_ * kStepColumns), 1);  // padding is weight 0
    const std::vector<uint8_t> padding = codes;
    for (int64_t row = 0; row < (last - first) * kGroupRows; row++) {
        const int64_t group = first + row / kGroupRows;
        if (row < rows && layout == Layout::signs) {
            read_signs(data + row * ((columns_ + 7) / 8), columns_, codes.data());
        } else if (row < rows) {
            const uint8_t* source = data + (signed_codes ? row : row % quarter) * columns_;
            if (read_row(source, columns_, signed_codes ? 0 : int(2 * (row / quarter)), signed_codes, codes.data()))
                refuse(codes.data(), row, columns_);
        }
        pack_row(group, int(row % kGroupRows), row < rows ? codes.data() : padding.data());
    }
}

void TernaryWeight::copy_u2(int part, const uint8_t* data) {
    const int64_t bytes = (columns_ + kStepColumns - 1) / kStepColumns * kStepBytes;
    const std::vector<uint8_t> padding(kStepBytes, 0x55);  // weight 0
    const int64_t first = first_groups_[size_t(part)], last = first_groups_[size_t(part) + 1];
    const int64_t steps = group_bytes_ / kStepBytes;
    const auto step = [&](int64_t s) { return s * kStepBytes < bytes ? data + s * kStepBytes : padding.data(); };
    for (int64_t group = first; group < last; group++, data += bytes) {
        uint8_t* out = memory_.data() + group * group_bytes_;
        if (has_invalid(data, bytes)) refuse_group(group - first);
        if (format_ == Format::u2) {
            std::memcpy(out, data, size_t(bytes));
            continue;
        }
        for (int64_t s = 0; s < steps; s++, out += kStepBytes) {
            const uint8_t *four = step(s), *fifths = step(steps + s / 4);
            for (int i = 0; i < kStepBytes; i++) out[i] = kU2ToT5.byte[fifths[i] >> 2 * (s % 4) & 3][four[i]];
        }
    }
}

void TernaryWeight::copy_t5(int part, const uint8_t* data) {
    const int64_t blocks = (columns_ + kBlockColumns - 1) / kBlockColumns, bytes = blocks * kBlockBytes;
    const bool is_t5 = format_ == Format::t5;
    std::vector<uint8_t> blocks_of_group(is_t5 ? 0 : size_t(bytes)),
        steps(is_t5 ? 0 : size_t(blocks * kBlockSteps * kStepBytes));
    const int64_t first = first_groups_[size_t(part)], last = first_groups_[size_t(part) + 1];
    for (int64_t group = first; group < last; group++, data += bytes) {
        uint8_t largest = 0;
        for (int64_t i = 0; i < bytes; i++) largest = std::max(largest, data[i]);
        if (largest >= kNumT5) refuse_group(group - first);
        uint8_t* out = memory_.data() + group * group_bytes_;
        uint8_t* packed = is_t5 ? out : blocks_of_group.data();
        std::transform(data, data + bytes, packed, [](uint8_t byte) { return kT5.of_file[byte]; });
        if (is_t5) continue;
        expand_blocks(packed, int(blocks), steps.data());
        std::memcpy(out, steps.data(), size_t(group_bytes_));
    }
}

void TernaryWeight::write(uint8_t* out) const {
    if (one_bit_) return expand_lines(memory_.data(), int(memory_.bytes() / kStepBytes), out);
    const uint8_t *begin = memory_.data(), *end = begin + int64_t(groups_.size()) * group_bytes_;
    const auto written = [&](uint8_t byte) { return format_ == Format::t5 ? kT5.to_file[byte] : byte; };
    std::transform(begin, end, out, written);
}

int64_t TernaryWeight::bytes() const {
    int64_t bytes = memory_.bytes() + scales_.bytes();
    for (const auto& each : row_scales_) bytes += int64_t(each.size() > kGroupRows ? each.size() * 4 : 0);
    return bytes;
}

bool TernaryWeight::is_packed() const {
    return std::all_of(packed_.begin(), packed_.end(), [](char packed) { return packed; });
}

void expand_blocks(const uint8_t* blocks, int num_blocks, uint8_t* steps) {
    uint8_t* fifths = steps + num_blocks * kBlockBytes;
    std::memset(fifths, 0, size_t(num_blocks) * kStepBytes);
    for (int b = 0; b < num_blocks; b++, blocks += kBlockBytes, steps += kBlockBytes, fifths += kStepBytes)
        for (int i = 0; i < kBlockBytes; i++) {
            steps[i] = kT5.first_four(blocks[i]);
            fifths[i % kStepBytes] |= uint8_t(kT5.fifth(blocks[i]) << 2 * (i / kStepBytes));
        }
}

void expand_lines(const uint8_t* lines, int num_lines, uint8_t* steps) {
    for (int line = 0; line < num_lines; line++, lines += kStepBytes, steps += 2 * kStepBytes)
        for (int i = 0; i < kStepBytes; i++) {
            steps[i] = lines[i] & kHighBits;
            steps[kStepBytes + i] = uint8_t(lines[i] << 1) & kHighBits;
        }
}

namespace {

template <class Read>
float ternarize_with(Read read, int64_t count, int8_t* codes) {
    double lanes[16] = {};
    for (int64_t i = 0; i < count; i++) lanes[i % 16] += std::fabs(read(i));
    double sum = 0;
    for (double lane : lanes) sum += lane;
    float mean = float(sum / double(count));
    const float s = 1.0f / (mean < 1e-5f ? 1e-5f : mean);
    // round half to even of |w s|: above 0.5 is 1, 0.5 itself is 0
    for (int64_t i = 0; i < count; i++) {
        const float w = read(i) * s;
        codes[i] = int8_t((w > 0.5f) - (w < -0.5f));
    }
    return 1.0f / s;
}

}  // namespace

float ternarize(const void* weights, Dtype dtype, int64_t count, int8_t* codes) {
    const auto* f32 = static_cast<const float*>(weights);
    const auto* u16 = static_cast<const uint16_t*>(weights);
    switch (dtype) {
        case Dtype::f32:
            return ternarize_with([&](int64_t i) { return f32[i]; }, count, codes);
        case Dtype::f16:
            return ternarize_with([&](int64_t i) { return half_to_float(u16[i]); }, count, codes);
        default:
            return ternarize_with([&](int64_t i) { return bits_to_float(uint32_t(u16[i]) << 16); }, count, codes);
    }
}

}  // namespace bitnet
