// Weights in the layouts that the kernels read.
#pragma once
#include <cstdint>
#include <vector>

#include "group_scales.h"

namespace bitnet {

enum class Layout : int { codes, quarters, u2, t5, signs };  // ternary.py says what they are

enum class Format : int { u2 = 0, t5 = 1 };  // 2 bits or 1.6 bits a weight, see kernels.h

// T5 blocks of one group of 32 rows into U2 steps.
void expand_blocks(const uint8_t* blocks, int num_blocks, uint8_t* steps);
// Lines of one bit a weight into two U2 steps each.
void expand_lines(const uint8_t* lines, int num_lines, uint8_t* steps);

// Ternary matrices stacked along their rows.
class TernaryWeight {
  public:
    struct Group {
        int64_t first_row;
        int rows, part;
    };

    // A scale for each row, or one for every 64 or 128 columns of each row: those are U2, and where all are -1 or +1
    // keep one bit of it when the last part is packed. The arena must live until then.
    TernaryWeight(int64_t columns, const std::vector<int64_t>& rows, Format format, int64_t group_columns = 0,
                  Arena* arena = nullptr);
    // Repacks one of the stacked matrices, whose rows share a scale; throws std::invalid_argument at an invalid code.
    void pack(int part, const uint8_t* data, Layout layout, float scale);
    // The same with scales [rows], which are finite.
    void pack_rows(int part, const uint8_t* data, Layout layout, const float* scales);
    // The same with scales [rows, column_groups()], which are finite.
    void pack(int part, const uint8_t* data, Layout layout, const float* scales);
    int64_t num_parts() const { return int64_t(first_groups_.size()) - 1; }
    int64_t part_rows(int part) const { return part_rows_[size_t(part)]; }
    bool is_packed() const;  // every part, without an invalid code

    int64_t rows() const { return rows_; }
    int64_t columns() const { return columns_; }
    Format format() const { return format_; }
    int64_t steps() const { return steps_; }  // U2 steps of a group, expanded where it is T5
    bool one_bit() const { return one_bit_; }
    // Whether products of so many tokens are those of Kernels::signs_product.
    bool looks_up(const Kernels& kernels, int64_t tokens) const {
        return one_bit_ && kernels.signs_product && tokens >= kernels.signs_tokens;
    }
    int64_t padded_columns() const { return steps_ * kStepColumns; }
    int64_t group_bytes() const { return one_bit_ ? group_bytes_ / 2 : group_bytes_; }
    int64_t written_bytes() const { return group_bytes_; }  // of a group, by `write`
    int64_t bytes() const;
    int64_t group_columns() const { return group_columns_; }  // 0: scales of rows
    int64_t column_groups() const { return column_groups_; }  // of which the last may be short
    const std::vector<Group>& groups() const { return groups_; }
    void write(uint8_t* out) const;  // [groups][written_bytes()], in the layout of ternary.py
    const uint8_t* group_data(int64_t group) const { return memory_.data() + group * group_bytes(); }
    // Of a group of rows their scales, [32], or where groups of columns have some [column_groups()][32].
    const float* row_scales(int64_t group) const {
        const auto part = size_t(groups_[size_t(group)].part);
        const std::vector<float>& scales = row_scales_[part];
        return scales.data() + (scales.size() > kGroupRows ? (group - first_groups_[part]) * kGroupRows : 0);
    }
    ScaleLines group_scales(int64_t group, int64_t column_group = 0) const {
        return scales_.from((group * column_groups_ + column_group) * kGroupRows);
    }

  private:
    void read(int part, const uint8_t* data, Layout layout);
    void pack_codes(int part, const uint8_t* data, Layout layout);
    void copy_u2(int part, const uint8_t* data);
    void copy_t5(int part, const uint8_t* data);
    void pack_row(int64_t group, int row_in_group, const uint8_t* codes);
    void unsettle(int part);
    void settle(int part);
    bool has_zero(int64_t group) const;
    Memory take(int64_t bytes) const { return arena_ ? arena_->take(bytes) : Memory(bytes); }

    Format format_;
    Arena* arena_;
    bool one_bit_ = false;
    int64_t rows_ = 0, columns_, group_columns_, column_groups_ = 0, steps_, group_bytes_;
    std::vector<int64_t> part_rows_, first_groups_;
    std::vector<char> packed_;
    std::vector<Group> groups_;
    Memory memory_;
    std::vector<std::vector<float>> row_scales_;  // of each part: 32 for all groups where they share a scale
    GroupScales scales_;
};

class TernaryTable;

struct DenseWeight {
    const void* data;  // [rows, columns] row-major, owned by whoever made this
    Dtype dtype;
    int64_t rows, columns;
    const TernaryTable* codes = nullptr;  // of float32, instead of data: what rows are made of
    int64_t row_bytes() const { return columns * (dtype == Dtype::f32 ? 4 : dtype == Dtype::i8 ? 1 : 2); }
};

// Absmean ternarisation of a whole tensor (s = 1 / max(mean |w|, 1e-5), codes = clamp(round(w s), -1, 1)).
// Returns the multiplicative scale 1 / s.
float ternarize(const void* weights, Dtype dtype, int64_t count, int8_t* codes);

// Whether a 2-bit code among these bytes is the fourth pattern.
bool has_invalid(const uint8_t* bytes, int64_t count);

// Blocks of codes along rows, as GGUF files have them, to quarters (ternary.py): [rows / 4, columns]. The first
// `code_bytes` of each `block_bytes` hold codes: 32 bytes are 128 columns, the first 32 of them in the lowest bits, or
// in the highest. Returns whether a code is the fourth pattern.
struct CodeBlocks {
    const uint8_t* data;
    int64_t rows, row_bytes, block_bytes, code_bytes;
    bool first_highest;
    int64_t columns() const { return row_bytes / block_bytes * code_bytes * 4; }
};
bool to_quarters(const CodeBlocks& from, uint8_t* quarters);

}  // namespace bitnet
