// Where top-p cuts: a few thousand tokens around the cut are looked at one by one, and all others only added up.
#include <algorithm>
#include <bit>
#include <numeric>

#include "sampling.h"
#include "sampling_passes.h"

namespace bitnet {
namespace {

constexpr size_t kNumBuckets = 2048;
constexpr float kBucketsPerUnit = 64.0f;  // 2048 / 64 = 32 > kWeightless
constexpr size_t kStride = 16;            // one block in so many is a sample of the row
constexpr double kDeviations = 4.0;       // how wrong the sample may be
constexpr int kHalvings = 10;             // until a few dozen tokens of a short row are left
constexpr Span kEverywhere{0.0f, kWeightless};

size_t bucket_of(float place) {  // also for what is not a number: the row may be written meanwhile
    constexpr float kLast = kNumBuckets - 1;
    return place > 0.0f ? static_cast<size_t>(place < kLast ? place : kLast) : 0;
}

}  // namespace

// Cuts at the first token, from the best down, with which the mass exceeds its share. Leaves the mass of each block
// under the cut in block_mass_.
Cut RowSampler::top_p_cut(const float* logits, double top_p) {
    relative_.resize(block_max_.size() * kBlock);
    const uint64_t total = weigh_row(logits, relative_.data());
    const uint64_t allowed = static_cast<uint64_t>(top_p * static_cast<double>(total));
    if (allowed >= total) return Cut{};
    const bool is_short = vocab_size_ / kBlock < 4 * kStride;
    const Span near = is_short ? halved_span(logits, allowed) : likely_span(logits, double(total - allowed));
    for (const Span& span : {near, kEverywhere}) {
        if (const std::optional<Cut> cut = cut_in(span, logits, allowed)) return *cut;
    }
    weigh_all(logits, Cut{});  // the row was written meanwhile
    return Cut{};
}

// Where the cut lies in a row that is quickly added up: half of where it may be, again and again.
Span RowSampler::halved_span(const float* logits, uint64_t allowed) {
    Span span = kEverywhere;
    for (int i = 0; i < kHalvings; ++i) {
        const float middle = (span.first + span.last) / 2;
        (split({middle, middle}, logits) > allowed ? span.last : span.first) = middle;
    }
    return span;
}

// Where the cut lies if the tokens of some blocks tell how the mass `behind` it is spread over distances. Adds up from
// the far end, where no single token counts for much: the sum of a sample of equal weights w that stands for a mass m
// has the variance kStride * w * m, and of lesser weights less.
Span RowSampler::likely_span(const float* logits, double behind) {
    const size_t num_whole = vocab_size_ / kBlock;
    buckets_.assign(kNumBuckets, 0);
    for (size_t block = 0; block < num_whole; block += kStride) {
        if (block_mass_[block] == 0) continue;
        for (size_t id = block * kBlock; id < (block + 1) * kBlock; ++id)
            buckets_[bucket_of((max_ - logits[id]) * scale_ * kBucketsPerUnit)] += weight_of(relative_[id]);
    }
    Span span{0.0f, 0.0f};
    double mass = 0.0, heaviest = kWeightOfBest * 1.2664165549094176e-14;  // exp(-2048 / 64)
    for (size_t bucket = kNumBuckets; bucket-- > 0;) {
        mass += static_cast<double>(buckets_[bucket] * kStride);
        heaviest *= 1.0157477085866857;  // exp(1 / 64)
        const double variance = kStride * heaviest * (mass + kStride * heaviest);
        const bool is_sure = (behind - mass) * (behind - mass) > kDeviations * kDeviations * variance;
        if (span.last == 0.0f && (!is_sure || mass > behind))
            span.last = static_cast<float>(bucket + 1) / kBucketsPerUnit;
        if (is_sure && mass > behind) {
            span.first = static_cast<float>(bucket) / kBucketsPerUnit;
            break;
        }
    }
    span.last = std::clamp(span.last, 1.0f / kBucketsPerUnit, kWeightless);
    return span;
}

// The mass before the span; leaves that of the blocks in block_mass_, and which tokens are inside.
uint64_t RowSampler::split(const Span& span, const float* logits) {
    inside_.resize(block_mass_.size());
    for_parts(logits, [&](const float* x, size_t block, size_t num_blocks) {
        split_blocks(x, num_blocks, &block_max_[block], max_, scale_, span, &relative_[block * kBlock],
                     &block_mass_[block], &inside_[block]);
    });
    return std::accumulate(block_mass_.begin(), block_mass_.end(), uint64_t{0});
}

// The cut, if it is in this span.
std::optional<Cut> RowSampler::cut_in(const Span& span, const float* logits, uint64_t allowed) {
    const uint64_t mass = split(span, logits);
    if (mass > allowed) return std::nullopt;
    gather(logits);
    const std::optional<Cut> cut = first_beyond(allowed - mass, span);
    if (cut) {
        for (size_t i = 0; i < near_.size(); ++i) {
            const auto [logit, id] = near_[i];
            if (logit > cut->logit || (logit == cut->logit && id <= cut->id))
                block_mass_[size_t(id) / kBlock] += near_weights_[i];
        }
    }
    return cut;
}

// The tokens inside the span, and their weights.
void RowSampler::gather(const float* logits) {
    near_.clear();
    near_weights_.clear();
    for (size_t block = 0; block < inside_.size(); ++block) {
        for (uint64_t bits = inside_[block]; bits != 0; bits &= bits - 1) {
            const size_t id = block * kBlock + static_cast<size_t>(std::countr_zero(bits));
            near_.push_back({logits[id], static_cast<int32_t>(id)});
            near_weights_.push_back(weight_of(relative_[id]));
        }
    }
}

// The first token inside the span, from the best down, with which their mass exceeds this one. They are thrown into
// buckets by distance, so that only those of one bucket need to be put in order.
std::optional<Cut> RowSampler::first_beyond(uint64_t mass, const Span& span) {
    const float per_unit = kNumBuckets / (span.last - span.first);
    const auto bucket_at = [&](float logit) { return bucket_of(((max_ - logit) * scale_ - span.first) * per_unit); };
    buckets_.assign(kNumBuckets, 0);
    for (size_t i = 0; i < near_.size(); ++i) buckets_[bucket_at(near_[i].logit)] += near_weights_[i];
    size_t bucket = 0;
    while (bucket < kNumBuckets && buckets_[bucket] <= mass) mass -= buckets_[bucket++];
    candidates_.clear();
    for (const Candidate& token : near_) {
        if (bucket_at(token.logit) == bucket) candidates_.push_back(token);
    }
    std::sort(candidates_.begin(), candidates_.end(), is_better);
    for (const Candidate& token : candidates_) {
        const uint64_t weight = weight_of(exp_of_minus((max_ - token.logit) * scale_));
        if (weight > mass) return Cut{token.logit, token.id};
        mass -= weight;
    }
    return std::nullopt;
}

}  // namespace bitnet
