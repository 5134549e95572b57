#include "screen_race.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

#include "sampling_passes.h"

namespace bitnet {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kMostRows = 16384;  // the head is read sooner than so many rows
constexpr size_t kManyRows = 256, kFewRows = 64;
constexpr int kMostTries = 3;  // to tell by more rows whether top-p keeps the winner

}  // namespace

void Race::add(int32_t row, float logit) {
    if (const float above = upper_[row] - logit; above >= 0 && above < kInfinity) above_ += above, num_above_ += 1;
    upper_[row] = -kInfinity;
    const size_t block = size_t(row) / kBlock;
    if (is_begun_) find_maxima(upper_ + block * kBlock, 1, &maxima_[block]);
    if (draw_.allows(size_t(row))) known_.push_back({logit, row});
}

RowNumbers Race::go_on(RowSampler* sampler) {
    RowNumbers rows;
    while (!is_over_ && !wants_fine_ && rows.empty()) {
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

void Race::refine() {
    is_fine_ = true;
    wants_fine_ = has_rivals_ = false;
    above_ /= 4 * std::max(num_above_, 1.0f), num_above_ = 1;
    find_maxima(upper_, maxima_.size(), maxima_.data());
}

RowNumbers Race::end(int32_t token) {
    token_ = token;
    is_over_ = true;
    return {};
}

RowNumbers Race::want_fine() {
    if (is_fine_) return end(kUndecided);
    wants_fine_ = true;
    return {};
}

void Race::begin() {
    if (draw_.mask != nullptr) apply_mask(upper_, draw_.mask, draw_.rule->vocab_size, upper_);
    if (!find_block_maxima()) end(kUndecided);
    is_begun_ = true;
}

bool Race::find_block_maxima() {
    constexpr size_t kTiles = kBlock / kHeadRows;
    if (tile_maxima_ == nullptr || draw_.mask != nullptr) return find_maxima(upper_, maxima_.size(), maxima_.data());
    bool is_ordered = true;
    for (size_t block = 0; block < maxima_.size(); ++block) {
        maxima_[block] = *std::max_element(tile_maxima_ + block * kTiles, tile_maxima_ + (block + 1) * kTiles);
        if (maxima_[block] == kInfinity) is_ordered &= find_maxima(upper_ + block * kBlock, 1, &maxima_[block]);
    }
    return is_ordered;
}

RowNumbers Race::edit(RowSampler& sampler) {
    const RowNumbers ids = sampler.edited_ids(draw_);
    const auto is_edited = [&](const Candidate& token) { return std::binary_search(ids.begin(), ids.end(), token.id); };
    const auto edited = std::partition(known_.begin(), known_.end(), std::not_fn(is_edited));
    std::vector<Candidate> tokens(edited, known_.end());
    RowNumbers unknown;
    for (const int32_t id : ids)
        if (upper_[id] != -kInfinity) unknown.push_back(id);
    if (!unknown.empty()) return unknown;
    sampler.edit(tokens, draw_);
    std::copy(tokens.begin(), tokens.end(), edited);
    is_edited_ = true;
    return {};
}

RowNumbers Race::find_first() {
    for (const Candidate& token : known_)
        if (!(token.logit < kInfinity)) return end(kNotANumber);
    first_ = {-kInfinity, 0};
    for (const Candidate& token : known_)
        if (is_better(token, first_)) first_ = token;
    if (first_.logit == -kInfinity) {
        RowNumbers some = likeliest(kFewRows, -kInfinity);
        return some.empty() ? end(kNothingLeft) : some;
    }
    RowNumbers rows = from(first_.logit);
    if (rows.size() > kMostRows) return want_fine();
    if (!rows.empty()) return rows;
    if (draw_.rule->is_greedy()) return end(first_.id);
    has_first_ = true;
    measure_ = {first_.logit, draw_.rule->scale()};
    noise_ = noise_of(draw_.key);
    begin_race(measure_.min_p_cut(*draw_.rule));
    return {};
}

void Race::begin_race(const Cut& cut) {
    cut_ = cut;
    winner_ = first_;
    best_ = -std::numeric_limits<double>::infinity();
    num_scored_ = 0;
    has_rivals_ = false;
}

RowNumbers Race::try_winner() {
    for (; num_scored_ < known_.size(); ++num_scored_) {
        const Candidate& token = known_[num_scored_];
        if (!cut_.keeps(token)) continue;
        const double score = score_of(noise_, size_t(token.id), measure_.distance(token.logit));
        if (score > best_ || (score == best_ && is_better(token, winner_))) winner_ = token, best_ = score;
    }
    if (!has_rivals_) {
        RowNumbers rows = rivals(best_);
        has_rivals_ = rows.size() <= kManyRows;
        for (double least = best_ + 1.0; rows.size() > kManyRows; least += 1.0) {
            RowNumbers fewer = rivals(least);  // with the best of many known there are fewer
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

RowNumbers Race::find_few() {
    const size_t count = draw_.rule->top_k;
    if (known_.size() < count) {
        RowNumbers more = likeliest(2 * count, -kInfinity);
        if (!more.empty()) return more;
    } else {
        std::nth_element(known_.begin(), known_.begin() + long(count - 1), known_.end(), is_better);
        RowNumbers rows = from(known_[count - 1].logit);
        if (rows.size() > kMostRows) return want_fine();
        if (!rows.empty()) return rows;
        known_.resize(count);
    }
    return end(sample_few(known_, draw_));
}

RowNumbers Race::from(float least) const {
    RowNumbers rows;
    for (size_t block = 0; block < maxima_.size(); ++block) {
        if (maxima_[block] < least || maxima_[block] == -kInfinity) continue;
        for (size_t row = block * kBlock; row < (block + 1) * kBlock; ++row)
            if (upper_[row] >= least && upper_[row] > -kInfinity) rows.push_back(int32_t(row));
    }
    return rows;
}

RowNumbers Race::rivals(double score) const {
    RowNumbers rows;
    const RaceOf race{noise_, measure_.best, measure_.scale};
    const auto find_in = [&](size_t block, const First& first) {
        if (maxima_[block] < cut_.logit) return;
        const float* x = upper_ + block * kBlock;
        uint64_t bits = contenders(race, x, block, first, score);
        for (; bits != 0; bits &= bits - 1) {
            const size_t j = size_t(std::countr_zero(bits));
            if (x[j] >= cut_.logit) rows.push_back(int32_t(block * kBlock + j));
        }
    };
    each_leading_block(race, maxima_.data(), 0, maxima_.size(), score, find_in);
    return rows;
}

RowNumbers Race::check_top_p() {
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
    if (!is_fine_ || num_tries_++ == kMostTries) return want_fine();
    RowNumbers rows = deciding(double(better), double(known));
    if (rows.empty()) return end(kUndecided);
    num_scored_ += rows.size();  // they are no rivals
    return rows;
}

RowNumbers Race::deciding(double better, double known) const {
    constexpr int kBinsOfOne = 8, kBins = int(kWeightless) * kBinsOfOne;  // of distances below the best logit
    constexpr int kMoreBins = 3;                                          // so that one try suffices
    const auto bin_of = [&](float logit) { return int(measure_.distance(logit) * kBinsOfOne); };
    uint32_t counts[kBins] = {};
    for (size_t block = 0; block < maxima_.size(); ++block) {
        if (measure_.distance(maxima_[block]) >= kWeightless) continue;
        for (size_t row = block * kBlock; row < (block + 1) * kBlock; ++row)
            if (measure_.distance(upper_[row]) < kWeightless) counts[std::max(bin_of(upper_[row]), 0)] += 1;
    }
    double masses[kBins];
    const int winner = bin_of(winner_.logit);
    double rest = 0, rest_better = 0;  // the most that they may weigh
    for (int bin = 0; bin < kBins; ++bin) {
        masses[bin] = double(weight_of(exp_of_minus((float(bin) + 0.5f) / kBinsOfOne))) * counts[bin];
        rest += masses[bin];
        if (bin <= winner) rest_better += masses[bin];
    }
    // A little more of it: what is known had the highest ends, many of them for being far above.
    const double share = 1.08 * exp_of_minus(above_ / std::max(num_above_, 1.0f) * measure_.scale);
    const size_t most_rows = maxima_.size() * kBlock / 2;  // the head is read sooner
    size_t num_rows = 0;
    for (int bin = 0; bin < kBins && num_rows <= most_rows; ++bin) {
        num_rows += counts[bin];
        rest -= masses[bin];
        known += share * masses[bin];
        if (bin <= winner) {
            rest_better -= masses[bin];
            better += share * masses[bin];
        }
        const double top_p = draw_.rule->top_p;
        if (better > top_p * (known + rest) || better + rest_better <= top_p * (known + rest_better))
            return from(measure_.best - float(bin + kMoreBins) / kBinsOfOne / measure_.scale);
    }
    return {};
}

uint64_t Race::most_mass(float least) const {
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

RowNumbers Race::likeliest(size_t count, float least) const {
    constexpr size_t kStride = 16;
    std::vector<float> some;
    for (size_t block = 0; block < maxima_.size(); block += kStride)
        some.insert(some.end(), upper_ + block * kBlock, upper_ + (block + 1) * kBlock);
    const auto place = some.begin() + long(std::min(count / kStride, some.size() - 1));
    std::nth_element(some.begin(), place, some.end(), std::greater<float>());
    RowNumbers rows = from(std::max(*place, least));
    if (rows.empty()) rows = from(least);
    if (rows.size() > 2 * count) rows.resize(2 * count);
    return rows;
}

}  // namespace bitnet
