// The certified screen: the best k logits of a large head, to the bit those of the exact product, from a fraction of
// its bytes. All rows are scored with 6-bit weights and a proven bound on the error; where one of 16 rows may still be
// among the best k, they are scored with 8 bits; only rows that may be among them even then are computed exactly.
// Several inputs, whose products take longer than fetching the rows, are scored with the upper 8 of their own 16 bits;
// where that does not rule a tile out for an input, the lower ones are added. Where the processor multiplies whole
// bytes, they are scored with 8-bit weights at once. All rows are scored first, so that the best one is known to every
// thread before any tile is looked at again; with the matrix product the first scores are the last ones, and one pass
// does.
//
// Proof. Row w = s q + d, where s q is what the 6 or 8 bits say, and the input x = a h + b l + e with int8 codes h and
// l (quantised_head.h). Then
//     w x = s (a q.h + b q.l) + (s q).e + d.x
// and by Cauchy-Schwarz the score S = s (a q.h + b q.l) is off by at most |s q| |e| + |d| |x|. The sums q.h and q.l are
// exact integers; S is evaluated in float32 with at most 4 roundings of terms no larger than |s q| (|a h| + |b l|). The
// exact head is itself a float32 sum, by 16 chains of columns / 16 fused multiply-adds and 4 additions, so what it
// gives is off from w x by at most g |w| |x| with g = (columns / 16 + 6) 2^-24 * 1.01, and |w| <= |s q| + |d|. In all
//     |exact - S| <= |d| c + |s q| f,   c = (1 + g) |x|,   f = |e| + g |x| + 4 * 2^-24 (|a h| + |b l|).
// Without the lower bits of x the same holds with l = 0 and e = x - a h.
// No sum overflows, since |w| and |x| are at most 1e18 (else the row, or every row, is kept), and what underflow loses
// is far below the smallest normal number, which the bound has on top. |d|, |s q|, c and f are computed in double and
// rounded up.
// Let L be the k-th largest of S - bound among any of the rows: k rows have exact logits of at least L, so a row with S
// + bound < L is not among the best k, nor equal to one of them, whichever of its scores that is. Each thread has
// an L of its own, which only grows: in the first pass that of the rows that it has seen, in the second at first that
// of all rows, and then of the better scores that it has seen, each row once. Those of all threads make the last one,
// since a row that was passed over cannot be among the k largest. Everything that is not provably below L is kept, rows
// and inputs that are not finite too.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "quantised_head.h"

namespace bitnet {

class Screen {
  public:
    // Quantises the rows of a head, which must outlive this.
    Screen(const DenseWeight& head, Executor& executor);
    // The same from the parts that were made of this head before.
    Screen(const DenseWeight& head, const QuantisedHead::Parts& parts, Executor& executor);

    // The k best rows for each of the R inputs x [R, columns], best first, lowest row first among equals: ids and
    // logits [R, k]. Returns how many rows were computed exactly, which depends on who saw which rows first.
    int64_t top(Executor& executor, const float* x, int64_t num_inputs, int64_t k, int32_t* ids, float* logits) const;
    int64_t bytes() const { return quantised_.bytes(); }
    const QuantisedHead& quantised() const { return quantised_; }

  private:
    struct Best;
    struct Ends {
        float upper[kHeadRows], lower[kHeadRows];
    };
    // What the first pass leaves: of each tile of rows the sums, and for each input the largest upper end.
    class Seen {
      public:
        std::mutex mutex;
        void reserve(int64_t num_tiles, const HeadInputs& inputs);
        int32_t* sums(const HeadInputs& inputs, int input_tile, int64_t tile);
        float* ends(const HeadInputs& inputs, int input_tile, int64_t tile);

      private:
        Memory sums_, ends_;
    };

    int64_t top_of_some(Executor& executor, const float* x, int count, size_t k, int32_t* ids, float* logits) const;
    HeadEnds bound(const Kernels& kernels, const HeadInputs& inputs, int index, int64_t tile, int bits,
                   const int32_t* high, const int32_t* low, Ends& ends) const;
    void look_at_tile(const Kernels& kernels, const HeadInputs& inputs, int input_tile, int64_t tile,
                      const QuantisedHead::Sums& sums, size_t k, Best* best) const;
    void keep_of_tile(const Kernels& kernels, const HeadInputs& inputs, int input_tile, int64_t tile, int32_t* sums,
                      const float* top, size_t k, Best* best) const;
    void keep_rows(int64_t tile, const Ends& ends, size_t k, Best& best) const;
    static float least_of(const std::vector<Best>& best, int index, size_t k, float least);
    void keep_best(const std::vector<Best>& best, int index, size_t k, float least, std::vector<int32_t>& rows) const;
    std::vector<float> compute(Executor& executor, const float* x, const std::vector<int32_t>& rows,
                               const std::vector<int64_t>& starts) const;

    DenseWeight head_;
    QuantisedHead quantised_;
    mutable Seen seen_;
};

}  // namespace bitnet
