// Python's view of the sampler, in bitnet_inference._native. Signatures (native.py re-exports them):
//
//   class SamplingRule:
//       def __init__(self, vocab_size: int, *, temperature: float, top_k: int, top_p: float, min_p: float,
//                    repetition_penalty: float, presence_penalty: float, frequency_penalty: float,
//                    bias_ids: list[int], bias_values: list[float], end_ids: list[int]) -> None
//   class RowSampler:                      # scratch memory for one vocabulary: a second thread waits
//       def __init__(self, vocab_size: int) -> None
//       def sample(self, logits: NDArray[float32], rule: SamplingRule, tokens: NDArray[int32], num_prompt: int,
//                  ban_ends: bool, seed: int, choice: int, position: int,
//                  mask: NDArray[uint32] | None = None) -> int
//       def sample_rows(self, threads: Executor, logits: NDArray[float32],
//                       draws: list[tuple[int, SamplingRule, NDArray[int32], int, bool, int, int, int]]) -> list[int]
//       def sample_few(self, ids: NDArray[int32], logits: NDArray[float32], rule: SamplingRule,
//                      seed: int, choice: int, position: int) -> int
//       def score(self, logits: NDArray[float32], token_id: int, num_best: int)
//               -> tuple[float, list[tuple[int, float]]]
//       def log_probabilities(self, logits: NDArray[float32], token_ids: NDArray[int32]) -> list[float]
//   def sampling_noise(seed: int, choice: int, position: int) -> int
//
// Shapes: logits [vocab_size] for sample and score, [len(ids)] for sample_few, [len(token_ids), vocab_size] for
// log_probabilities; row-major. mask [(vocab_size + 31) // 32]: token 32 * i + j is bit j of word i, and those whose
// bit is not set are out, whatever their logit. `sample` wants its logits writable and leaves them as they were; it
// returns -1 for a row with NaN or +infinity and -2 for one where every token is banned. What does not fit raises
// ValueError. The GIL is released. `sample_rows` is `sample` for several rows of [num_rows, vocab_size] on several
// threads: a draw is its row, the rows ascending, and what `sample` wants from `rule` to `position`.
#include "bind_sampling.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_arrays.h"
#include "executor.h"
#include "float_mode.h"
#include "sampling.h"

namespace nb = nanobind;

namespace bitnet {

void require_ids(const int32_t* ids, size_t count, size_t vocab_size) {
    const bool fit = std::all_of(ids, ids + count, [=](int32_t id) { return id >= 0 && size_t(id) < vocab_size; });
    require(fit, "a token id is outside the vocabulary");
}

const SamplingRule& rule_in(nb::handle object) {
    require(!object.is_none(), "None stands where a rule should");
    return as<SamplingRule>(object);
}

Draw checked_draw(size_t vocab_size, const SamplingRule& rule, const Array1i& tokens, size_t num_prompt, bool ban_ends,
                  const NoiseKey& key, const std::optional<Mask>& mask) {
    require_there(tokens);
    require(rule.vocab_size == vocab_size, "the rule was made for another vocabulary");
    require(num_prompt <= tokens.shape(0), "num_prompt exceeds the number of tokens");
    require(!mask || mask->shape(0) == (vocab_size + 31) / 32,
            "mask must have one bit for each token of the vocabulary");
    if (mask) require_aligned(*mask);
    require_ids(tokens.data(), tokens.shape(0), vocab_size);
    return {&rule, key, {tokens.data(), tokens.shape(0), num_prompt}, ban_ends, mask ? mask->data() : nullptr};
}

namespace {

// In multiply-adds, see Executor::each.
constexpr int64_t kCostOfRow = 1'000'000, kCostOfLogit = 150;
constexpr size_t kQuick = 4096;  // from so many logits a token is chosen in some ten microseconds

// Gives the interpreter's lock to other threads, unless the work is over at once: they would give it back much later.
class WithoutGil {
  public:
    explicit WithoutGil(size_t num_logits) {
        if (num_logits > kQuick) release_.emplace();
    }

