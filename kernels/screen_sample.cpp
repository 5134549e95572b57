#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <numeric>

#include "sampling.h"
#include "screen.h"

namespace bitnet {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kMoreRows[] = {1024, 8192};  // what is computed where masses do not decide, one after another
constexpr size_t kMostRows = 16384;           // the head is read sooner than so many rows
constexpr size_t kManyRows = 256, kFewRows = 64;
constexpr size_t kFewAllowed = 4096;             // by a mask: their rows are read sooner than the screen
constexpr int64_t kCostOfRow = 30;               // of the head, for a race, in multiply-adds
constexpr float kBetter = 0.5f, kWorse = 0.15f;  // what the last draws count in what late ones cost
constexpr int kTrial = 16;                       // each way is tried once in so many turns

// Of all logits of so many inputs, in parts of reading the head.
float cost_of_head(int64_t count) { return count == 0 ? 0.0f : 1.0f + 0.1f * float(count - 1); }

using Rows = std::vector<int32_t>;

// A draw from one input, of which some logits are known and of the others upper ends.
class Race {
  public:
    // `upper` has `num_rows` ends, whole blocks of them, and is written.
    Race(const Draw& draw, float* upper, size_t num_rows) : draw_(draw), upper_(upper), maxima_(num_rows / kBlock) {}

    void add(int32_t row, float logit) {
        upper_[row] = -kInfinity;
        const size_t block = size_t(row) / kBlock;
        if (is_begun_) find_maxima(upper_ + block * kBlock, 1, &maxima_[block]);
        if (draw_.allows(size_t(row))) known_.push_back({logit, row});
    }
    // The rows whose logits are to be added before it can go on, in ascending order; none at its end. `sampler` may be
    // null where the draw edits no logits.
    Rows go_on(RowSampler* sampler) {
        Rows rows;
        while (!is_over_ && rows.empty()) {
            if (!is_begun_) {
                begin();
            } else if (draw_.edits() && !is_edited_) {
                rows = edit(*sampler);
            } else if (!has_first_) {
                rows = find_first();
            } else {
                rows = is_few_ ? find_few() : try_winner();
            }
        }
        return rows;
    }
    int32_t token() const { return token_; }

  private:
    Rows end(int32_t token) {
        token_ = token;
        is_over_ = true;
        return {};
    }

    void begin() {
        if (draw_.mask != nullptr) apply_mask(upper_, draw_.mask, draw_.rule->vocab_size, upper_);
        find_maxima(upper_, maxima_.size(), maxima_.data());
        is_begun_ = true;
    }

    // Edits all logits that are to be edited, when they are known.
    Rows edit(RowSampler& sampler) {
        const Rows ids = sampler.edited_ids(draw_);
        const auto is_edited = [&](const Candidate& token) {
            return std::binary_search(ids.begin(), ids.end(), token.id);
        };
        const auto edited = std::partition(known_.begin(), known_.end(), std::not_fn(is_edited));
        std::vector<Candidate> tokens(edited, known_.end());
        Rows unknown;
        for (const int32_t id : ids)
            if (upper_[id] != -kInfinity) unknown.push_back(id);
        if (!unknown.empty()) return unknown;
        sampler.edit(tokens, draw_);
        std::copy(tokens.begin(), tokens.end(), edited);
        is_edited_ = true;
        return {};
    }

    // Ends with the best token if that is what is asked for, or begins a race.
    Rows find_first() {
        for (const Candidate& token : known_)
            if (!(token.logit < kInfinity)) return end(kNotANumber);
        first_ = {-kInfinity, 0};
        for (const Candidate& token : known_)
            if (is_better(token, first_)) first_ = token;
        if (first_.logit == -kInfinity) {
            Rows some = likeliest(kFewRows, -kInfinity);
            return some.empty() ? end(kNothingLeft) : some;
        }
        Rows rows = from(first_.logit);
        if (rows.size() > kMostRows) return end(kUndecided);
        if (!rows.empty()) return rows;
        if (draw_.rule->is_greedy()) return end(first_.id);
        has_first_ = true;
        measure_ = {first_.logit, draw_.rule->scale()};
        noise_ = noise_of(draw_.key);
        begin_race(measure_.min_p_cut(*draw_.rule));
        return {};
    }

    void begin_race(const Cut& cut) {
        cut_ = cut;
        winner_ = first_;
        best_ = -std::numeric_limits<double>::infinity();
        num_scored_ = 0;
        has_rivals_ = false;
    }

