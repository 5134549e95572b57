// The certified screen: the best k logits of a large head, to the bit those of the exact product, from a fraction of
// its bytes. All rows are scored with 6-bit weights and 16-bit inputs and a proven bound on the error; with 8 bits of
// the weights where 6 leave too many rows, as for k > 1; several inputs, whose products take longer than fetching the
// rows, with 8 bits of their own. A head that is ternary itself is scored by its own codes. Then the exact logits of
// the k best are computed, and those of every row whose bound reaches the least.
//
// Proof. Row w = s q + d, where s q is what the 6 or 8 bits say, and the input x = a h + b l + e with int8 codes h and
// l (quantised_head.h). Then
//     w x = s (a q.h + b q.l) + (s q).e + d.x
// and by Cauchy-Schwarz the score S = s (a q.h + b q.l) is off by at most |s q| |e| + |d| |x|. The sums q.h and q.l are
// exact integers; S is evaluated in float32 with at most 4 roundings of terms no larger than |s q| (|a h| + |b l|).
// Where the head is ternary with scales for groups of columns, s stands inside of the sums, so that each of these is
// rounded once a group more, by no more than that either, as all of its partial sums are bounded likewise; and d = 0.
// The exact head is itself a float32 sum, by 16 chains of columns / 16 fused multiply-adds and 4 additions, so what it
// gives is off from w x by at most g |w| |x| with g = (columns / 16 + 6) 2^-24 * 1.01, and |w| <= |s q| + |d|. In all
//     |exact - S| <= |d| c + |s q| f,   c = (1 + g) |x|,   f = |e| + g |x| + 4 * 2^-24 (|a h| + |b l|).
// Without the lower bits of x the same holds with l = 0 and e = x - a h.
// No sum overflows, since |w| and |x| are at most 1e18 (else the row, or every row, is kept), and what underflow loses
// is far below the smallest normal number, which the bound has on top. |d|, |s q|, c and f are computed in double and
// rounded up.
// Let L be the least of the exact logits of any k rows: a row with S + bound < L is not among the best k, nor equal to
// one of them. The larger L, the fewer rows are left, so those with the largest S - bound are taken. Everything that is
// not provably below L is computed, rows and inputs that are not finite too.
//
// A draw (sampling.h) is screened likewise. A token whose upper end would not win the race does not win
// it, so what may is computed. Whether top-p keeps the winner is a question of two masses, of the better tokens and of
// all; upper ends tell what those that were not computed add at most, and if that does not decide, more are computed.
//
// Where the ends by 6 bits, U = S6 + bound6, leave too much, the lower 2 bits are read for them: s q = s q6 + s p, so
// S8 = S6 + P, where P is the score of p. S6 and P were evaluated with 4 roundings, off by at most |s q6| r and |s p| r
// with r = 4 * 2^-24 (|a h| + |b l|), which f holds for |s q|, and |s p| <= |s q6| + |s q|. So
//     exact <= U - bound6 + P + |d| c + |s q| f + 2 |s q6| r.
// A ternary head whose rows were scored without the lower bits of x is scored with them instead.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "quantised_head.h"
#include "sampling.h"
#include "ternary_table.h"

namespace bitnet {

using RowNumbers = std::vector<int32_t>;  // of a head
constexpr int32_t kUndecided = -3;        // instead of a token: it takes all logits to tell it

class Screen {
  public:
    // Quantises the rows of a head, which must outlive this, or uses the codes of one that has them.
    Screen(const DenseWeight& head, Executor& executor);
    // The same from the parts that were made of this head before.
    Screen(const DenseWeight& head, const QuantisedHead::Parts& parts, Executor& executor);

    // The k best rows for each of the R inputs x [R, columns], best first, lowest row first among equals: ids and
    // logits [R, k]. Returns how many rows might have been among them, and were computed exactly.
    int64_t top(Executor& executor, const float* x, int64_t num_inputs, int64_t k, int32_t* ids, float* logits) const;
    // What each draw chooses from the logits of its input, x [num_inputs, columns]; below 0 where that is no token.
    void sample(Executor& executor, const float* x, int64_t num_inputs, const Draw* draws, int32_t* tokens) const;
    int64_t bytes() const { return ternary_ ? 0 : quantised_->bytes(); }
    // Bytes of the screen that the best row of each of so many inputs takes, 16 at most.
    int64_t bytes_read(const Kernels& kernels, int num_inputs) const;
    const QuantisedHead* quantised() const { return quantised_.get(); }  // null where the head has codes

