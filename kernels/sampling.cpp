#include "sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>

namespace bitnet {
namespace {

constexpr double kLightest = 0.5 / kWeightOfBest;  // relative to the best: what is below weighs nothing
constexpr uint32_t kSeen = uint32_t{1} << 31;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

RowSampler::RowSampler(size_t vocab_size)
    : vocab_size_(vocab_size),
      block_max_((vocab_size + kBlock - 1) / kBlock),
      block_mass_(block_max_.size()),
      kept_(kBlock),
      counts_(vocab_size) {}

std::unique_lock<std::mutex> RowSampler::lock() { return mutex_.lock(); }

int32_t RowSampler::sample(float* logits, const Draw& draw) {
    if (draw.mask != nullptr) {
        masked_.resize(vocab_size_);
        apply_mask(logits, draw.mask, vocab_size_, masked_.data());
        logits = masked_.data();
    }
    edit(logits, draw);
    const int32_t token = choose(logits, draw);
    restore(logits);
    return token;
}

std::vector<int32_t> RowSampler::edited_ids(const Draw& draw) {
    masked_.resize(vocab_size_);
    edit(masked_.data(), draw);
    std::vector<int32_t> ids;
    for (const Candidate& edit : edits_) ids.push_back(edit.id);
    edits_.clear();
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
}

void RowSampler::edit(std::vector<Candidate>& tokens, const Draw& draw) {
    masked_.resize(vocab_size_);
    for (const Candidate& token : tokens) masked_[size_t(token.id)] = token.logit;
    edit(masked_.data(), draw);
    for (Candidate& token : tokens) token.logit = masked_[size_t(token.id)];
    edits_.clear();
}

Cut Measure::min_p_cut(const SamplingRule& rule) const {
    if (rule.min_p <= kLightest) return Cut{};
    const double bar = best + log_of(rule.min_p) * rule.temperature;
    return {static_cast<float>(bar), std::numeric_limits<int32_t>::max()};
}

int32_t sample_few(std::vector<Candidate>& tokens, const Draw& draw) {
    const SamplingRule& rule = *draw.rule;
    for (const Candidate& token : tokens)
        if (std::isnan(token.logit) || token.logit == kInfinity) return kNotANumber;
    std::sort(tokens.begin(), tokens.end(), is_better);
    if (tokens.empty() || tokens[0].logit == -kInfinity) return kNothingLeft;
    if (rule.is_greedy()) return tokens[0].id;
    const Measure measure{tokens[0].logit, rule.scale()};
    const Cut cut = measure.min_p_cut(rule);
    uint64_t total = 0, before = 0;
    for (const Candidate& token : tokens) total += measure.weight(token.logit);
    const uint64_t allowed = allowed_by(rule, total), noise = noise_of(draw.key);
    Candidate winner{};
    double best = -std::numeric_limits<double>::infinity();
    for (const Candidate& token : tokens) {
        if (!cut.keeps(token) || before > allowed) break;
        before += measure.weight(token.logit);
        const double score = score_of(noise, size_t(token.id), measure.distance(token.logit));
        if (score > best) winner = token, best = score;
    }
    return winner.id;
}

RowSampler& RowSampler::of_thread(size_t thread) {
    if (thread == 0) return *this;
    if (!others_[thread]) others_[thread] = std::make_unique<RowSampler>(vocab_size_);
    return *others_[thread];
}

double RowSampler::log_normalizer(const float* logits) {
    if (!scan(logits) || measure_.best == -kInfinity) return std::numeric_limits<double>::quiet_NaN();
    measure_.scale = 1.0f;
    return measure_.best + log_of(static_cast<double>(weigh_row(logits)) / static_cast<double>(kWeightOfBest));
}

std::vector<Candidate> RowSampler::best(const float* logits, size_t n) {
    if (n == 0 || !scan(logits)) return {};
    n = std::min(n, vocab_size_);
    select(logits, n);
    std::sort(candidates_.begin(), candidates_.end(), is_better);
    return candidates_;
}

int32_t RowSampler::choose(const float* logits, const Draw& draw) {
    const SamplingRule& rule = *draw.rule;
    if (!scan(logits)) return kNotANumber;
    if (measure_.best == -kInfinity) return kNothingLeft;
    const int32_t first = first_best(logits);
    if (rule.is_greedy()) return first;
    measure_.scale = rule.scale();
    if (rule.top_k > 0 && rule.top_k < vocab_size_) {
        select(logits, rule.top_k);
        return sample_few(candidates_, draw);
    }
    const uint64_t noise = noise_of(draw.key);
    Candidate winner = race(logits, noise, first, measure_.min_p_cut(rule));
    if (rule.top_p == 1.0 || winner.id == first) return winner.id;
    const uint64_t allowed = allowed_by(rule, weigh_row(logits));
    while (winner.id != first && weigh_better(logits, winner) > allowed)
        winner = race(logits, noise, first, {winner.logit, winner.id - 1});
    return winner.id;
}

// The winner among the tokens that the cut keeps, of which the best is `first_id`.
Candidate RowSampler::race(const float* logits, uint64_t noise, int32_t first_id, const Cut& cut) const {
    Candidate winner{measure_.best, first_id};
    double best = score_of(noise, size_t(winner.id), 0.0f);
    const RaceOf race{noise, measure_.best, measure_.scale};
    for_parts(logits, [&](const float* x, size_t first, size_t num_blocks) {
        const auto race_in = [&](size_t block, const First& first_of_block) {
            if (block_max_[block] < cut.logit) return;
            const float* of_block = x + (block - first) * kBlock;
            uint64_t bits = contenders(race, of_block, block, first_of_block, best);
            for (; bits != 0; bits &= bits - 1) {
                const size_t j = size_t(std::countr_zero(bits));
                const Candidate token{of_block[j], static_cast<int32_t>(block * kBlock + j)};
                if (!cut.keeps(token)) continue;
                const double score = score_of(noise, size_t(token.id), measure_.distance(token.logit));
                if (score > best || (score == best && is_better(token, winner))) winner = token, best = score;
            }
        };
        each_leading_block(race, block_max_.data(), first, first + num_blocks, best, race_in);
    });
    return winner;
}

int32_t RowSampler::first_best(const float* logits) const {
    const auto best = std::find(block_max_.begin(), block_max_.end(), measure_.best);
    const size_t block = static_cast<size_t>(best - block_max_.begin()), last = block_length(block) - 1;
    const float* x = logits + block * kBlock;
    return static_cast<int32_t>(std::find(x, x + last, measure_.best) - logits);  // the row may be written meanwhile
}

// Finds the maxima of the blocks and of the row; false if the row holds NaN or +infinity.
bool RowSampler::scan(const float* logits) {
    bool is_ordered = true;
    for_parts(logits, [&](const float* x, size_t block, size_t num_blocks) {
        is_ordered &= find_maxima(x, num_blocks, &block_max_[block]);
    });
    measure_.best = *std::max_element(block_max_.begin(), block_max_.end());
    return is_ordered && measure_.best != kInfinity;
}

size_t RowSampler::block_length(size_t block) const { return std::min(kBlock, vocab_size_ - block * kBlock); }

// The mass of the row.
uint64_t RowSampler::weigh_row(const float* logits) {
    for_parts(logits, [&](const float* x, size_t block, size_t num_blocks) {
        const float* maxima = &block_max_[block];
        weigh_blocks(x, num_blocks, maxima, measure_.best, measure_.scale, &block_mass_[block]);
    });
    return std::accumulate(block_mass_.begin(), block_mass_.end(), uint64_t{0});
}

// The mass of the tokens that are better than this one.
uint64_t RowSampler::weigh_better(const float* logits, const Candidate& than) {
    uint64_t mass = 0;
    for (size_t block = 0; block < block_max_.size(); ++block) {
        if (block_max_[block] < than.logit) continue;
        const int32_t first = static_cast<int32_t>(block * kBlock);
        keep_better(logits + first, block_length(block), than.logit, than.id - 1 - first, kept_.data());
        std::fill(kept_.begin() + long(block_length(block)), kept_.end(), -kInfinity);
        uint64_t of_block;
        weigh_blocks(kept_.data(), 1, &block_max_[block], measure_.best, measure_.scale, &of_block);
        mass += of_block;
    }
    return mass;
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

void RowSampler::edit(float* logits, const Draw& draw) {
    const SamplingRule& rule = *draw.rule;
    for (size_t i = 0; i < rule.bias_ids.size(); ++i) {
        const int32_t id = rule.bias_ids[i];
        set(logits, id, logits[id] + rule.bias_values[i]);
    }
    if (draw.ban_ends) {
        for (const int32_t id : rule.end_ids) set(logits, id, -kInfinity);
    }
    if (rule.penalizes()) penalize(logits, rule, draw.history);
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