    // Ends with the winner, or bars it and what is worse, or tells which rows might be before it, or would tell more.
    Rows try_winner() {
        for (; num_scored_ < known_.size(); ++num_scored_) {
            const Candidate& token = known_[num_scored_];
            if (!cut_.keeps(token)) continue;
            const double score = score_of(noise_, size_t(token.id), measure_.distance(token.logit));
            if (score > best_ || (score == best_ && is_better(token, winner_))) winner_ = token, best_ = score;
        }
        if (!has_rivals_) {
            Rows rows = rivals(best_);
            has_rivals_ = rows.size() <= kManyRows;
            for (double least = best_ + 1.0; rows.size() > kManyRows; least += 1.0) {
                Rows fewer = rivals(least);  // with the best of many known there are fewer
                if (fewer.empty()) break;
                rows = std::move(fewer);
            }
            if (!rows.empty()) return rows;
        }
        const SamplingRule& rule = *draw_.rule;
        if (winner_.id == first_.id) return end(winner_.id);  // which no filter drops
        if (rule.top_k > 0 && rule.top_k < rule.vocab_size) {
            is_few_ = true;
            return likeliest(2 * rule.top_k, measure_.best - kWeightless / measure_.scale);
        }
        return rule.top_p == 1.0 ? end(winner_.id) : check_top_p();
    }

    // Of the best few, which are all that top-k leaves, when they are known.
    Rows find_few() {
        const size_t count = draw_.rule->top_k;
        if (known_.size() < count) {
            Rows more = likeliest(2 * count, -kInfinity);
            if (!more.empty()) return more;
        } else {
            std::nth_element(known_.begin(), known_.begin() + long(count - 1), known_.end(), is_better);
            Rows rows = from(known_[count - 1].logit);
            if (rows.size() > kMostRows) return end(kUndecided);
            if (!rows.empty()) return rows;
            known_.resize(count);
        }
        return end(sample_few(known_, draw_));
    }

    // The rows that may have this logit, or a better one.
    Rows from(float least) const {
        Rows rows;
        for (size_t block = 0; block < maxima_.size(); ++block) {
            if (maxima_[block] < least || maxima_[block] == -kInfinity) continue;
            for (size_t row = block * kBlock; row < (block + 1) * kBlock; ++row)
                if (upper_[row] >= least && upper_[row] > -kInfinity) rows.push_back(int32_t(row));
        }
        return rows;
    }

    // The rows that may do as well as this.
    Rows rivals(double score) const {
        Rows rows;
        for (size_t block = 0; block < maxima_.size(); ++block) {
            if (maxima_[block] < cut_.logit || measure_.distance(maxima_[block]) > kMostNoise - score) continue;
            const float* x = upper_ + block * kBlock;
            uint64_t bits = contenders(x, block, noise_, measure_.best, measure_.scale, score);
            for (; bits != 0; bits &= bits - 1) {
                const size_t j = size_t(std::countr_zero(bits));
                if (x[j] >= cut_.logit) rows.push_back(int32_t(block * kBlock + j));
            }
        }
        return rows;
    }

    // With b and z as the known masses of better tokens and of all, and at most B and Z of the others: top-p keeps the
    // winner if b + B <= p (z + B), since p <= 1, and does not if b > p (z + Z).
    Rows check_top_p() {
        constexpr uint64_t kRounding = 1 << 16;  // of sums as doubles, beside weights of 2^40
        uint64_t better = 0, known = 0;
        for (const Candidate& token : known_) {
            const uint64_t weight = measure_.weight(token.logit);
            known += weight;
            if (is_better(token, winner_)) better += weight;
        }
        const uint64_t most_better = most_mass(winner_.logit);
        if (better + most_better + kRounding <= allowed_by(*draw_.rule, known + most_better)) return end(winner_.id);
        if (better > allowed_by(*draw_.rule, known + most_mass(-kInfinity)) + kRounding) {
            begin_race({winner_.logit, winner_.id - 1});
            return {};
        }
        if (num_more_ == std::size(kMoreRows)) return end(kUndecided);
        Rows rows = likeliest(kMoreRows[num_more_++], measure_.best - kWeightless / measure_.scale);
        if (rows.empty()) return end(kUndecided);
        num_scored_ += rows.size();  // they are no rivals
        return rows;
    }

    // The most that the rows weigh which are not known and may have this logit.
    uint64_t most_mass(float least) const {
        uint64_t mass = 0;
        float kept[kBlock];
        for (size_t block = 0; block < maxima_.size(); ++block) {
            if (maxima_[block] < least || measure_.distance(maxima_[block]) >= kWeightless) continue;
            keep_better(upper_ + block * kBlock, kBlock, least, kBlock, kept);
            uint64_t of_block;
            weigh_blocks(kept, 1, &maxima_[block], measure_.best, measure_.scale, &of_block);
            mass += of_block;
        }
        return mass + mass / 65536 + maxima_.size() * kBlock;  // weights are off by 2e-6, and rounded
    }

    // About so many, those with the largest upper ends, of those that may have this logit. One block in 16 tells from
    // where on.
    Rows likeliest(size_t count, float least) const {
        constexpr size_t kStride = 16;
        std::vector<float> some;
        for (size_t block = 0; block < maxima_.size(); block += kStride)
            some.insert(some.end(), upper_ + block * kBlock, upper_ + (block + 1) * kBlock);
        const auto place = some.begin() + long(std::min(count / kStride, some.size() - 1));
        std::nth_element(some.begin(), place, some.end(), std::greater<float>());
        Rows rows = from(std::max(*place, least));
        if (rows.empty()) rows = from(least);
        if (rows.size() > 2 * count) rows.resize(2 * count);
        return rows;
    }

