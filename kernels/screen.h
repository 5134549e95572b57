// The certified screen: the best k logits of a large head, to the bit those of the exact product, from a fraction of
// its bytes. All rows are scored with 6-bit weights and a proven bound on the error; only rows that may still be among
// the best k are then computed exactly.
//
// Proof. Row w = s q + d with whole q in -31..31, and the input x = a h + b l + e with int8 codes h and l. Then
//     w x = s (a q.h + b q.l) + (s q).e + d.x
// and by Cauchy-Schwarz the score S = s (a q.h + b q.l) is off by at most |s q| |e| + |d| |x|. The sums q.h and q.l are
// exact integers; S is evaluated in float32 with at most 4 roundings of terms no larger than |s q| (|a h| + |b l|). The
// exact head is itself a float32 sum, by 16 chains of columns / 16 fused multiply-adds and 4 additions, so what it
// gives is off from w x by at most g |w| |x| with g = (columns / 16 + 6) 2^-24 * 1.01, and |w| <= |s q| + |d|. In all
//     |exact - S| <= |d| c + |s q| f,   c = (1 + g) |x|,   f = |e| + g |x| + 4 * 2^-24 (|a h| + |b l|).
// No sum overflows, since |w| and |x| are at most 1e18 (else the row, or every row, is kept), and what underflow loses
// is far below the smallest normal number, which the bound has on top. |d|, |s q|, c and f are computed in double and
// rounded up. Let L be the k-th largest of S - bound: k rows have exact logits of at least L, so a row with S + bound <
// L is not among the best k, nor equal to one of them. Everything that is not provably below L is kept, rows and inputs
// that are not finite too.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "executor.h"

namespace bitnet {

class Screen {
  public:
    // Quantises the rows of a head, which must outlive this.
    Screen(const DenseWeight& head, Executor& executor);

    // The k best rows for each of the R inputs x [R, columns], best first, lowest row first among equals: ids and
    // logits [R, k]. Returns how many rows were computed exactly. One call at a time: a second thread waits.
    int64_t top(Executor& executor, const float* x, int64_t num_inputs, int64_t k, int32_t* ids, float* logits);
    int64_t bytes() const { return weights_.bytes(); }

  private:
    struct Inputs;
    void quantise_row(int64_t row, std::vector<float>& w, std::vector<uint8_t>& codes);
    void score_tile(const Kernels& kernels, const Inputs& inputs, int64_t tile, float* upper, float* lower) const;

    DenseWeight head_;
    int64_t steps_, tiles_;
    Memory weights_;
    std::vector<float> scales_, sizes_, errors_;  // s, |s q| and |d| of each row
    std::mutex mutex_;
    std::vector<float> upper_, lower_;  // both ends of each row's score, by input
};

}  // namespace bitnet
