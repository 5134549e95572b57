#include "sampling.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <functional>
#include <numeric>
#include <stdexcept>

namespace bitnet {
namespace {

constexpr double kGreedyBelow = 1e-5;
constexpr double kLightest = 0.5 / kWeightOfBest;  // relative to the best: what is below weighs nothing
constexpr uint32_t kSeen = uint32_t{1} << 31;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The logits of the tokens whose bits are set, -infinity for the others.
void apply_mask(const float* logits, const uint32_t* mask, size_t vocab_size, float* masked) {
    const size_t num_words = vocab_size / 32;
    for (size_t i = 0; i < num_words; ++i, logits += 32, masked += 32) {
        const uint32_t word = mask[i];
        std::fill(masked, masked + 32, -kInfinity);
        if (word == 0) continue;             // as most words of most masks
        for (uint32_t j = 0; j < 32; ++j) {  // without branches, which masks of mixed words would mispredict
            const uint32_t keep = (word & (uint32_t{1} << j)) != 0 ? ~uint32_t{0} : 0;
            const uint32_t kept = std::bit_cast<uint32_t>(logits[j]) & keep;
            masked[j] = std::bit_cast<float>(kept | (std::bit_cast<uint32_t>(-kInfinity) & ~keep));
        }
    }
    for (size_t j = 0; j < vocab_size % 32; ++j) masked[j] = (mask[num_words] >> j) & 1 ? logits[j] : -kInfinity;
}

}  // namespace

RowSampler::RowSampler(size_t vocab_size)
    : process_(getpid()),
      vocab_size_(vocab_size),
      block_max_((vocab_size + kBlock - 1) / kBlock),
      block_mass_(block_max_.size()),
      kept_(kBlock),
      weights_(kBlock),
      counts_(vocab_size) {}

std::unique_lock<std::mutex> RowSampler::lock() {
    if (getpid() != process_)
        throw std::invalid_argument("a sampler does not survive fork(): make one in this process");
    return std::unique_lock<std::mutex>(mutex_);
}

int32_t RowSampler::sample(float* logits, const SamplingRule& rule, const History& history, bool ban_ends,
                           const NoiseKey& key) {
    edit(logits, rule, history, ban_ends);
    const int32_t token = choose(logits, rule, key);
    restore(logits);
    return token;
}

int32_t RowSampler::sample_masked(const float* logits, const uint32_t* mask, const SamplingRule& rule,
                                  const History& history, bool ban_ends, const NoiseKey& key) {
    masked_.resize(vocab_size_);
    apply_mask(logits, mask, vocab_size_, masked_.data());
    return sample(masked_.data(), rule, history, ban_ends, key);
}

int32_t RowSampler::sample_few(const int32_t* ids, const float* logits, size_t count, const SamplingRule& rule,
                               const NoiseKey& key) {
    candidates_.clear();
    for (size_t i = 0; i < count; ++i) candidates_.push_back({logits[i], ids[i]});
    return choose_candidate(rule, key);
}

// As if the others were -infinity.
int32_t RowSampler::choose_candidate(const SamplingRule& rule, const NoiseKey& key) {
    const size_t count = candidates_.size();
    if (count == 0) return kNothingLeft;
    if (!few_ || few_->vocab_size_ != count) few_ = std::make_unique<RowSampler>(count);
    std::sort(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
    row_.resize(count);
    for (size_t i = 0; i < count; ++i) row_[i] = candidates_[i].logit;
    const int32_t chosen = few_->choose(row_.data(), rule, key);
    return chosen < 0 ? chosen : candidates_[size_t(chosen)].id;
}

RowSampler& RowSampler::of_thread(size_t thread) {
    if (thread == 0) return *this;
    if (!others_[thread]) others_[thread] = std::make_unique<RowSampler>(vocab_size_);
    return *others_[thread];
}

double RowSampler::log_normalizer(const float* logits) {
    if (!scan(logits) || max_ == -kInfinity) return std::numeric_limits<double>::quiet_NaN();
    scale_ = 1.0f;
    const double mass = static_cast<double>(weigh_all(logits, Cut{}));
    return max_ + log_of(mass / static_cast<double>(kWeightOfBest));
}

std::vector<Candidate> RowSampler::best(const float* logits, size_t n) {
    if (n == 0 || !scan(logits)) return {};
    n = std::min(n, vocab_size_);
    select(logits, n);
    std::sort(candidates_.begin(), candidates_.end(), is_better);
    return candidates_;
}

int32_t RowSampler::choose(const float* logits, const SamplingRule& rule, const NoiseKey& key) {
    if (!scan(logits)) return kNotANumber;
    if (max_ == -kInfinity) return kNothingLeft;
    if (rule.temperature < kGreedyBelow) return first_best(logits);
    scale_ = static_cast<float>(1.0 / rule.temperature);
    if (rule.top_k > 0 && rule.top_k < vocab_size_) {
        select(logits, rule.top_k);
        return choose_candidate(rule, key);
    }
    const Cut far = rule.min_p > kLightest ? min_p_cut(rule.min_p, rule.temperature) : Cut{};
    Cut cut = rule.top_p < 1.0 ? top_p_cut(logits, rule.top_p) : far;
    if (rule.top_p == 1.0 || is_better({far.logit, far.id}, {cut.logit, cut.id})) weigh_all(logits, cut = far);
    return draw(logits, cut, key);
}

int32_t RowSampler::first_best(const float* logits) const {
    const auto best = std::find(block_max_.begin(), block_max_.end(), max_);
    const size_t block = static_cast<size_t>(best - block_max_.begin()), last = block_length(block) - 1;
    const float* x = logits + block * kBlock;
    return static_cast<int32_t>(std::find(x, x + last, max_) - logits);  // the row may be written meanwhile
}

// Finds the maxima of the blocks and of the row; false if the row holds NaN or +infinity.
bool RowSampler::scan(const float* logits) {
    bool is_ordered = true;
    for_parts(logits, [&](const float* x, size_t block, size_t num_blocks) {
        is_ordered &= find_maxima(x, num_blocks, &block_max_[block]);
    });
    max_ = *std::max_element(block_max_.begin(), block_max_.end());
    return is_ordered && max_ != kInfinity;
}

size_t RowSampler::block_length(size_t block) const { return std::min(kBlock, vocab_size_ - block * kBlock); }

// The mass of the row under the cut; leaves those of the blocks in block_mass_.
uint64_t RowSampler::weigh_all(const float* logits, const Cut& cut) {
    if (cut.logit == -kInfinity) return weigh_row(logits, nullptr);
    for (size_t block = 0; block < block_max_.size(); ++block) weigh_block(logits, block, cut);
    return std::accumulate(block_mass_.begin(), block_mass_.end(), uint64_t{0});
}

// The same for the whole row; see weigh_blocks.
uint64_t RowSampler::weigh_row(const float* logits, float* relative) {
    for_parts(logits, [&](const float* x, size_t block, size_t num_blocks) {
        float* weights = relative == nullptr ? nullptr : relative + block * kBlock;
        weigh_blocks(x, num_blocks, &block_max_[block], max_, scale_, &block_mass_[block], weights);
    });
    return std::accumulate(block_mass_.begin(), block_mass_.end(), uint64_t{0});
}

// Into kept_ the logits of a block, -infinity where the cut drops them and past its end.
void RowSampler::keep(const float* logits, size_t block, const Cut& cut) {
    const size_t first = block * kBlock, length = block_length(block);
    const int32_t last_tied = cut.id - static_cast<int32_t>(first);
    keep_better(logits + first, length, cut.logit, last_tied, kept_.data());
    std::fill(kept_.begin() + length, kept_.end(), -kInfinity);
}

void RowSampler::weigh_block(const float* logits, size_t block, const Cut& cut) {
    block_mass_[block] = 0;
    if (block_max_[block] < cut.logit) return;
    keep(logits, block, cut);
    weigh_blocks(kept_.data(), 1, &block_max_[block], max_, scale_, &block_mass_[block], nullptr);
}

// What the n best tokens exceed, as the best ones of n blocks do.
float RowSampler::likely_bar(size_t n) {
    if (n > block_max_.size()) return -kInfinity;
    row_ = block_max_;
    std::nth_element(row_.begin(), row_.begin() + (n - 1), row_.end(), std::greater<float>());
    return std::nextafter(row_[n - 1], -kInfinity);
}

// Leaves the n best tokens above -infinity in candidates_, in no order; one pass, room for 2n.
void RowSampler::select(const float* logits, size_t n) {
    float bar = likely_bar(n);  // the n-th best so far: a later token must exceed it, since its id is higher
    candidates_.clear();
    const auto shrink = [&] {
        std::nth_element(candidates_.begin(), candidates_.begin() + (n - 1), candidates_.end(), is_better);
        candidates_.resize(n);
        bar = candidates_[n - 1].logit;
    };
    for (size_t block = 0; block < block_max_.size(); ++block) {
        if (block_max_[block] <= bar) continue;
        const size_t end = block * kBlock + block_length(block);
        for (size_t id = block * kBlock; id < end; ++id) {
            if (logits[id] > bar) candidates_.push_back({logits[id], static_cast<int32_t>(id)});
        }
        if (candidates_.size() >= 2 * n + kBlock) shrink();
    }
    if (candidates_.size() > n) shrink();
}

// Tokens below min_p times the probability of the best: max + temperature * ln(min_p), rounded to float32.
Cut RowSampler::min_p_cut(double min_p, double temperature) const {
    const double bar = max_ + log_of(min_p) * temperature;
    return {static_cast<float>(bar), std::numeric_limits<int32_t>::max()};
}

// A token under the cut, of which block_mass_ has the masses.
int32_t RowSampler::draw(const float* logits, const Cut& cut, const NoiseKey& key) {
    const uint64_t total = std::accumulate(block_mass_.begin(), block_mass_.end(), uint64_t{0});
    uint64_t target = multiply_high(noise_of(key), total);
    size_t block = 0;
    while (block + 1 < block_mass_.size() && target >= block_mass_[block]) target -= block_mass_[block++];
    keep(logits, block, cut);
    weigh_tokens(kept_.data(), 1, max_, scale_, weights_.data());
    size_t j = 0;
    while (j + 1 < kBlock && target >= weights_[j]) target -= weights_[j++];  // the row may be written meanwhile
    return static_cast<int32_t>(block * kBlock + j);
}

void RowSampler::edit(float* logits, const SamplingRule& rule, const History& history, bool ban_ends) {
    for (size_t i = 0; i < rule.bias_ids.size(); ++i) {
        const int32_t id = rule.bias_ids[i];
        set(logits, id, logits[id] + rule.bias_values[i]);
    }
    if (ban_ends) {
        for (const int32_t id : rule.end_ids) set(logits, id, -kInfinity);
    }
    if (rule.repetition_penalty != 1.0f || rule.presence_penalty != 0.0f || rule.frequency_penalty != 0.0f)
        penalize(logits, rule, history);
}

void RowSampler::penalize(float* logits, const SamplingRule& rule, const History& history) {
    for (size_t i = 0; i < history.num_tokens; ++i) {
        const int32_t id = history.tokens[i];
        if (static_cast<size_t>(id) >= vocab_size_) continue;  // written since it was checked
        uint32_t& count = counts_[id];
        if (count == 0) seen_.push_back(id);
        count |= kSeen;
        count += i >= history.num_prompt;
    }
    for (const int32_t id : seen_) {
        const uint32_t num_times = counts_[id] & ~kSeen;
        float x = logits[id];
        x = x < 0.0f ? x * rule.repetition_penalty : x / rule.repetition_penalty;
        if (num_times > 0) {
            x = x - rule.frequency_penalty * static_cast<float>(num_times);
            x = x - rule.presence_penalty;
        }
        set(logits, id, x);
        counts_[id] = 0;
    }
    seen_.clear();
}

void RowSampler::set(float* logits, int32_t id, float value) {
    edits_.push_back({logits[id], id});
    logits[id] = value;
}

void RowSampler::restore(float* logits) {
    for (; !edits_.empty(); edits_.pop_back()) logits[edits_.back().id] = edits_.back().logit;
}

}  // namespace bitnet
