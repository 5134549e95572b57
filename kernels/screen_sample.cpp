#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "screen_race.h"

namespace bitnet {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kFewAllowed = 4096;                         // by a mask: their rows are read sooner than the screen
constexpr int64_t kCostOfRow = 30;                           // of the head, for a race, in multiply-adds
constexpr size_t kManyAtOnce = 4000, kFewAtOnce = 64;        // rows of all inputs: 2 bits more are read sooner
constexpr float kCostOf6 = 6.0f / 16, kCostOf2 = 2.0f / 16;  // in parts of reading the head
constexpr float kCostOfOne = 1.25f;                          // of a row by itself, to one that is read among others
constexpr size_t kMostParts = 2, kManyParts = 16;            // of the head, as rows of all inputs, and of one
constexpr float kBetter = 0.5f, kWorse = 0.15f;              // what the last draws count in what late ones cost
constexpr int kTrial = 16;                                   // the screen is tried once in so many turns
constexpr float kOften = 0.6f;  // ends of 6 bits and then of 8 take longer than these alone

// Of all logits of so many inputs, in parts of reading the head.
float cost_of_head(int64_t count) { return count == 0 ? 0.0f : 1.0f + 0.1f * float(count - 1); }

size_t num_rows(const std::vector<RowNumbers>& rows) {
    return std::accumulate(rows.begin(), rows.end(), size_t{0},
                           [](size_t sum, const RowNumbers& of_input) { return sum + of_input.size(); });
}

// The inputs whose ends by 8 bits are read before any more rows: of races that cannot do without, and where one pass
// over the head costs less than so many rows, or is paid for anyway, of those that ask for many.
std::vector<int> to_refine(const std::vector<Race>& races, const std::vector<RowNumbers>& rows) {
    const bool is_paid = std::any_of(races.begin(), races.end(), [](const Race& race) { return race.wants_fine(); });
    const bool takes_many = is_paid || num_rows(rows) > kManyAtOnce;
    std::vector<int> indices;
    for (size_t i = 0; i < races.size(); i++)
        if (races[i].wants_fine() || (takes_many && !races[i].is_fine() && rows[i].size() > kFewAtOnce))
            indices.push_back(int(i));
    return indices;
}

size_t num_allowed(const Draw& draw) {
    const size_t num_tokens = draw.rule->vocab_size;
    size_t count = 0;
    for (size_t i = 0; i < num_tokens / 32; ++i) count += size_t(std::popcount(draw.mask[i]));
    for (size_t token = num_tokens / 32 * 32; token < num_tokens; ++token) count += draw.allows(token);
    return count;
}

}  // namespace

void Screen::sample(Executor& executor, const float* x, int64_t num_inputs, const Draw* draws, int32_t* tokens) const {
    in_groups(executor, num_inputs, [&](Desk& desk, int64_t begin, int count) {
        sample_group(executor, desk, x + begin * head_.columns, count, draws + begin, tokens + begin);
    });
}

void Screen::sample_group(Executor& executor, Desk& desk, const float* x, int count, const Draw* draws,
                          int32_t* tokens) const {
    if (auto logits = logits_of_allowed(executor, desk.seen, x, count, draws); !logits.empty()) {
        sample_some(executor, desk, x, count, draws, std::move(logits), Ends::final, tokens);
        return;
    }
    std::fill_n(tokens, count, kUndecided);
    if (!desk.draw_costs.pays(count)) return;
    // Of few inputs it is the weights that take the time, in 6 bits and then 2 as long as in 8.
    const bool is_rough = quantised_ && form_of(executor.kernels(), count, 1) == InputForm::rough;
    const bool wants_8 = is_rough && executor.kernels().whole_bytes && desk.draw_costs.wants_8();
    const Ends ends = wants_8 ? Ends::of8 : Ends::of6;
    auto logits = compute(executor, x, look(executor, desk, x, count, 1, wants_8 ? 8 : 6));
    float cost = wants_8 ? kCostOf6 + kCostOf2 : kCostOf6;
    cost += sample_some(executor, desk, x, count, draws, std::move(logits), ends, tokens);
    cost += cost_of_head(std::count(tokens, tokens + count, kUndecided));
    float& late = desk.draw_costs.late;
    late += (cost - late) * (cost < late ? kBetter : kWorse);
}

