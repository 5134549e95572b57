#include "sampling.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <numeric>

namespace bitnet {
namespace {

constexpr size_t kBlock = 64;
constexpr size_t kLanes = 16;
constexpr size_t kNumBuckets = 2048;
constexpr float kLastBucket = kNumBuckets - 1;
constexpr float kBucketsPerUnit = 64.0f;  // 2048 / 64 = 32 > 28.4: what lies further off weighs nothing
constexpr double kGreedyBelow = 1e-5;
constexpr double kLightest = 0.5 / kWeightOfBest;  // relative to the best: what is below weighs nothing
constexpr float kWeightless = 29.0f;               // exp(-29) * kWeightOfBest < 0.5
constexpr uint32_t kSeen = uint32_t{1} << 31;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// More lanes where the processor has them, chosen when the library is loaded; nothing rounds differently.
#if defined(__x86_64__) && defined(__GLIBC__)
#define BITNET_WIDER __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define BITNET_WIDER
#endif

bool is_better(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

float greater(float a, float b) { return a > b ? a : b; }

// The maximum of a full block, in lanes that compilers turn into vectors; unordered[lane] becomes 1 where there is a
// NaN.
BITNET_WIDER float max_of_block(const float* x, int32_t* unordered) {
    float lanes[kLanes];
    for (size_t j = 0; j < kLanes; ++j) lanes[j] = x[j];
    for (size_t i = kLanes; i < kBlock; i += kLanes) {
        for (size_t j = 0; j < kLanes; ++j) lanes[j] = greater(x[i + j], lanes[j]);
    }
    for (size_t i = 0; i < kBlock; i += kLanes) {
        for (size_t j = 0; j < kLanes; ++j) unordered[j] |= x[i + j] != x[i + j];
    }
    for (size_t j = 0; j < 8; ++j) lanes[j] = greater(lanes[j + 8], lanes[j]);
    for (size_t j = 0; j < 4; ++j) lanes[j] = greater(lanes[j + 4], lanes[j]);
    return greater(greater(lanes[0], lanes[1]), greater(lanes[2], lanes[3]));
}

// The logits of a block, -infinity where the cut drops them and past its end.
BITNET_WIDER void keep(const float* x, size_t first_id, size_t length, const Cut& cut, float* kept) {
    const int32_t first = static_cast<int32_t>(first_id);
    for (size_t j = 0; j < length; ++j) {
        const bool is_above = x[j] > cut.logit;
        const bool is_tied = (x[j] == cut.logit) & (first + static_cast<int32_t>(j) <= cut.id);
        kept[j] = (is_above | is_tied) ? x[j] : -kInfinity;
    }
    for (size_t j = length; j < kBlock; ++j) kept[j] = -kInfinity;
}

// The weights of a block, and their sum.
BITNET_WIDER uint64_t weigh_block(const float* kept, float max, float scale, uint64_t* weights) {
    float relative[kBlock];
    for (size_t j = 0; j < kBlock; ++j) relative[j] = exp_of_minus((max - kept[j]) * scale);
    for (size_t j = 0; j < kBlock; ++j) weights[j] = weight_of(relative[j]);
    uint64_t mass = 0;
    for (size_t j = 0; j < kBlock; ++j) mass += weights[j];
    return mass;
}

// Into which bucket each token of a block falls, by how far it is from the best.
BITNET_WIDER void buckets_of_block(const float* kept, float max, float scale, int32_t* buckets) {
    for (size_t j = 0; j < kBlock; ++j) {
        const float distance = (max - kept[j]) * scale * kBucketsPerUnit;
        buckets[j] = static_cast<int32_t>(distance < kLastBucket ? distance : kLastBucket);
    }
}

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
    : vocab_size_(vocab_size),
      block_max_((vocab_size + kBlock - 1) / kBlock),
      block_mass_(block_max_.size()),
      kept_(kBlock),
      weights_(kBlock),
      buckets_(kNumBuckets),
      counts_(vocab_size) {}

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
    if (!few_ || few_->vocab_size_ != count) few_ = std::make_unique<RowSampler>(count);
    order_.resize(count);
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return ids[a] < ids[b]; });
    row_.resize(count);
    for (size_t i = 0; i < count; ++i) row_[i] = logits[order_[i]];
    const int32_t chosen = few_->choose(row_.data(), rule, key);
    return chosen < 0 ? chosen : ids[order_[size_t(chosen)]];
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
    if (rule.temperature < kGreedyBelow)
        return static_cast<int32_t>(std::find(logits, logits + vocab_size_, max_) - logits);
    scale_ = static_cast<float>(1.0 / rule.temperature);
    Cut cut;
    if (rule.top_k > 0 && rule.top_k < vocab_size_) cut = top_k_cut(logits, rule.top_k);
    if (rule.top_p < 1.0) cut = top_p_cut(logits, cut, rule.top_p);
    if (rule.min_p > kLightest) {
        const Cut other = min_p_cut(rule.min_p, rule.temperature);
        if (is_better({other.logit, other.id}, {cut.logit, cut.id})) cut = other;
    }
    return draw(logits, cut, key);
}

// Finds the maxima of the blocks and of the row; false if the row holds NaN or +infinity.
bool RowSampler::scan(const float* logits) {
    int32_t unordered[kLanes] = {};
    max_ = -kInfinity;
    for (size_t block = 0; block < block_max_.size(); ++block) {
        const float* x = logits + block * kBlock;
        float padded[kBlock];
        if (block_length(block) < kBlock) {
            std::fill(std::copy(x, x + block_length(block), padded), padded + kBlock, -kInfinity);
            x = padded;
        }
        block_max_[block] = max_of_block(x, unordered);
        max_ = std::max(max_, block_max_[block]);
    }
    return std::count(unordered, unordered + kLanes, 0) == kLanes && max_ != kInfinity;
}

