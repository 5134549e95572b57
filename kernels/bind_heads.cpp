// Python's view of large heads and tables: the screen that finds the best logits, scores and embeddings in fewer bits.
#include "bind_heads.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

#include "bind_arrays.h"
#include "bind_sampling.h"
#include "int8_table.h"
#include "screen.h"

namespace bitnet {
namespace {

// Its rule, tokens, num_prompt, ban_ends, seed, choice, position, mask: see RowSampler.sample. Rules are kept, as
// there.
using ScreenDraw = std::tuple<nb::object, Array1i, size_t, bool, uint64_t, uint64_t, uint64_t, std::optional<Mask>>;

struct BoundScreen {
    nb::object head;
    std::unique_ptr<Screen> screen;
    BoundScreen(nb::object head_, Executor& executor) : head(head_) {
        const DenseWeight weight = as<Dense>(head).weight;
        const ReleasedGil release;
        screen = std::make_unique<Screen>(weight, executor);
    }
    BoundScreen(nb::object head_, Bytes high, Bytes low, Floats numbers, Executor& executor) : head(head_) {
        const DenseWeight weight = as<Dense>(head).weight;
        require(weight.codes == nullptr, "a head that is made of codes is its own screen");
        const size_t tiles = size_t((weight.rows + kHeadRows - 1) / kHeadRows);
        const size_t steps = size_t((weight.columns + kStepColumns - 1) / kStepColumns);
        const auto is = [](const auto& a, size_t x, size_t y) { return a.shape(0) == x && a.shape(1) == y; };
        require(is(high, tiles, steps * kHeadBytes6) && is(low, tiles, steps * kHeadBytes2) &&
                    is(numbers, 5, tiles * kHeadRows),
                "the parts of the screen are those of another head");
        require_aligned(numbers);
        const ReleasedGil release;
        screen =
            std::make_unique<Screen>(weight, QuantisedHead::Parts{high.data(), low.data(), numbers.data()}, executor);
    }
    nb::tuple parts() {
        require(screen->quantised() != nullptr, "a head that is made of codes is its own screen");
        const QuantisedHead& quantised = *screen->quantised();
        const auto codes = [&](const uint8_t* data, int bytes) {
            const size_t shape[2] = {size_t(quantised.num_tiles()), size_t(quantised.num_steps() * bytes)};
            return nb::ndarray<nb::numpy, const uint8_t>(data, 2, shape, nb::find(this));
        };
        auto numbers = new_matrix<float>(5, size_t(quantised.num_tiles() * kHeadRows));
        quantised.copy_numbers(numbers.data());
        return nb::make_tuple(codes(quantised.high(), kHeadBytes6), codes(quantised.low(), kHeadBytes2), numbers);
    }
    nb::tuple top(Executor& executor, Floats x, int64_t k) {
        require(int64_t(x.shape(1)) == as<Dense>(head).weight.columns, "x has another width than the head");
        require(k >= 1 && k <= as<Dense>(head).weight.rows, "k lies outside 1 .. the number of rows");
        require_aligned(x);
        executor.require_home();  // a lock that another thread held when it forked is held here for ever
        auto ids = new_matrix<int32_t>(x.shape(0), size_t(k));
        auto logits = new_matrix<float>(x.shape(0), size_t(k));
        int64_t computed;
        {
            const ReleasedGil release;
            const FloatMode mode;
            computed = screen->top(executor, x.data(), int64_t(x.shape(0)), k, ids.data(), logits.data());
        }
        return nb::make_tuple(ids, logits, computed);
    }
    std::vector<int32_t> sample(Executor& executor, Floats x, const std::vector<ScreenDraw>& draws) {
        const DenseWeight weight = as<Dense>(head).weight;
        require(int64_t(x.shape(1)) == weight.columns, "x has another width than the head");
        require(x.shape(0) == draws.size(), "there must be one draw for each row of x");
        require_aligned(x);
        executor.require_home();
        std::vector<Draw> checked;
        for (const auto& [rule, tokens, num_prompt, ban_ends, seed, choice, position, mask] : draws) {
            const NoiseKey key{seed, choice, position};
            const SamplingRule& of_row = rule_in(rule);
            checked.push_back(checked_draw(size_t(weight.rows), of_row, tokens, num_prompt, ban_ends, key, mask));
        }
        std::vector<int32_t> tokens(draws.size());
        const ReleasedGil release;
        const FloatMode mode;
        screen->sample(executor, x.data(), int64_t(x.shape(0)), checked.data(), tokens.data());
        return tokens;
    }
};

}  // namespace
}  // namespace bitnet

void bind_heads(nanobind::module_& m) {
    using namespace bitnet;
    nb::class_<BoundScreen>(m, "Screen")
        .def(nb::init<nb::object, Executor&>(), nb::arg("head"), nb::arg("executor"))
        .def(nb::init<nb::object, Bytes, Bytes, Floats, Executor&>(), nb::arg("head"), nb::arg("high"), nb::arg("low"),
             nb::arg("numbers"), nb::arg("executor"))
        .def("parts", &BoundScreen::parts)
        .def("top", &BoundScreen::top, nb::arg("executor"), nb::arg("x"), nb::arg("k"))
        .def("sample", &BoundScreen::sample, nb::arg("executor"), nb::arg("x"), nb::arg("draws"))
        .def(
            "bytes_read",
            [](const BoundScreen& s, Executor& executor, int64_t num_inputs) {
                return s.screen->bytes_read(executor.kernels(),
                                            int(std::clamp<int64_t>(num_inputs, 1, kInputsInMatrix)));
            },
            nb::arg("executor"), nb::arg("num_inputs"))
        .def_prop_ro("num_bytes", [](const BoundScreen& s) { return s.screen->bytes(); });
    nb::class_<BoundHead>(m, "QuantisedHead")
        .def(nb::init<const Dense&, int, Executor&>(), nb::arg("head"), nb::arg("bits"), nb::arg("executor"))
        .def("scores", &BoundHead::scores, nb::arg("executor"), nb::arg("x").noconvert(), nb::arg("out").noconvert())
        .def_prop_ro("is_finite", [](const BoundHead& h) { return h.head->is_finite(); })
        .def_prop_ro("num_bytes", [](const BoundHead& h) { return h.head->bytes(); });
    nb::class_<Int8Table>(m, "Int8Table")
        .def(
            "__init__",
            [](Int8Table* self, const Dense& table, Executor& executor) {
                const ReleasedGil release;
                new (self) Int8Table(table.weight, executor);
            },
            nb::arg("table"), nb::arg("executor"))
        .def_prop_ro("num_bytes", &Int8Table::bytes);
    m.attr("MAX_HEAD_COLUMNS") = kMaxHeadColumns;
    m.attr("UNDECIDED") = kUndecided;
}
