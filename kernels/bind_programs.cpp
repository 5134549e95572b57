// Programs as Python builds and runs them.
#include "bind_programs.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "bind_arrays.h"
#include "bind_heads.h"
#include "bind_weights.h"
#include "executor.h"
#include "int8_table.h"

namespace nb = nanobind;
using namespace bitnet;

namespace {

using RowsTuple = std::tuple<int, int64_t, int64_t, int64_t, int64_t>;
using CodesTuple = std::tuple<int64_t, int64_t>;

Rows rows_of(const RowsTuple& t) {
    auto [base, offset, stride, column, width] = t;
    require(base >= 0 && base <= 2, "a base is 0, 1 or 2");
    return {Base(base), offset, stride, column, width};
}

Codes codes_of(const CodesTuple& t) { return {std::get<0>(t), std::get<1>(t)}; }

// A program, and everything that it points to.
struct Plan {
    Program program;
    std::vector<nb::object> kept;
    std::vector<BoundWeight*> weights;  // of those
    // Of experts, of which there are too many to be looked at each time: nobody packs them any more.
    std::vector<std::unique_ptr<BoundWeight::Reading>> held;
    explicit Plan(int64_t arena_floats) : program(arena_floats) {}

    RowsStep step(const RowsTuple& x, const Rows* up, int activation, const std::optional<Array1f>& norm, float eps) {
        require(activation >= 0 && activation <= 4, "an activation is 0 to 4");
        int64_t parts = 1;
        if (norm) {
            const int64_t width = std::get<4>(x), normed = int64_t(norm->shape(0));
            require(normed >= 1 && width % normed == 0,
                    "the norm has another width than its rows, or than parts of them");
            parts = width / normed;
            require_aligned(*norm);
            kept.push_back(nb::cast(*norm));
        }
        return {rows_of(x), up, Activation(activation), norm ? norm->data() : nullptr, eps, parts};
    }
    void require_packed() const {
        for (const BoundWeight* weight : weights)
            require(weight->is_packed(), "a part of the ternary weight was never packed");
    }
    template <class T>
    T* keep(nb::object object) {
        T& found = as<T>(object);
        kept.push_back(object);
        return &found;
    }
};

std::optional<Rows> maybe(const std::optional<RowsTuple>& t) {
    if (!t) return std::nullopt;
    return rows_of(*t);
}
const Rows* pointer(const std::optional<Rows>& rows) { return rows ? &*rows : nullptr; }

void bind_plan(nb::module_& m) {
    using Name = std::optional<RowsTuple>;
    nb::class_<Plan>(m, "Program")
        .def(nb::init<int64_t>(), nb::arg("arena_floats"))
        .def_prop_ro("num_steps", [](const Plan& p) { return p.program.steps().size(); })
        .def_prop_ro("is_small", [](const Plan& p) { return p.program.cost() <= kSmallProgram; })
        .def(
            "embed",
            [](Plan& p, nb::object table, RowsTuple out, float scale) {
                if (nb::isinstance<Int8Table>(table)) {
                    const Int8Table* rounded = p.keep<Int8Table>(table);
                    return p.program.embed(&rounded->codes(), rows_of(out), scale, rounded->scales());
                }
                p.program.embed(&p.keep<Dense>(table)->weight, rows_of(out), scale);
            },
            nb::arg(), nb::arg(), nb::arg("scale") = 1.0f)
        .def("rotations",
             [](Plan& p, std::vector<float> f, RowsTuple out) { p.program.rotations(std::move(f), rows_of(out)); })
        .def(
            "rows_to_floats",
            [](Plan& p, RowsTuple x, Name up, int activation, std::optional<Array1f> norm, float eps, RowsTuple out) {
                const auto u = maybe(up);
                p.program.rows_to_floats(p.step(x, pointer(u), activation, norm, eps), rows_of(out));
            },
            nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
        .def(
            "rows_to_codes",
            [](Plan& p, RowsTuple x, Name up, int activation, std::optional<Array1f> norm, float eps, CodesTuple out) {
                const auto u = maybe(up);
                p.program.rows_to_codes(p.step(x, pointer(u), activation, norm, eps), codes_of(out));
            },
            nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
        .def(
            "ternary",
            [](Plan& p, nb::object weight, CodesTuple x, RowsTuple out, Name residual) {
                const auto r = maybe(residual);
                BoundWeight* kept = p.keep<BoundWeight>(weight);
                const BoundWeight::Reading reading({&kept, 1});
                p.program.ternary(kept, codes_of(x), rows_of(out), pointer(r));
                p.weights.push_back(kept);
            },
            nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
        .def(
            "dense",
            [](Plan& p, nb::object weight, RowsTuple x, RowsTuple out, Name residual) {
                const auto r = maybe(residual);
                p.program.dense(&p.keep<Dense>(weight)->weight, rows_of(x), rows_of(out), pointer(r));
            },
            nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
        .def(
            "int8",
            [](Plan& p, nb::object weight, CodesTuple x, RowsTuple out, Name residual) {
                const auto r = maybe(residual);
                p.program.int8(p.keep<BoundHead>(weight)->head.get(), codes_of(x), rows_of(out), pointer(r));
            },
            nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
        .def("rope_write",
             [](Plan& p, nb::object cache, int64_t layer, RowsTuple q, RowsTuple k, RowsTuple v, RowsTuple angles) {
                 p.program.rope_write(p.keep<Cache>(cache), layer, rows_of(q), rows_of(k), rows_of(v), rows_of(angles));
             })
        .def(
            "attend",
            [](Plan& p, nb::object cache, int64_t layer, RowsTuple q, RowsTuple out, float scale, int64_t window) {
                p.program.attend(p.keep<Cache>(cache), layer, rows_of(q), rows_of(out), scale, window);
            },
            nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("window") = 0)
        .def("add", [](Plan& p, RowsTuple x, RowsTuple y,
                       RowsTuple out) { p.program.add(rows_of(x), rows_of(y), rows_of(out)); })
        .def("mix",
             [](Plan& p, const std::vector<nb::object>& experts, RowsTuple x, RowsTuple scores, int64_t used,
                bool renormalized, RowsTuple out) {
                 Mixture mixture{{}, rows_of(x), rows_of(scores), rows_of(out), used, renormalized};
                 std::vector<Plan*> plans;
                 for (const nb::object& each : experts) plans.push_back(p.keep<Plan>(each));
                 for (const Plan* each : plans) mixture.experts.push_back(&each->program);
                 p.program.mix(mixture);
                 for (Plan* each : plans) {
                     each->program.seal();
                     p.held.push_back(std::make_unique<BoundWeight::Reading>(each->weights));
                 }
             })
        .def("bias",
             [](Plan& p, RowsTuple x, Array1f bias, RowsTuple out) {
                 require(int64_t(bias.shape(0)) == std::get<4>(out), "a bias has as many numbers as its rows");
                 require_aligned(bias);
                 p.kept.push_back(nb::cast(bias));
                 p.program.bias(rows_of(x), bias.data(), rows_of(out));
             })
        .def("select", [](Plan& p, const std::vector<RowsTuple>& kept) {
            std::vector<Rows> rows;
            for (const RowsTuple& each : kept) rows.push_back(rows_of(each));
            p.program.select(std::move(rows));
        });
}

using BatchArrays = std::tuple<Array1i, Array1i, Array1i, Array1i, Array2i>;

Batch batch_of(const BatchArrays& arrays, const std::optional<Array1i>& wanted) {
    const auto& [ids, positions, slots, starts, tables] = arrays;
    for (const Array1i* array : {&ids, &positions, &slots, &starts}) require_there(*array);
    require_there(tables);
    if (wanted) require_aligned(*wanted);
    const int64_t tokens = int64_t(ids.shape(0));
    require(int64_t(positions.shape(0)) == tokens && int64_t(slots.shape(0)) == tokens, "T differs between arrays");
    require(starts.shape(0) >= 2 && tables.shape(0) + 1 == starts.shape(0), "S differs between arrays");
    return {tokens,
            int64_t(tables.shape(0)),
            int64_t(tables.shape(1)),
            ids.data(),
            positions.data(),
            slots.data(),
            starts.data(),
            tables.data(),
            wanted ? wanted->data() : nullptr,
            wanted ? int64_t(wanted->shape(0)) : -1};
}

void require_output(const Plan& plan, const FloatsOut& output, const Batch& batch, int64_t tokens) {
    require(int64_t(output.shape(0)) == (batch.num_wanted < 0 ? tokens : batch.num_wanted),
            "the output has one row a token");
    require(int64_t(output.shape(1)) == plan.program.output_width(), "the output has another width than the plan");
    require_aligned(output);
}

void run(Executor& self, Plan& plan, std::optional<BatchArrays> arrays, std::optional<Floats> input,
         std::optional<FloatsOut> output, std::optional<Seconds> seconds, std::optional<Array1i> wanted) {
    Batch batch{};
    batch.num_wanted = -1;
    int64_t tokens = input ? int64_t(input->shape(0)) : 0;
    require(!wanted || arrays, "what is wanted is of a batch");
    if (arrays) batch = batch_of(*arrays, wanted), tokens = batch.num_tokens;
    require(!input || int64_t(input->shape(0)) == tokens, "the input has one row a token");
    require(!input || int64_t(input->shape(1)) == plan.program.input_width(),
            "the input has another width than the plan");
    require(!seconds || seconds->shape(0) == plan.program.steps().size(), "seconds has one number a step");
    if (input) require_aligned(*input);
    if (output) require_output(plan, *output, batch, tokens);
    if (seconds) require_aligned(*seconds);
    plan.program.seal();  // or another thread could add a step meanwhile
    const BoundWeight::Reading reading(plan.weights);
    plan.require_packed();
    const ReleasedGil release;
    self.run(plan.program, tokens, arrays ? &batch : nullptr, input ? input->data() : nullptr,
             output ? output->data() : nullptr, seconds ? seconds->data() : nullptr);
}

// A forward in the background of an executor, and what it points to.
class BoundBackground {
  public:
    explicit BoundBackground(nb::object executor)
        : executor_(std::move(executor)), background_(as<Executor>(executor_).num_threads()) {}
    BoundBackground(const BoundBackground&) = delete;
    ~BoundBackground() { forget(); }
    void begin(nb::object program, const BatchArrays& arrays, FloatsOut output, std::optional<Array1i> wanted) {
        Plan& plan = as<Plan>(program);
        const Batch batch = batch_of(arrays, wanted);
        require_output(plan, output, batch, batch.num_tokens);
        plan.program.seal();
        auto reading = std::make_unique<BoundWeight::Reading>(plan.weights);
        plan.require_packed();
        executor().begin(background_, plan.program, batch, output.data());
        reading_ = std::move(reading);  // what the last one read and wrote was there until now
        program_ = std::move(program), output_ = nb::cast(output);
    }
    void run_beside() { executor().run_beside(background_); }
    void go_on(double seconds) {
        Executor& found = executor();
        const ReleasedGil release;
        found.go_on(background_, seconds);
    }
    void forget() { executor().forget(background_); }
    bool is_under_way() const { return background_.is_under_way(); }

  private:
    Executor& executor() const { return as<Executor>(executor_); }

    nb::object executor_, program_, output_;
    std::unique_ptr<BoundWeight::Reading> reading_;  // of the program's weights, which nobody packs meanwhile
    Background background_;
};

}  // namespace

void bind_programs(nb::module_& m) {
    nb::class_<Cache>(m, "Cache")
        .def(
            "__init__",
            [](Cache* self, const std::string& dtype, int num_layers, int num_kv_heads, int head_dim) {
                require(dtype == "float32" || dtype == "bfloat16" || dtype == "int8",
                        "a cache is float32, bfloat16 or int8");
                require(head_dim > 0 && head_dim % 2 == 0 && num_kv_heads > 0 && num_layers > 0,
                        "the cache's shape is impossible");
                require(head_dim <= 65536 && num_kv_heads <= 1024 && num_layers <= 65536, "the cache is too large");
                new (self) Cache(cache_layout(dtype == "int8" ? Dtype::i8 : dtype_of(dtype), num_kv_heads, head_dim),
                                 num_layers);
            },
            nb::arg("dtype"), nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("head_dim"))
        .def_prop_ro("block_bytes", &Cache::block_bytes)
        .def_prop_ro("num_blocks", &Cache::num_blocks)
        .def("reserve", &Cache::reserve, nb::arg("num_blocks"), nb::call_guard<ReleasedGil>())
        .def("copy", &Cache::copy, nb::arg("source"), nb::arg("target"), nb::call_guard<ReleasedGil>());
    m.def("promised_bytes", &promised_bytes, nb::arg("but") = nb::none(), nb::call_guard<ReleasedGil>());
    bind_plan(m);
    nb::class_<Executor>(m, "Executor")
        .def(
            "__init__",
            [](Executor* self, const std::string& isa, int threads) {
                require(threads >= 1 && threads <= 1024, "1 to 1024 threads");
                new (self) Executor(isa, threads);
            },
            nb::arg("isa"), nb::arg("num_threads"))
        .def_prop_ro("isa", [](const Executor& e) { return e.kernels().name; })
        .def_prop_ro("num_threads", &Executor::num_threads)
        .def("run", run, nb::arg("program"), nb::arg("batch").none().noconvert(), nb::arg("input").none().noconvert(),
             nb::arg("output").none().noconvert(), nb::arg("seconds").none().noconvert() = nb::none(),
             nb::arg("wanted").none().noconvert() = nb::none());
    nb::class_<BoundBackground>(m, "Background")
        .def(nb::init<nb::object>(), nb::arg("executor"))
        .def("begin", &BoundBackground::begin, nb::arg("program"), nb::arg("batch").noconvert(),
             nb::arg("output").noconvert(), nb::arg("wanted").none().noconvert() = nb::none())
        .def("run_beside", &BoundBackground::run_beside)
        .def("go_on", &BoundBackground::go_on, nb::arg("seconds"))
        .def("forget", &BoundBackground::forget)
        .def_prop_ro("is_under_way", &BoundBackground::is_under_way);
    m.attr("BLOCK_TOKENS") = kBlockTokens;
}