  private:
    std::optional<ReleasedGil> release_;
};

using Ids = Array1i;
using EditableRow = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using EditableRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// The row, its rule, tokens, num_prompt, ban_ends, seed, choice, position. Rules are kept: who has the list may empty
// it.
using RowDraw = std::tuple<size_t, nb::object, Ids, size_t, bool, uint64_t, uint64_t, uint64_t>;
using Scored = std::pair<int32_t, double>;

void require_vocab(size_t vocab_size) {
    require(vocab_size >= 1 && vocab_size < (size_t{1} << 24),
            "vocab_size must be from 1 to 2^24 - 1");  // sums of 2^40
}

void check_rule(const SamplingRule& rule) {
    require_vocab(rule.vocab_size);
    require(rule.temperature >= 0.0 && rule.temperature <= 1e6, "temperature must be from 0 to 1e6");
    require(rule.top_p >= 0.0 && rule.top_p <= 1.0, "top_p must be from 0 to 1");
    require(rule.min_p >= 0.0 && rule.min_p <= 1.0, "min_p must be from 0 to 1");
    require(rule.repetition_penalty > 0.0f && std::isfinite(rule.repetition_penalty),
            "repetition_penalty must be positive and finite");
    require(std::isfinite(rule.presence_penalty) && std::isfinite(rule.frequency_penalty), "penalties must be finite");
    require(rule.bias_ids.size() == rule.bias_values.size(), "bias_ids and bias_values must be of one length");
    require_ids(rule.bias_ids.data(), rule.bias_ids.size(), rule.vocab_size);
    require_ids(rule.end_ids.data(), rule.end_ids.size(), rule.vocab_size);
}

void init_rule(SamplingRule* self, size_t vocab_size, double temperature, size_t top_k, double top_p, double min_p,
               float repetition_penalty, float presence_penalty, float frequency_penalty, std::vector<int32_t> bias_ids,
               std::vector<float> bias_values, std::vector<int32_t> end_ids) {
    SamplingRule rule{vocab_size,
                      temperature,
                      top_k,
                      top_p,
                      min_p,
                      repetition_penalty,
                      presence_penalty,
                      frequency_penalty,
                      std::move(bias_ids),
                      std::move(bias_values),
                      std::move(end_ids)};
    check_rule(rule);
    new (self) SamplingRule(std::move(rule));
}

void init_sampler(RowSampler* self, size_t vocab_size) {
    require_vocab(vocab_size);
    new (self) RowSampler(vocab_size);
}

int32_t sample(RowSampler& self, const EditableRow& logits, const SamplingRule& rule, const Ids& tokens,
               size_t num_prompt, bool ban_ends, uint64_t seed, uint64_t choice, uint64_t position,
               const std::optional<Mask>& mask) {
    require(logits.shape(0) == self.vocab_size(), "logits must have one entry for each token of the vocabulary");
    require_aligned(logits);
    const NoiseKey key{seed, choice, position};
    const Draw draw = checked_draw(self.vocab_size(), rule, tokens, num_prompt, ban_ends, key, mask);
    const WithoutGil without_gil(logits.shape(0));
    const auto lock = self.lock();
    const FloatMode mode;
    return self.sample(logits.data(), draw);
}

std::vector<int32_t> sample_rows(RowSampler& self, Executor& threads, const EditableRows& logits,
                                 const std::vector<RowDraw>& row_draws) {
    require(logits.shape(1) == self.vocab_size(), "logits must have one column for each token of the vocabulary");
    require_aligned(logits);
    std::vector<Draw> draws;
    size_t next = 0;
    for (const auto& [row, rule, tokens, num_prompt, ban_ends, seed, choice, position] : row_draws) {
        require(row >= next && row < logits.shape(0), "the rows of the draws must ascend, and be rows of the logits");
        next = row + 1;
        const NoiseKey key{seed, choice, position};
        draws.push_back(checked_draw(self.vocab_size(), rule_in(rule), tokens, num_prompt, ban_ends, key));
    }
    const ReleasedGil without_gil;
    const auto lock = self.lock();
    const FloatMode mode;
    self.make_room(size_t(threads.num_threads()));
    std::vector<int32_t> chosen(draws.size());
    const int64_t cost = kCostOfRow + int64_t(self.vocab_size()) * kCostOfLogit;
    threads.each(int64_t(draws.size()), cost, 1, [&](int64_t first, int64_t last, int thread) {
        RowSampler& sampler = self.of_thread(size_t(thread));
        for (int64_t i = first; i < last; ++i) {
            float* x = logits.data() + std::get<0>(row_draws[size_t(i)]) * self.vocab_size();
            chosen[size_t(i)] = sampler.sample(x, draws[size_t(i)]);
        }
    });
    return chosen;
}

int32_t sample_best(RowSampler& self, const Ids& ids, const Row& logits, const SamplingRule& rule, uint64_t seed,
                    uint64_t choice, uint64_t position) {
    require(ids.shape(0) == logits.shape(0), "there must be one logit for each token id");
    require(rule.vocab_size == self.vocab_size(), "the rule was made for another vocabulary");
    require_aligned(ids);
    require_aligned(logits);
    require_ids(ids.data(), ids.shape(0), self.vocab_size());
    const WithoutGil without_gil(ids.shape(0));
    const FloatMode mode;
    std::vector<Candidate> tokens;
    for (size_t i = 0; i < ids.shape(0); ++i) tokens.push_back({logits.data()[i], ids.data()[i]});
    return sample_few(tokens, {&rule, {seed, choice, position}});
}

std::tuple<double, std::vector<Scored>> score(RowSampler& self, const Row& logits, int32_t token_id, size_t num_best) {
    require(logits.shape(0) == self.vocab_size(), "logits must have one entry for each token of the vocabulary");
    require_ids(&token_id, 1, self.vocab_size());
    require_aligned(logits);
    ReleasedGil without_gil;
    const auto lock = self.lock();
    const FloatMode mode;
    const double normalizer = self.log_normalizer(logits.data());
    std::vector<Scored> best;
    for (const Candidate& candidate : self.best(logits.data(), num_best))
        best.emplace_back(candidate.id, candidate.logit - normalizer);
    return {logits.data()[token_id] - normalizer, std::move(best)};
}

std::vector<double> log_probabilities(RowSampler& self, const Rows& logits, const Ids& token_ids) {
    require(logits.shape(1) == self.vocab_size(), "logits must have one column for each token of the vocabulary");
    require(logits.shape(0) == token_ids.shape(0), "logits must have one row for each token id");
    require_aligned(logits);
    require_aligned(token_ids);
    ReleasedGil without_gil;
    const auto lock = self.lock();
    const FloatMode mode;
    std::vector<double> result;
    for (size_t row = 0; row < token_ids.shape(0); ++row) {
        const float* x = logits.data() + row * self.vocab_size();
        const int32_t id = token_ids.data()[row];  // looked at once: another thread may write it
        require_ids(&id, 1, self.vocab_size());
        result.push_back(x[id] - self.log_normalizer(x));
    }
    return result;
}

}  // namespace
}  // namespace bitnet

