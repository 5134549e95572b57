// Batches, and whole sequences of them as batches of their own.
#pragma once
#include <cstdint>
#include <vector>

namespace bitnet {

struct Batch {
    int64_t num_tokens, num_sequences, table_width;
    const int32_t* token_ids;     // [T]
    const int32_t* positions;     // [T]
    const int32_t* slots;         // [T]
    const int32_t* starts;        // [S + 1]
    const int32_t* block_tables;  // [S, table_width]
    // [num_wanted], ascending: the tokens that go on behind Program::select, which have the first rows of the output.
    // Fewer than none: all do.
    const int32_t* wanted = nullptr;
    int64_t num_wanted = -1;
    bool has_choice() const { return num_wanted >= 0 && num_wanted < num_tokens; }
    bool wants_none() const { return has_choice() && !num_wanted; }
};

// A batch, or some sequences of it, as a step takes them.
struct Portion {
    Batch batch;
    Batch chosen;                                      // the wanted tokens, whose keys and values are in the cache
    std::vector<int32_t> sequences, chosen_sequences;  // of each token
    int64_t first_token = 0, first_row = 0;            // in the whole batch and its output

  private:
    friend class Portions;
    void choose();
    std::vector<int32_t> starts_, wanted_, chosen_indices_;
};

// The portions of one batch after the other, whose memory they keep.
class Portions {
  public:
    // Cuts a batch into so many portions of about as many tokens, if there are such and none reads what another one
    // writes into the cache; else it stays whole. It must outlive them.
    void cut(const Batch& batch, int64_t count, int64_t num_blocks);
    const std::vector<Portion>& all() const { return portions_; }

  private:
    bool find_ends(const Batch& batch, int64_t count);
    bool are_apart(const Batch& batch, int64_t num_blocks);
    void take(const Batch& batch, int64_t first, int64_t last, Portion& portion) const;

    std::vector<Portion> portions_;
    std::vector<int64_t> ends_;     // the first sequence of each, then how many there are
    std::vector<int32_t> writers_;  // of blocks: 0, or the number of a portion from 1 on
};

}  // namespace bitnet
