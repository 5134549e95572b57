// Python's view of the machine's limits, in bitnet_inference._native. Signatures (native.py re-exports them):
//
//   class Limits:                         # keeps threads and `num_bytes` of memory
//       def __init__(self, num_bytes: int, num_threads: int) -> None
//       def read_bandwidth(self) -> float           # bytes a second
//       def int8_peak(self, isa: str) -> float      # multiply-adds a second
#include "bind_machine.h"

#include <nanobind/stl/string.h>

#include <new>
#include <stdexcept>

#include "bind_arrays.h"
#include "machine.h"

namespace nb = nanobind;

void bind_machine(nb::module_& m) {
    using namespace nb::literals;
    using bitnet::Limits;
    using WithoutGil = nb::call_guard<bitnet::ReleasedGil>;
    nb::class_<Limits>(m, "Limits")
        .def(
            "__init__",
            [](Limits* self, int64_t num_bytes, int num_threads) {
                if (num_bytes < 1 || num_threads < 1 || num_threads > 1024)
                    throw std::invalid_argument("at least 1 byte, and 1 to 1024 threads");
                const bitnet::ReleasedGil release;
                new (self) Limits(num_bytes, num_threads);
            },
            "num_bytes"_a, "num_threads"_a)
        .def("read_bandwidth", &Limits::read_bandwidth, WithoutGil())
        .def("int8_peak", &Limits::int8_peak, "isa"_a, WithoutGil());
}