void bind_sampling(nb::module_& m) {
    using namespace nb::literals;
    using bitnet::RowSampler;
    using bitnet::SamplingRule;
    nb::class_<SamplingRule>(m, "SamplingRule")
        .def("__init__", &bitnet::init_rule, "vocab_size"_a, nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a,
             "min_p"_a, "repetition_penalty"_a, "presence_penalty"_a, "frequency_penalty"_a, "bias_ids"_a,
             "bias_values"_a, "end_ids"_a);
    nb::class_<RowSampler>(m, "RowSampler")
        .def("__init__", &bitnet::init_sampler, "vocab_size"_a)
        .def("sample", &bitnet::sample, "logits"_a.noconvert(), "rule"_a, "tokens"_a.noconvert(), "num_prompt"_a,
             "ban_ends"_a, "seed"_a, "choice"_a, "position"_a, "mask"_a.noconvert() = nb::none())
        .def("sample_rows", &bitnet::sample_rows, "threads"_a, "logits"_a.noconvert(), "draws"_a)
        .def("sample_few", &bitnet::sample_best, "ids"_a.noconvert(), "logits"_a.noconvert(), "rule"_a, "seed"_a,
             "choice"_a, "position"_a)
        .def("score", &bitnet::score, "logits"_a.noconvert(), "token_id"_a, "num_best"_a)
        .def("log_probabilities", &bitnet::log_probabilities, "logits"_a.noconvert(), "token_ids"_a.noconvert());
    m.def(
        "sampling_noise",
        [](uint64_t seed, uint64_t choice, uint64_t position) { return bitnet::noise_of({seed, choice, position}); },
        "seed"_a, "choice"_a, "position"_a);
}
