// The Python side of the kernels: shapes and dtypes are checked here, the GIL is released in everything long.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_arrays.h"
#include "bind_heads.h"
#include "bind_machine.h"
#include "bind_programs.h"
#include "bind_sampling.h"
#include "bind_weights.h"
#include "executor.h"
#include "float_mode.h"

namespace nb = nanobind;
using namespace bitnet;

namespace {

std::vector<std::string> isas() {
    int count;
    const Kernels* const* list = available_kernels(&count);
    std::vector<std::string> names;
    for (int i = 0; i < count; i++) names.push_back(list[i]->name);
    return names;
}

// Whether T5 is decoded as it is multiplied: then it is faster than U2, or as fast.
bool decodes_t5(const std::string& isa) {
    const Kernels* kernels = find_kernels(isa.c_str());
    require(kernels, "this machine has no such instruction set");
    return kernels->block_tile;
}

nb::tuple ternarize_array(nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro> weights,
                          const std::string& dtype) {
    const Dense dense(weights, dtype);
    const int64_t rows = dense.weight.rows, columns = dense.weight.columns;
    auto codes = new_matrix<int8_t>(size_t(rows), size_t(columns));
    float scale;
    {
        const ReleasedGil release;
        const FloatMode mode;
        scale = ternarize(dense.weight.data, dense.weight.dtype, rows * columns, codes.data());
    }
    return nb::make_tuple(codes, scale);
}

nb::tuple quarters(Bytes rows, int64_t block_bytes, int64_t code_bytes, bool first_highest) {
    const CodeBlocks from{rows.data(), int64_t(rows.shape(0)), int64_t(rows.shape(1)), block_bytes,
                          code_bytes,  first_highest};
    require(from.rows % 4 == 0 && block_bytes > 0 && from.row_bytes % block_bytes == 0, "rows are 4 n of whole blocks");
    require(code_bytes > 0 && code_bytes <= block_bytes && code_bytes % 32 == 0, "codes are 32 n bytes of a block");
    auto out = new_matrix<uint8_t>(size_t(from.rows / 4), size_t(from.columns()));
    bool bad;
    {
        const ReleasedGil release;
        bad = to_quarters(from, out.data());
    }
    return nb::make_tuple(out, bad);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a forked child that exits early would print them
    m.def("isas", isas);
    m.def("decodes_t5", decodes_t5, nb::arg("isa"));
    m.def("ternarize", ternarize_array, nb::arg("weights"), nb::arg("dtype"));
    m.def("quarters", quarters, nb::arg("rows"), nb::arg("block_bytes"), nb::arg("code_bytes"),
          nb::arg("first_highest"));
    m.def("has_invalid", [](Bytes codes) {
        const ReleasedGil release;
        return has_invalid(codes.data(), int64_t(codes.size()));
    });
    bind_weights(m);
    nb::class_<Dense>(m, "DenseWeight")
        .def(nb::init<nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro>, const std::string&>(),
             nb::arg("data"), nb::arg("dtype"))
        .def_prop_ro("rows", [](const Dense& d) { return d.weight.rows; })
        .def_prop_ro("columns", [](const Dense& d) { return d.weight.columns; })
        .def_static(
            "of_codes",
            [](Bytes data, const std::string& layout, Floats scales, int64_t columns, int64_t group_columns) {
                require(layout == "codes" || layout == "signs", "a table is made of codes or signs");
                require(group_columns == 64 || group_columns == 128, "64 or 128 columns share a scale");
                require(columns >= 1 && columns <= kMaxColumns, "a table has 1 to 262144 columns");
                const bool are_signs = layout == "signs";
                const int64_t rows = int64_t(data.shape(0)), bytes = are_signs ? (columns + 7) / 8 : columns;
                require(int64_t(data.shape(1)) == bytes, "the array has the wrong shape");
                require(int64_t(scales.shape(0)) == rows &&
                            int64_t(scales.shape(1)) == (columns + group_columns - 1) / group_columns,
                        "there must be one scale for each group of columns");
                require_aligned(scales);
                const TernaryTable::Codes codes{
                    rows,         columns, group_columns, data.data(), are_signs ? Layout::signs : Layout::codes,
                    scales.data()};
                std::shared_ptr<const TernaryTable> table;
                {
                    const ReleasedGil release;
                    table = std::make_shared<TernaryTable>(codes);
                }
                return Dense(table, {nullptr, Dtype::f32, rows, columns});
            },
            nb::arg("data"), nb::arg("layout"), nb::arg("scales"), nb::arg("columns"), nb::arg("group_columns"))
        .def("as_codes",
             [](const Dense& d, Executor& executor) -> std::optional<Dense> {
                 require(!d.codes, "a matrix that is made of codes has no array");
                 std::shared_ptr<const TernaryTable> codes;
                 {
                     const ReleasedGil release;
                     codes = TernaryTable::of(d.weight, executor);
                 }
                 return codes ? std::optional(Dense(codes, d.weight)) : std::nullopt;
             })
        .def_prop_ro("has_codes", [](const Dense& d) { return d.codes != nullptr; })
        .def_prop_ro("num_bytes",
                     [](const Dense& d) { return d.codes ? d.codes->bytes() : d.weight.rows * d.weight.row_bytes(); });
    bind_programs(m);
    bind_heads(m);
    bind_machine(m);
    bind_sampling(m);
}
