// One draw (sampling.h) through the screen.
#pragma once
#include <cstdint>
#include <vector>

#include "screen.h"

namespace bitnet {

// A draw from one input, of which some logits are known and of the others upper ends.
class Race {
  public:
    // `upper` has `num_rows` ends, whole blocks of them, and is written; `tile_maxima` are at least those of each tile
    // of rows, and infinite where one is no number, or null. With `is_fine`, no ends can be had that are lower.
    Race(const Draw& draw, float* upper, const float* tile_maxima, size_t num_rows, bool is_fine)
        : draw_(draw), upper_(upper), tile_maxima_(tile_maxima), maxima_(num_rows / kBlock), is_fine_(is_fine) {}

    void add(int32_t row, float logit);
    // The rows whose logits are to be added before it can go on, in ascending order; none at its end, and where it
    // wants lower ends. `sampler` may be null where the draw edits no logits.
    RowNumbers go_on(RowSampler* sampler);
    bool is_fine() const { return is_fine_; }
    bool wants_fine() const { return wants_fine_; }
    // Its upper ends are lower now. What rows it asked for last need not be added.
    void refine();
    // Whatever it asked for last, it gets no more.
    void give_up() { end(kUndecided); }
    int32_t token() const { return token_; }

  private:
    RowNumbers end(int32_t token);
    RowNumbers want_fine();
    void begin();
    // False where an end is no number.
    bool find_block_maxima();
    // Edits all logits that are to be edited, when they are known.
    RowNumbers edit(RowSampler& sampler);
    // Ends with the best token if that is what is asked for, or begins a race.
    RowNumbers find_first();
    void begin_race(const Cut& cut);
    // Ends with the winner, or bars it and what is worse, or tells which rows might be before it, or would tell more.
    RowNumbers try_winner();
    // Of the best few, which are all that top-k leaves, when they are known.
    RowNumbers find_few();
    // The rows that may have this logit, or a better one.
    RowNumbers from(float least) const;
    // The rows that may do as well as this.
    RowNumbers rivals(double score) const;
    // With b and z as the known masses of better tokens and of all, and at most B and Z of the others: top-p keeps the
    // winner if b + B <= p (z + B), since p <= 1, and does not if b > p (z + Z).
    RowNumbers check_top_p();
    // The best rows that are not known, so many of them as will tell whether top-p keeps the winner, if they turn out
    // as far below their upper ends as others did; none if no number is likely to. Weights are those of `better` and
    // `known`, masses of tokens.
    RowNumbers deciding(double better, double known) const;
    // The most that the rows weigh which are not known and may have this logit.
    uint64_t most_mass(float least) const;
    // About so many, those with the largest upper ends, of those that may have this logit. One block in 16 tells from
    // where on.
    RowNumbers likeliest(size_t count, float least) const;

    Draw draw_;
    float* upper_;
    const float* tile_maxima_;
    std::vector<float> maxima_;
    std::vector<Candidate> known_;
    Candidate first_{};
    Measure measure_;
    Cut cut_;
    uint64_t noise_ = 0;
    Candidate winner_{};
    double best_ = 0.0;  // its score
    size_t num_scored_ = 0;
    int num_tries_ = 0;
    float above_ = 0, num_above_ = 0;  // how far the upper ends of so many were above their logits
    bool is_fine_, wants_fine_ = false;
    bool is_begun_ = false, is_edited_ = false, has_first_ = false, has_rivals_ = false, is_few_ = false,
         is_over_ = false;
    int32_t token_ = kUndecided;
};

}  // namespace bitnet