  private:
    struct Best;
    struct Logit {
        int32_t row;
        float value;
        bool operator<(const Logit& other) const;
    };
    using Logits = std::vector<Logit>;
    // The upper ends of each tile of rows for each input, and the largest of them.
    class Seen {
      public:
        void reserve(int64_t num_tiles, int count);
        float& most(int index, int64_t tile) const { return most_[index * stride_ + tile]; }
        float* upper(int index, int64_t tile) const { return upper_ + (index * stride_ + tile) * kHeadRows; }
        HeadEnds ends(int index, int64_t tile, float* lower, const float* least) const {
            return {upper(index, tile), stride_ * kHeadRows, &most(index, tile), stride_, lower, least};
        }
        int64_t rows() const { return stride_ * kHeadRows; }  // of an input, with some behind those of the head

      private:
        Memory memory_;
        int64_t stride_ = 0;  // in tiles
        float *most_ = nullptr, *upper_ = nullptr;
    };

    // What draws through the screen cost of late, in parts of reading the head.
    struct DrawCosts {
        float late = 6.0f / 16, refined = 0.0f;  // and how many of them wanted ends of 8 bits behind those of 6
        int turn = 0;
        bool pays(int count);  // whether they have cost less than the head
        bool wants_8() const;
    };

    // What some inputs need while they are screened; those of another thread may be screened meanwhile.
    struct Desk {
        Seen seen;
        DrawCosts draw_costs;
        std::unique_ptr<RowSampler> sampler = nullptr;  // which edits logits, once one is to be
    };

    // Calls work(desk, begin, count) until all inputs are done. Throws std::invalid_argument in another process than
    // the one that made the screen.
    void in_groups(Executor& executor, int64_t num_inputs, const std::function<void(Desk&, int64_t, int)>& work) const;
    int64_t num_tiles() const { return (head_.rows + kHeadRows - 1) / kHeadRows; }
    InputForm form_of(const Kernels& kernels, int count, size_t k) const;
    int bits_of(const Kernels& kernels, InputForm form, size_t k) const;
    std::vector<Logits> top_of_some(Executor& executor, Desk& desk, const float* x, int count, size_t k,
                                    int bits) const;
    std::vector<RowNumbers> look(Executor& executor, Desk& desk, const float* x, int count, size_t k, int bits) const;
    // What looks at the scores of a tile of rows for the inputs from `first` on.
    using Look = std::function<void(int first, int64_t tile, const HeadScores& scores, int thread)>;
    void score(Executor& executor, const float* x, int count, InputForm form, int bits, const Look& look) const;
    void look_at_tile(const Kernels& kernels, const Seen& seen, int first, int64_t tile, const HeadScores& scores,
                      const HeadErrors& errors, size_t k, Best* best) const;
    void refine(Executor& executor, const Seen& seen, const float* x, int count, const std::vector<int>& indices) const;
    static RowNumbers best_rows(const std::vector<Best>& best, size_t index, size_t count, size_t k);
    // Upper ends by so many bits of the head; with `final`, all that is not known is out.
    enum class Ends { of6, of8, final };
    void sample_group(Executor& executor, Desk& desk, const float* x, int count, const Draw* draws,
                      int32_t* tokens) const;
    float sample_some(Executor& executor, Desk& desk, const float* x, int count, const Draw* draws,
                      std::vector<Logits> logits, Ends ends, int32_t* tokens) const;
    std::vector<Logits> logits_of_allowed(Executor& executor, Seen& seen, const float* x, int count,
                                          const Draw* draws) const;
    RowNumbers rows_above(const Seen& seen, int index, const Logits& known, size_t k) const;
    void dense_rows(const Kernels& kernels, const float* input, const int32_t* rows, int64_t count, float* out) const;
    std::vector<Logits> compute(Executor& executor, const float* x, const std::vector<RowNumbers>& rows) const;

    DenseWeight head_;
    const TernaryTable* ternary_ = nullptr;  // the one or
    std::unique_ptr<QuantisedHead> quantised_;
    HomeMutex mutex_{"a screen"};
    mutable std::vector<Desk> desks_;  // of the threads; under the mutex
    mutable std::atomic<bool> is_flat_ =
        false;  // whether the last best logits hardly stood out: what to read, no result
};

}  // namespace bitnet