size_t RowSampler::block_length(size_t block) const { return std::min(kBlock, vocab_size_ - block * kBlock); }

// The mass of a block under the cut; leaves its logits in kept_ and its weights in weights_.
uint64_t RowSampler::weigh(const float* logits, size_t block, const Cut& cut) {
    keep(logits + block * kBlock, block * kBlock, block_length(block), cut, kept_.data());
    return weigh_block(kept_.data(), max_, scale_, weights_.data());
}

// Whether a block has anything under the cut that weighs something.
bool RowSampler::weighs(size_t block, const Cut& cut) const {
    return block_max_[block] >= cut.logit && (max_ - block_max_[block]) * scale_ < kWeightless;
}

// The mass of the row under the cut; leaves those of the blocks in block_mass_.
uint64_t RowSampler::weigh_all(const float* logits, const Cut& cut) {
    uint64_t total = 0;
    for (size_t block = 0; block < block_max_.size(); ++block) {
        block_mass_[block] = weighs(block, cut) ? weigh(logits, block, cut) : 0;
        total += block_mass_[block];
    }
    return total;
}

// Leaves the n best tokens above -infinity in candidates_, in no order; one pass, room for 2n.
void RowSampler::select(const float* logits, size_t n) {
    float bar = -kInfinity;  // the n-th best so far: a later token must exceed it, since its id is higher
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

Cut RowSampler::top_k_cut(const float* logits, size_t k) {
    select(logits, k);
    const Candidate last = *std::max_element(candidates_.begin(), candidates_.end(), is_better);
    return {last.logit, last.id};
}

// Cuts at the first token, from the best down, with which the mass exceeds its share of what `cut` keeps. Tokens are
// thrown into buckets by their logit, so that only those of one bucket need to be put in order.
Cut RowSampler::top_p_cut(const float* logits, const Cut& cut, double top_p) {
    // The best weighs 1, so tokens lighter than (1 - top_p) / vocab_size can not be kept, even if all were that light.
    const double floor = max_ + (log_of((1.0 - top_p) / static_cast<double>(vocab_size_)) - 0.01) / scale_;
    std::fill(buckets_.begin(), buckets_.end(), 0);
    uint64_t total = 0;
    for (size_t block = 0; block < block_max_.size(); ++block) {
        if (!weighs(block, cut)) continue;
        total += weigh(logits, block, cut);
        if (block_max_[block] < floor) continue;
        int32_t buckets[kBlock];
        buckets_of_block(kept_.data(), max_, scale_, buckets);
        for (size_t j = 0; j < kBlock; ++j) buckets_[size_t(buckets[j])] += weights_[j];
    }
    const uint64_t allowed = static_cast<uint64_t>(top_p * static_cast<double>(total));
    uint64_t mass = 0;
    for (size_t bucket = 0; bucket < kNumBuckets; ++bucket) {
        if (mass + buckets_[bucket] > allowed) return cut_in_bucket(logits, cut, bucket, mass, allowed);
        mass += buckets_[bucket];
    }
    return cut;
}

size_t RowSampler::bucket_of(float logit) const {
    const float distance = (max_ - logit) * scale_ * kBucketsPerUnit;
    return static_cast<size_t>(distance < kLastBucket ? distance : kLastBucket);
}

Cut RowSampler::cut_in_bucket(const float* logits, const Cut& cut, size_t bucket, uint64_t mass_before,
                              uint64_t allowed) {
    candidates_.clear();
    for (size_t block = 0; block < block_max_.size(); ++block) {
        if (block_max_[block] < cut.logit || bucket_of(block_max_[block]) > bucket) continue;
        keep(logits + block * kBlock, block * kBlock, block_length(block), cut, kept_.data());
        int32_t buckets[kBlock];
        buckets_of_block(kept_.data(), max_, scale_, buckets);
        for (size_t j = 0; j < kBlock; ++j) {
            if (size_t(buckets[j]) == bucket && kept_[j] != -kInfinity)
                candidates_.push_back({kept_[j], static_cast<int32_t>(block * kBlock + j)});
        }
    }
    std::sort(candidates_.begin(), candidates_.end(), is_better);
    for (const Candidate& candidate : candidates_) {
        mass_before += weight_of(exp_of_minus((max_ - candidate.logit) * scale_));
        if (mass_before > allowed) return {candidate.logit, candidate.id};
    }
    assert(false && "the bucket that holds the cut was summed wrongly");
    return cut;
}

// Tokens below min_p times the probability of the best: max + temperature * ln(min_p), rounded to float32.
Cut RowSampler::min_p_cut(double min_p, double temperature) const {
    const double bar = max_ + log_of(min_p) * temperature;
    return {static_cast<float>(bar), std::numeric_limits<int32_t>::max()};
}

int32_t RowSampler::draw(const float* logits, const Cut& cut, const NoiseKey& key) {
    uint64_t target = multiply_high(noise_of(key), weigh_all(logits, cut));
    size_t block = 0;
    while (block + 1 < block_mass_.size() && target >= block_mass_[block]) target -= block_mass_[block++];
    weigh(logits, block, cut);
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
        uint32_t& count = counts_[history.tokens[i]];
        if (count == 0) seen_.push_back(history.tokens[i]);
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
