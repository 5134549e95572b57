// Tokens are sorted by the experts that they go through, whose rows then stand side by side: every step of an expert's
// own program runs on its rows as it would on a batch of so many tokens. All experts take a step together, so that
// threads share the units of all, and a token meets no other one: what it yields does not depend on who is beside it.
#include "mixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "sampling_math.h"

namespace bitnet {

namespace {

constexpr int64_t kMaxUsed = 256, kManyTokens = 1 << 16;

// Where things stand in a mixture's room, in floats a token. A pair is a token with one of its experts.
struct Room {
    int64_t used, steps, arena_floats;  // of a pair, of any expert
    int64_t places, shares, tokens, active, first, units, inputs, outputs, arenas, end;
    explicit Room(const Mixture& m) : used(m.used), steps(int64_t(m.experts[0]->steps().size())), arena_floats(0) {
        for (const Program* expert : m.experts) arena_floats = std::max(arena_floats, expert->arena_floats());
        arena_floats = whole_lines(arena_floats);
        int64_t next = 0;
        const auto take = [&](int64_t floats) { return std::exchange(next, next + whole_lines(floats)); };
        places = take(used), shares = take(used), tokens = take(used);
        active = take(used + 1), first = take(used + 1), units = take(steps * (used + 1));
        inputs = take(used * m.x.width), outputs = take(used * m.out.width), arenas = take(used * arena_floats);
        end = next;
    }
};

struct Plan {
    Mixture mixture;
    Room room;
    int64_t offset;
    Plan(Mixture m, int64_t o) : mixture(std::move(m)), room(mixture), offset(o) {}
    int64_t used() const { return mixture.used; }
    int64_t pairs(const Context& c) const { return c.num_tokens * used(); }
    float* floats(const Context& c, int64_t part) const { return c.arena + (offset + part) * c.num_tokens; }
    int32_t* ints(const Context& c, int64_t part) const { return reinterpret_cast<int32_t*>(floats(c, part)); }
    // Of each pair, in the order of tokens, best first: the expert, and once they are sorted where it stands.
    int32_t* places(const Context& c) const { return ints(c, room.places); }
    float* shares(const Context& c) const { return floats(c, room.shares); }
    int32_t* tokens(const Context& c) const { return ints(c, room.tokens); }  // of pairs as they are sorted
    // How many experts have tokens, and which; the first pair of each, and the end.
    int32_t* active(const Context& c) const { return ints(c, room.active); }
    int32_t* first(const Context& c) const { return ints(c, room.first); }
    // The first unit of each of those in a step, and the end.
    int32_t* units(const Context& c, int64_t step) const { return ints(c, room.units) + step * (pairs(c) + 1); }
    float* input(const Context& c, int64_t pair) const { return floats(c, room.inputs) + pair * mixture.x.width; }
    float* output(const Context& c, int64_t pair) const { return floats(c, room.outputs) + pair * mixture.out.width; }
    const Program& program(const Context& c, int64_t index) const {
        return *mixture.experts[size_t(active(c)[1 + index])];
    }
    // The rows of one of the active experts, on one thread. What a matrix product reads behind its codes, and does not
    // use, is of the next one, or of the slack behind the arena.
    Context rows(const Context& c, int64_t index, int thread) const {
        const int64_t begin = first(c)[index], count = first(c)[index + 1] - begin;
        return {c.kernels,
                count,
                tile_tokens(c.kernels, program(c, index), count),
                floats(c, room.arenas) + begin * room.arena_floats,
                input(c, begin),
                output(c, begin),
                c.batch,
                c.sequences,
                c.scratch.subspan(size_t(thread), 1),
                1,
                nullptr,
                nullptr};
    }
};

using SharedPlan = std::shared_ptr<const Plan>;

struct ChooseStep final : Step {
    SharedPlan plan;
    explicit ChooseStep(SharedPlan p) : plan(std::move(p)) {}
    void work(const Context& c, int64_t first, int64_t last, int) const override {
        for (int64_t t = first; t < last; t++) {
            const float* scores = c.at(plan->mixture.scores, t);
            int32_t* best = plan->places(c) + t * plan->used();
            choose(scores, best);
            share(scores, best, plan->shares(c) + t * plan->used());
        }
    }
    // The best, of equal ones the first. What is no number stays where it is, and makes shares that are none.
    void choose(const float* scores, int32_t* best) const {
        const int64_t used = plan->used(), count = plan->mixture.scores.width;
        for (int64_t e = 0, found = 0; e < count; e++) {
            if (found == used && !(scores[e] > scores[best[used - 1]])) continue;
            int64_t at = found < used ? found++ : used - 1;
            for (; at > 0 && scores[e] > scores[best[at - 1]]; at--) best[at] = best[at - 1];
            best[at] = int32_t(e);
        }
    }
    void share(const float* scores, const int32_t* best, float* shares) const {
        const int64_t used = plan->used(), count = plan->mixture.scores.width;
        const float top = scores[best[0]];
        const auto weight = [&](float score) {
            return std::isfinite(top - score) && top >= score ? exp_of_minus(top - score) : NAN;
        };
        for (int64_t i = 0; i < used; i++) shares[i] = weight(scores[best[i]]);
        float total = 0;
        if (plan->mixture.renormalized)
            for (int64_t i = 0; i < used; i++) total += shares[i];
        else
            for (int64_t e = 0; e < count; e++) total += weight(scores[e]);
        for (int64_t i = 0; i < used; i++) shares[i] = shares[i] / total;
    }
};

struct SortStep final : Step {
    SharedPlan plan;
    explicit SortStep(SharedPlan p) : plan(std::move(p)) {}
    int64_t units(const Context&) const override { return 1; }
    int64_t scratch_floats(int64_t) const override { return int64_t(plan->mixture.experts.size()); }
    void work(const Context& c, int64_t, int64_t, int thread) const override {
        auto* counts = reinterpret_cast<int32_t*>(c.scratch_of(thread));
        const int64_t experts = int64_t(plan->mixture.experts.size()), pairs = plan->pairs(c);
        int32_t *places = plan->places(c), *active = plan->active(c), *first = plan->first(c), end = 0;
        std::fill(counts, counts + experts, 0);
        for (int64_t pair = 0; pair < pairs; pair++) counts[places[pair]]++;
        active[0] = 0;
        for (int64_t e = 0; e < experts; e++) {
            const int32_t count = std::exchange(counts[e], end);  // from here on where its next pair goes
            if (!count) continue;
            first[active[0]] = end;
            active[++active[0]] = int32_t(e);
            end += count;
        }
        first[active[0]] = end;
        for (int64_t pair = 0; pair < pairs; pair++) {
            places[pair] = counts[places[pair]]++;
            plan->tokens(c)[places[pair]] = int32_t(pair / plan->used());
        }
        for (int64_t step = 0; step < plan->room.steps; step++) count_units(c, step, thread);
    }
    void count_units(const Context& c, int64_t step, int thread) const {
        int32_t *units = plan->units(c, step), end = 0;
        for (int64_t i = 0; i < plan->active(c)[0]; i++) {
            units[i] = end;
            end += int32_t(plan->program(c, i).steps()[size_t(step)]->units(plan->rows(c, i, thread)));
        }
        units[plan->active(c)[0]] = end;
    }
};

// What experts read: a token's row for each of those that it goes through.
struct GatherStep final : Step {
    SharedPlan plan;
    explicit GatherStep(SharedPlan p) : plan(std::move(p)) {}
    int64_t units(const Context& c) const override { return plan->pairs(c); }
    int64_t chunk(const Context&) const override { return plan->used(); }
    void work(const Context& c, int64_t first, int64_t last, int) const override {
        const Rows& x = plan->mixture.x;
        for (int64_t pair = first; pair < last; pair++)
            std::memcpy(plan->input(c, pair), c.at(x, plan->tokens(c)[pair]), size_t(x.width) * sizeof(float));
    }
};

// A step of all experts that have tokens.
struct ExpertStep final : Step {
    SharedPlan plan;
    int64_t step;
    std::vector<const Step*> sizes;  // one of all that need as much room: this is asked for at every run
    ExpertStep(SharedPlan p, int64_t s) : plan(std::move(p)), step(s) {
        const auto alike = [](const Step* one, const Step* other) {
            return one->scratch_floats(1) == other->scratch_floats(1) &&
                   one->scratch_floats(kManyTokens) == other->scratch_floats(kManyTokens);
        };
        for (const Program* expert : plan->mixture.experts) {
            const Step* own = expert->steps()[size_t(step)].get();
            if (std::none_of(sizes.begin(), sizes.end(), [&](const Step* each) { return alike(each, own); }))
                sizes.push_back(own);
        }
    }
    const Step& of(const Context& c, int64_t index) const { return *plan->program(c, index).steps()[size_t(step)]; }
    int64_t units(const Context& c) const override { return plan->units(c, step)[plan->active(c)[0]]; }
    int64_t chunk(const Context& c) const override { return of(c, 0).chunk(plan->rows(c, 0, 0)); }
    int64_t scratch_floats(int64_t num_tokens) const override {
        int64_t most = 0;
        for (const Step* each : sizes) most = std::max(most, each->scratch_floats(num_tokens));
        return most;
    }
    void work(const Context& c, int64_t first, int64_t last, int thread) const override {
        const int32_t* units = plan->units(c, step);
        const int64_t count = plan->active(c)[0];
        for (int64_t i = std::upper_bound(units, units + count, first) - units - 1; first < last; i++) {
            const int64_t end = std::min<int64_t>(last, units[i + 1]);
            if (first < end) of(c, i).work(plan->rows(c, i, thread), first - units[i], end - units[i], 0);
            first = std::max(first, end);
        }
    }
};

struct MixStep final : Step {
    SharedPlan plan;
    explicit MixStep(SharedPlan p) : plan(std::move(p)) {}
    void work(const Context& c, int64_t first, int64_t last, int) const override {
        const int64_t width = plan->mixture.out.width;
        for (int64_t t = first; t < last; t++) {
            float* out = c.at(plan->mixture.out, t);
            std::fill(out, out + width, 0.0f);
            for (int64_t pair = t * plan->used(); pair < (t + 1) * plan->used(); pair++) {
                const float *y = plan->output(c, plan->places(c)[pair]), share = plan->shares(c)[pair];
                for (int64_t i = 0; i < width; i++) out[i] += share * y[i];
            }
        }
    }
};

}  // namespace

int64_t mixture_floats(const Mixture& mixture) { return Room(mixture).end; }

std::vector<std::unique_ptr<Step>> mixture_steps(Mixture mixture, int64_t offset) {
    const auto plan = std::make_shared<const Plan>(std::move(mixture), offset);
    std::vector<std::unique_ptr<Step>> steps;
    steps.push_back(std::make_unique<ChooseStep>(plan));
    steps.push_back(std::make_unique<SortStep>(plan));
    steps.push_back(std::make_unique<GatherStep>(plan));
    for (int64_t step = 0; step < plan->room.steps; step++) steps.push_back(std::make_unique<ExpertStep>(plan, step));
    steps.push_back(std::make_unique<MixStep>(plan));
    return steps;
}

void Program::mix(const Mixture& mixture) {
    const auto& experts = mixture.experts;
    require(!experts.empty() && int64_t(experts.size()) <= kMaxWidth, "a mixture has 1 to 2^30 experts");
    require(mixture.used >= 1 && mixture.used <= std::min(kMaxUsed, int64_t(experts.size())),
            "a token goes through 1 to 256 experts, of those that there are");
    check(mixture.x, mixture.x.width);
    check(mixture.scores, int64_t(experts.size()));
    check_written(mixture.out, mixture.out.width);
    int64_t cost = 0;
    for (const Program* expert : experts) {
        require(!expert->needs_batch_ && !expert->is_mixture_, "experts are matrices and what is between them");
        require(expert->input_width_ == mixture.x.width && expert->output_width_ == mixture.out.width,
                "an expert reads and writes rows of other widths");
        require(!expert->steps_.empty() && expert->steps_.size() == experts[0]->steps_.size(),
                "experts have different numbers of steps");
        cost = std::max(cost, expert->cost_);
        max_padded_ = std::max(max_padded_, expert->max_padded_);
    }
    cost_ += mixture.used * cost;
    is_mixture_ = true;
    const int64_t offset = whole_lines(arena_floats_), floats = offset - arena_floats_ + mixture_floats(mixture);
    require(floats <= kMaxArena, "the room of a mixture's experts is impossible");
    own_floats_ = std::max(own_floats_, floats);
    for (auto& step : mixture_steps(mixture, offset)) push(std::move(step));
}

}  // namespace bitnet
