// Choosing a token from a row of logits, deterministically: the same bits in give the same token on every CPU.
//
// Order of work, as in Transformers and vLLM: the mask; logit bias and bans; repetition penalty (over prompt and
// output, as in Transformers); frequency and presence penalties (over the output, as in OpenAI's API); temperature;
// top-k; top-p; min-p; then one draw. Edits are float32, weights are fixed-point (sampling_math.h). "Best" always
// means: highest logit first, lowest id first among equals, so each filter keeps a prefix of one order, and what is
// kept is told by a `Cut`.
//
// A draw is a race: each token runs with its logit over the temperature and Gumbel noise of its own, and the first of
// those that are kept wins, with the probability that the softmax of those gives it (Gumbel 1954, Yellott 1977). Its
// winner does not depend on what the others weigh. So top-p is only asked whether it keeps the winner; if not, it keeps
// better tokens only, of which another race is run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.h"
#include "sampling_math.h"
#include "sampling_passes.h"

namespace bitnet {

// What a request asks of the sampler. A temperature below 1e-5 is greedy; top_k = 0 is off; top_p = 1 is off: it keeps
// a token if the probability of all better ones is at most top_p (Llama's rule); min_p = 0 is off.
struct SamplingRule {
    size_t vocab_size = 0;
    double temperature = 1.0;
    size_t top_k = 0;
    double top_p = 1.0;
    double min_p = 0.0;
    float repetition_penalty = 1.0f;
    float presence_penalty = 0.0f;
    float frequency_penalty = 0.0f;
    std::vector<int32_t> bias_ids;
    std::vector<float> bias_values;
    std::vector<int32_t> end_ids;  // banned where the caller says so (min_tokens)

    bool is_greedy() const { return temperature < 1e-5; }
    bool penalizes() const {
        return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
    }
    float scale() const { return static_cast<float>(1.0 / temperature); }
};

// The tokens of a sequence so far; the first `num_prompt` are the prompt.
struct History {
    const int32_t* tokens = nullptr;
    size_t num_tokens = 0;
    size_t num_prompt = 0;
};

struct Candidate {
    float logit;
    int32_t id;
};

inline bool is_better(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// The last token that is kept: those that are not better are dropped. The default keeps all but -infinity.
struct Cut {
    float logit = -std::numeric_limits<float>::infinity();
    int32_t id = -1;

    bool keeps(const Candidate& token) const { return !is_better({logit, id}, token); }
};

// How the tokens of a row are measured: by the logit of the best, and 1 / temperature.
struct Measure {
    float best = 0.0f;
    float scale = 1.0f;

    float distance(float logit) const { return (best - logit) * scale; }
    uint64_t weight(float logit) const { return weight_of(exp_of_minus(distance(logit))); }
    // What min-p keeps: no token below min_p times the probability of the best.
    Cut min_p_cut(const SamplingRule& rule) const;
};

// The most that the better ones than a token may weigh if top-p keeps it, where all weigh so much.
inline uint64_t allowed_by(const SamplingRule& rule, uint64_t total) {
    return rule.top_p < 1.0 ? static_cast<uint64_t>(rule.top_p * static_cast<double>(total)) : total;
}

// What a token is chosen by from a row [vocab_size]. All ids must lie in the vocabulary. `mask`, unless it is null, has
// (vocab_size + 31) / 32 words, token 32 * i + j is bit j of word i: every token whose bit is not set is -infinity, and
// what the row holds for it is not looked at.
struct Draw {
    const SamplingRule* rule;
    NoiseKey key;
    History history = {};
    bool ban_ends = false;
    const uint32_t* mask = nullptr;

    bool allows(size_t token) const { return mask == nullptr || ((mask[token / 32] >> token % 32) & 1) != 0; }
    bool edits() const { return !rule->bias_ids.empty() || (ban_ends && !rule->end_ids.empty()) || rule->penalizes(); }
};

constexpr int32_t kNotANumber = -1;   // instead of a token: the row holds NaN or +infinity
constexpr int32_t kNothingLeft = -2;  // instead of a token: every token is banned

// The token for a row of which only these, all different, have a logit above -infinity, edited. Puts them in order.
int32_t sample_few(std::vector<Candidate>& tokens, const Draw& draw);

// Samples and scores rows of one vocabulary; keeps its scratch memory between calls: one call at a time.
class RowSampler {
  public:
    explicit RowSampler(size_t vocab_size);

    size_t vocab_size() const { return vocab_size_; }
    // Held by whoever calls what follows, where threads share a sampler. Throws std::invalid_argument in another
    // process than the one that made it: there it may be held for ever.
    std::unique_lock<std::mutex> lock();

    // The token for a row [vocab_size]; below 0 for a row that has none. The row is edited and restored.
    int32_t sample(float* logits, const Draw& draw);

    // The tokens whose logits the draw edits, in ascending order; and what it makes of them, when they are all here.
    std::vector<int32_t> edited_ids(const Draw& draw);
    void edit(std::vector<Candidate>& tokens, const Draw& draw);

    // Samplers of the same vocabulary for so many threads at a time; this one is that of thread 0.
    void make_room(size_t num_threads) { others_.resize(std::max(others_.size(), num_threads)); }
    RowSampler& of_thread(size_t thread);

    // The natural logarithm of sum(exp(logits)); NaN for a row that holds NaN or +infinity, or only -infinity.
    double log_normalizer(const float* logits);

    // The n best tokens, best first; fewer if the others are -infinity.
    std::vector<Candidate> best(const float* logits, size_t n);

  private:
    bool scan(const float* logits);
    int32_t first_best(const float* logits) const;
    size_t block_length(size_t block) const;
    template <class Pass>
    void for_parts(const float* logits, const Pass& pass) const;
    uint64_t weigh_row(const float* logits);
    uint64_t weigh_better(const float* logits, const Candidate& than);
    float likely_bar(size_t n);
    void select(const float* logits, size_t n);
    Candidate race(const float* logits, uint64_t noise, int32_t first_id, const Cut& cut) const;
    int32_t choose(const float* logits, const Draw& draw);
    void edit(float* logits, const Draw& draw);
    void penalize(float* logits, const SamplingRule& rule, const History& history);
    void set(float* logits, int32_t id, float value);
    void restore(float* logits);

    HomeMutex mutex_{"a sampler"};
    size_t vocab_size_;
    Measure measure_;  // of the row last scanned
    std::vector<float> block_max_;
    std::vector<uint64_t> block_mass_;
    std::vector<float> kept_;  // one block: its logits, -infinity where dropped
    std::vector<Candidate> candidates_;
    std::vector<Candidate> edits_;  // what stood there before, in order
    std::vector<uint32_t> counts_;  // all 0 between calls
    std::vector<int32_t> seen_;
    std::vector<float> masked_;                        // a row, empty until it is needed
    std::vector<std::unique_ptr<RowSampler>> others_;  // of each thread, null until it is needed
    std::vector<float> row_;                           // the maxima of blocks
};

// pass(x, block, num_blocks) over whole blocks from this one on: those in the row, then its end, padded with -infinity.
template <class Pass>
void RowSampler::for_parts(const float* logits, const Pass& pass) const {
    const size_t num_whole = vocab_size_ / kBlock, rest = vocab_size_ % kBlock;
    pass(logits, 0, num_whole);
    if (rest == 0) return;
    float padded[kBlock];
    std::fill(std::copy_n(logits + num_whole * kBlock, rest, padded), padded + kBlock,
              -std::numeric_limits<float>::infinity());
    pass(padded, num_whole, 1);
}

}  // namespace bitnet
