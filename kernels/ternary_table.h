// A head or a table of embeddings whose weights are -s, 0 and +s, with a scale s for every 128 or 64 columns of each
// row.
//
// The codes say all there is in it but the sign of a 0, from 1.1 bits a weight. The score of a row for an input of 16
// bits (head_inputs.h) is a sum_h + b sum_l, where a sum is that of fused multiply-adds of the scales and exact
// integers.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "head_inputs.h"
#include "weights.h"

namespace bitnet {

class TernaryTable {
  public:
    // Reads `table` only here; null where it is another one, which most are seen to be from their first row.
    static std::unique_ptr<TernaryTable> of(const DenseWeight& table, Executor& executor);
    // Rows of codes or signs, and a scale for each group of their columns; throws std::invalid_argument where they are
    // none.
    struct Codes {
        int64_t rows, columns, group_columns;
        const uint8_t* data;
        Layout layout;
        const float* scales;
    };
    explicit TernaryTable(const Codes& codes);

    int64_t bytes() const { return weight_.bytes(); }
    void read(const Kernels& kernels, int64_t row, float* out) const;
    static constexpr int kLookupGroups = 64;
    // The inputs, and what their codes add up to over each group of columns, which the sums lack.
    struct Inputs {
        HeadInputs codes;
        int64_t groups;
        bool are_looked_up;               // by sums of several groups of rows at a time, which pays for the tables
        std::vector<int32_t> minus_sums;  // [vectors][groups]
        int64_t groups_at_once() const { return are_looked_up ? kLookupGroups : 1; }
        int64_t first_sum(int tile) const { return codes.vectors_each() * codes.first_of(tile) * groups; }
    };
    Inputs inputs(Executor& executor, const float* x, int count, InputForm form) const;
    struct Room {  // of a thread
        alignas(64) uint8_t tables[kSignsTableBytes];
        alignas(64) float sums[kLookupGroups * kMaxTileTokens * kGroupRows];  // [groups][vectors][32]
        Room() {}                                                             // without zeros
    };
    // Calls work(input_tile, tile, scores) for the tiles of 16 rows from first to last and all inputs.
    template <class Work>
    void each_tile(const Kernels& kernels, const Inputs& inputs, int64_t first, int64_t last, Room& room,
                   const Work& work) const {
        const int64_t end_group = (last + 1) / 2, most = inputs.groups_at_once();
        for (int64_t begin = first / 2, end; begin < end_group; begin = end) {
            end = std::min(begin + most, end_group);
            for (int t = 0; t < inputs.codes.num_tiles(); t++) {
                sum(kernels, inputs, t, begin, end, room);
                const int64_t stride = inputs.codes.vectors_of(t) * kGroupRows;
                for (int64_t tile = std::max(first, 2 * begin); tile < std::min(last, 2 * end); tile++)
                    work(t, tile,
                         scores_of(inputs.codes, t, room.sums + (tile / 2 - begin) * stride + (tile % 2) * kHeadRows));
            }
        }
    }
    RowErrors errors;

  private:
    TernaryTable(int64_t rows, int64_t columns, int64_t group_columns);
    bool pack(const DenseWeight& table, Executor& executor);
    void sum(const Kernels& kernels, const Inputs& inputs, int input_tile, int64_t begin, int64_t end,
             Room& room) const;
    static HeadScores scores_of(const HeadInputs& inputs, int input_tile, const float* sums);
    int group_steps() const { return int(weight_.group_columns() / kStepColumns); }

    TernaryWeight weight_;
};

// A row of a dense matrix as float32, [columns].
void read_row(const Kernels& kernels, const DenseWeight& weight, int64_t row, float* out);

}  // namespace bitnet