bool Screen::DrawCosts::pays(int count) { return ++turn % kTrial == 0 || late <= cost_of_head(count); }
bool Screen::DrawCosts::wants_8() const { return refined > kOften && turn % kTrial != 0; }

// Returns what was read behind the upper ends, in parts of the head.
float Screen::sample_some(Executor& executor, Desk& desk, const float* x, int count, const Draw* draws,
                          std::vector<Logits> logits, Ends ends, int32_t* tokens) const {
    std::vector<Race> races;
    const bool is_fine = ends != Ends::of6 || (ternary_ && form_of(executor.kernels(), count, 1) == InputForm::whole);
    for (int i = 0; i < count; i++) {
        float *upper = desk.seen.upper(i, 0), *most = &desk.seen.most(i, 0);
        std::fill(upper + head_.rows, upper + desk.seen.rows(), -kInfinity);
        std::fill(most + num_tiles(), most + desk.seen.rows() / kHeadRows, -kInfinity);
        races.emplace_back(draws[i], upper, ends == Ends::final ? nullptr : most, size_t(desk.seen.rows()), is_fine);
    }
    if (!desk.sampler && std::any_of(draws, draws + count, [](const Draw& draw) { return draw.edits(); }))
        desk.sampler = std::make_unique<RowSampler>(size_t(head_.rows));
    if (desk.sampler) desk.sampler->make_room(size_t(executor.num_threads()));
    std::vector<RowNumbers> rows(races.size());
    float cost = 0.0f, was_refined = 0.0f;
    for (bool goes_on = true; goes_on;) {
        executor.each(count, head_.rows * kCostOfRow, 1, [&](int64_t first, int64_t last, int thread) {
            RowSampler* sampler = desk.sampler ? &desk.sampler->of_thread(size_t(thread)) : nullptr;
            for (size_t i = size_t(first); i < size_t(last); i++) {
                for (const Logit& logit : logits[i]) races[i].add(logit.row, logit.value);
                rows[i] = races[i].go_on(sampler);
            }
        });
        const std::vector<int> coarse = to_refine(races, rows);
        if (!coarse.empty()) {
            refine(executor, desk.seen, x, count, coarse);
            cost += kCostOf2;
            was_refined = 1.0f;
        }
        for (const int i : coarse) {
            races[size_t(i)].refine();
            rows[size_t(i)].clear();
        }
        for (size_t i = 0, all = num_rows(rows); i < races.size() && all > size_t(head_.rows) / kMostParts; i++)
            if (rows[i].size() > size_t(head_.rows) / kManyParts) races[i].give_up(), rows[i].clear();
        const size_t computed = num_rows(rows);
        cost += kCostOfOne * float(computed) / float(head_.rows);
        goes_on = computed > 0 || !coarse.empty();
        logits = compute(executor, x, rows);
    }
    float& refined = desk.draw_costs.refined;
    if (ends == Ends::of6) refined += (was_refined - refined) * kBetter;
    for (size_t i = 0; i < races.size(); i++) tokens[i] = races[i].token();
    return cost;
}

// The logits of all tokens that the masks allow, where these are few for each input; upper ends say that nothing else
// is. Else nothing.
std::vector<Screen::Logits> Screen::logits_of_allowed(Executor& executor, Seen& seen, const float* x, int count,
                                                      const Draw* draws) const {
    std::vector<RowNumbers> rows;
    for (int i = 0; i < count; i++) {
        if (draws[i].mask == nullptr || num_allowed(draws[i]) > kFewAllowed) return {};
        rows.emplace_back();
        for (int32_t row = 0; row < head_.rows; row++)
            if (draws[i].allows(size_t(row))) rows.back().push_back(row);
    }
    seen.reserve(num_tiles(), count);
    for (int i = 0; i < count; i++) std::fill_n(seen.upper(i, 0), head_.rows, -kInfinity);
    return compute(executor, x, rows);
}

}  // namespace bitnet