    Draw draw_;
    float* upper_;
    std::vector<float> maxima_;
    std::vector<Candidate> known_;
    Candidate first_{};
    Measure measure_;
    Cut cut_;
    uint64_t noise_ = 0;
    Candidate winner_{};
    double best_ = 0.0;  // its score
    size_t num_scored_ = 0, num_more_ = 0;
    bool is_begun_ = false, is_edited_ = false, has_first_ = false, has_rivals_ = false, is_few_ = false,
         is_over_ = false;
    int32_t token_ = kUndecided;
};

size_t num_allowed(const Draw& draw) {
    const size_t num_tokens = draw.rule->vocab_size;
    size_t count = 0;
    for (size_t i = 0; i < num_tokens / 32; ++i) count += size_t(std::popcount(draw.mask[i]));
    for (size_t token = num_tokens / 32 * 32; token < num_tokens; ++token) count += draw.allows(token);
    return count;
}

}  // namespace

void Screen::sample(Executor& executor, const float* x, int64_t num_inputs, const Draw* draws, int32_t* tokens) const {
    const std::lock_guard<std::mutex> lock(seen_.mutex);
    for (int64_t begin = 0; begin < num_inputs; begin += kInputsInMatrix) {
        const int count = int(std::min<int64_t>(kInputsInMatrix, num_inputs - begin));
        int32_t *first = tokens + begin, *last = first + count;
        const float* some = x + begin * head_.columns;
        if (auto logits = logits_of_allowed(executor, some, count, draws + begin); !logits.empty()) {
            sample_some(executor, some, count, draws + begin, std::move(logits), first);
            continue;
        }
        const int bits = bits_of_draws(count);
        std::fill(first, last, kUndecided);
        if (bits == 0) continue;
        auto logits = top_of_some(executor, some, count, 1, bits);
        const int64_t rows = sample_some(executor, some, count, draws + begin, std::move(logits), first);
        const float screened = float(bits) / 16 + float(rows) / float(head_.rows);
        const float cost = screened + cost_of_head(std::count(first, last, kUndecided));
        float& late = bits == 6 ? draw_costs_.by6 : draw_costs_.by8;
        late += (cost - late) * (cost < late ? kBetter : kWorse);
    }
}

// What costs the least of late: 6 bits, 8, or none, which leaves the draws undecided. Others are tried at times.
int Screen::bits_of_draws(int count) const {
    const auto& [by6, by8, turn] = draw_costs_;
    if (++draw_costs_.turn % kTrial == 0) return 6;
    if (turn % kTrial == kTrial / 2) return 8;
    return std::min(by6, by8) > cost_of_head(count) ? 0 : by6 <= by8 ? 6 : 8;
}

// Returns how many rows were computed.
int64_t Screen::sample_some(Executor& executor, const float* x, int count, const Draw* draws,
                            std::vector<Logits> logits, int32_t* tokens) const {
    std::vector<Race> races;
    for (int i = 0; i < count; i++) {
        float* upper = seen_.upper(i, 0);
        std::fill(upper + head_.rows, upper + seen_.rows(), -kInfinity);
        races.emplace_back(draws[i], upper, size_t(seen_.rows()));
    }
    if (!sampler_ && std::any_of(draws, draws + count, [](const Draw& draw) { return draw.edits(); }))
        sampler_ = std::make_unique<RowSampler>(size_t(head_.rows));
    if (sampler_) sampler_->make_room(size_t(executor.num_threads()));
    std::vector<Rows> rows(races.size());
    int64_t computed = 0;
    do {
        for (const Logits& of_input : logits) computed += int64_t(of_input.size());
        executor.each(count, head_.rows * kCostOfRow, 1, [&](int64_t first, int64_t last, int thread) {
            RowSampler* sampler = sampler_ ? &sampler_->of_thread(size_t(thread)) : nullptr;
            for (size_t i = size_t(first); i < size_t(last); i++) {
                for (const Logit& logit : logits[i]) races[i].add(logit.row, logit.value);
                rows[i] = races[i].go_on(sampler);
            }
        });
        logits = compute(executor, x, rows);
    } while (std::any_of(rows.begin(), rows.end(), [](const Rows& of_input) { return !of_input.empty(); }));
    for (size_t i = 0; i < races.size(); i++) tokens[i] = races[i].token();
    return computed;
}

// The logits of all tokens that the masks allow, where these are few for each input; upper ends say that nothing else
// is. Else nothing.
std::vector<Screen::Logits> Screen::logits_of_allowed(Executor& executor, const float* x, int count,
                                                      const Draw* draws) const {
    std::vector<Rows> rows;
    for (int i = 0; i < count; i++) {
        if (draws[i].mask == nullptr || num_allowed(draws[i]) > kFewAllowed) return {};
        rows.emplace_back();
        for (int32_t row = 0; row < head_.rows; row++)
            if (draws[i].allows(size_t(row))) rows.back().push_back(row);
    }
    seen_.reserve(quantised_.num_tiles(), count);
    for (int i = 0; i < count; i++) std::fill_n(seen_.upper(i, 0), head_.rows, -kInfinity);
    return compute(executor, x, rows);
}

}  // namespace bitnet
