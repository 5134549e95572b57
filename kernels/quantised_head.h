// A head [rows, columns] in 8 or 6 bits a weight, and its scores for inputs of 16 bits.
//
// A row is w = s (q - 128) + d with codes q in 1..255, kept apart as high = q / 4 in 6 bits and low = q % 4 in 2.
// Without the low bits a weight is s (4 high + 1.5 - 128). In halves of s both are whole numbers:
//     8 high + 2 low - 256    and    8 high - 253.
// A score of an input (head_inputs.h) is (s / 2) (a sum_h + b sum_l), the sums being exact integers, so it is the same
// to the bit on every path.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "head_inputs.h"

namespace bitnet {

constexpr int64_t kMaxHeadColumns = 32768;  // 256 * 127 * columns, and 253^2 * columns, stay inside int32
constexpr int64_t kTilesOnEnd = 16;         // of rows, before anybody looks at their sums
constexpr int64_t kTilesAtOnce = 2;         // of rows, which share the activations: at most, as HeadTask has it

class QuantisedHead {
  public:
    // Reads `head` only here. `bits`: 8, or 6.
    QuantisedHead(const DenseWeight& head, int bits, Executor& executor);

    // What one of 8 bits consists of: bits 2..7 of the codes [tiles][steps][kHeadBytes6], bits 0..1
    // [tiles][steps][kHeadBytes2], and five numbers a row, each [tiles * kHeadRows]: s / 2, then error and size of
    // errors6 and of errors8.
    struct Parts {
        const uint8_t *high, *low;
        const float* numbers;
    };
    // One of 8 bits again from copies of its parts; throws std::invalid_argument for numbers that cannot be.
    QuantisedHead(int64_t rows, int64_t columns, const Parts& parts, Executor& executor);
    const uint8_t* high() const { return weights6_.data(); }
    const uint8_t* low() const { return weights2_.data(); }
    void copy_numbers(float* out) const;

    int64_t rows() const { return rows_; }
    int64_t columns() const { return columns_; }
    int64_t num_steps() const { return steps_; }
    int64_t num_tiles() const { return tiles_; }
    const float* half_scales() const { return half_scales_.data(); }  // s / 2 of each row
    // Whether no weight is NaN, infinite, or beyond what the bounds of errors8 can tell.
    bool is_finite() const;
    int64_t bytes() const { return weights6_.bytes() + weights2_.bytes(); }

    // out [num_inputs, rows]
    void scores(Executor& executor, const float* x, int64_t num_inputs, float* out) const;

    // The form for whoever needs the sums of h and of l.
    InputForm form(const Kernels& kernels, int count) const;
    // The sums of a tile of rows for each vector of a tile of inputs.
    using Sums = int32_t[kHeadTaskVectors * kHeadRows];
    // Of `bits` bits, 2 (the low ones), 6 or 8, and `count` tiles of rows, one or two. No matrix takes 2 bits.
    void sums(const Kernels& kernels, const HeadInputs& inputs, int input_tile, int64_t tile, int count, int bits,
              Sums* sums) const;
    // The task of `count` tiles of rows for so many vectors of codes; of a matrix, its code_stride too is to be set.
    HeadTask task(int64_t tile, int count, const int8_t* codes, int vectors, int32_t* acc) const;
    // Calls work(input_tile, tile, sums) for the tiles of rows from first to last and all inputs.
    template <class Work>
    void each_tile(const Kernels& kernels, const HeadInputs& inputs, int64_t first, int64_t last, int bits,
                   const Work& work) const {
        // Few inputs wait for the memory, which gives one stream faster than two, and fastest without a pause.
        const int64_t at_once = inputs.form() == InputForm::whole ? 1 : kTilesAtOnce;
        const int64_t most = at_once == 1 && inputs.num_tiles() == 1 ? kTilesOnEnd : at_once;
        Sums all[kTilesOnEnd];
        for (int64_t tile = first, count; tile < last; tile += count) {
            count = std::min(most, last - tile);
            for (int t = 0; t < inputs.num_tiles(); t++) {
                for (int64_t i = 0; i < count; i += at_once)
                    sums(kernels, inputs, t, tile + i, int(std::min(at_once, count - i)), bits, all + i);
                for (int64_t i = 0; i < count; i++) work(t, tile + i, all[i]);
            }
        }
    }
    // Of a tile's sums, of so many bits, for its tile of inputs.
    HeadScores scores_of(const HeadInputs& inputs, int input_tile, int64_t tile, int bits, const Sums& sums) const;

    HeadInputs inputs(Executor& executor, const float* x, int count, InputForm form) const;
    RowErrors errors6, errors8;

  private:
    QuantisedHead(int64_t rows, int64_t columns, int bits);
    void quantise_row(int64_t row, const std::vector<float>& w, std::vector<uint8_t>& codes);

    int64_t rows_, columns_, steps_, tiles_;
    Memory weights6_, weights2_;  // the second is empty where 6 bits are all
    std::vector<float> half_scales_;
};

}  // namespace bitnet
