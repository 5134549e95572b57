// Python's view of ternary matrices: packing checks shapes and dtypes here.
#include "bind_weights.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <string>
#include <vector>

namespace bitnet {

namespace {

// Checks what all ways to pack have in common; returns the layout.
Layout layout_of(const TernaryWeight& self, int part, const Bytes& data, const std::string& layout) {
    require(part >= 0 && part < self.num_parts(), "there is no such part");
    const int64_t rows = self.part_rows(part), columns = self.columns(), groups = (rows + kGroupRows - 1) / kGroupRows;
    const auto is = [&](int64_t height, int64_t width) {
        require(int64_t(data.shape(0)) == height && int64_t(data.shape(1)) == width, "the array has the wrong shape");
    };
    if (layout == "codes") return is(rows, columns), Layout::codes;
    if (layout == "quarters") return is((rows + 3) / 4, columns), Layout::quarters;
    if (layout == "t5") return is(groups, (columns + kBlockColumns - 1) / kBlockColumns * kBlockBytes), Layout::t5;
    if (layout == "signs") return is(rows, (columns + 7) / 8), Layout::signs;
    require(layout == "u2", "a layout is codes, quarters, u2, t5 or signs");
    return is(groups, (columns + kStepColumns - 1) / kStepColumns * kStepBytes), Layout::u2;
}

void pack(BoundWeight& self, int part, Bytes data, const std::string& name, float scale) {
    const Layout layout = layout_of(self, part, data, name);
    require(!self.group_columns(), "this weight has scales for groups of columns: pass float32 [rows, groups]");
    const BoundWeight::Packing packing(self);
    const ReleasedGil release;
    self.pack(part, data.data(), layout, scale);
}

void pack_rows(BoundWeight& self, int part, Bytes data, const std::string& name, Array1f scales) {
    const Layout layout = layout_of(self, part, data, name);
    require(!self.group_columns(), "this weight has scales for groups of columns: pass float32 [rows, groups]");
    require(int64_t(scales.shape(0)) == self.part_rows(part), "scales of rows are float32 [rows]");
    require_aligned(scales);
    const BoundWeight::Packing packing(self);
    const ReleasedGil release;
    self.pack_rows(part, data.data(), layout, scales.data());
}

void pack_groups(BoundWeight& self, int part, Bytes data, const std::string& name, Floats scales) {
    const Layout layout = layout_of(self, part, data, name);
    require(self.group_columns(), "this weight has no scales for groups of columns: pass a number or float32 [rows]");
    require(int64_t(scales.shape(0)) == self.part_rows(part) && int64_t(scales.shape(1)) == self.column_groups(),
            "scales are float32 [rows, groups of columns]");
    require_aligned(scales);
    const BoundWeight::Packing packing(self);
    const ReleasedGil release;
    self.pack(part, data.data(), layout, scales.data());
}

}  // namespace
}  // namespace bitnet

void bind_weights(nanobind::module_& m) {
    using namespace bitnet;
    nb::class_<Arena>(m, "Arena").def(nb::init<>());
    nb::class_<BoundWeight>(m, "TernaryWeight")
        .def(
            "__init__",
            [](BoundWeight* self, int64_t columns, const std::vector<int64_t>& rows, const std::string& format,
               int64_t group_columns, Arena* arena) {
                require(format == "u2" || format == "t5", "a format is u2 or t5");
                new (self) BoundWeight(columns, rows, format == "t5" ? Format::t5 : Format::u2, group_columns, arena);
            },
            nb::arg("columns"), nb::arg("rows"), nb::arg("format") = "u2", nb::arg("group_columns") = 0,
            nb::arg("arena").none() = nb::none(), nb::keep_alive<1, 6>())
        .def("pack", pack, nb::arg("part"), nb::arg("data"), nb::arg("layout"), nb::arg("scale"))
        .def("pack", pack_rows, nb::arg("part"), nb::arg("data"), nb::arg("layout"), nb::arg("scale").noconvert())
        .def("pack", pack_groups, nb::arg("part"), nb::arg("data"), nb::arg("layout"), nb::arg("scale").noconvert())
        .def_prop_ro("group_columns", &BoundWeight::group_columns)
        .def_prop_ro("format", [](const BoundWeight& w) { return w.format() == Format::t5 ? "t5" : "u2"; })
        .def_prop_ro("one_bit", &BoundWeight::one_bit)
        .def_prop_ro("rows", &BoundWeight::rows)
        .def_prop_ro("columns", &BoundWeight::columns)
        .def_prop_ro("num_bytes", &BoundWeight::bytes)
        .def("packed", [](BoundWeight& w) {
            BoundWeight* const weight = &w;
            const BoundWeight::Reading reading({&weight, 1});
            auto array = new_matrix<uint8_t>(w.groups().size(), size_t(w.written_bytes()));
            w.write(array.data());
            return array;
        });
}
