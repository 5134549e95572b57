// Arrays that come from Python and go there, checked. Only binding files include this.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels.h"
#include "ternary_table.h"

namespace bitnet {

namespace nb = nanobind;

// nb::gil_scoped_release for threads that the interpreter does not wait for: where it has ended meanwhile it unwinds
// their stacks, which no destructor lets through, so that the process would end as crashed. They wait for its end.
class ReleasedGil {
  public:
    ReleasedGil() : thread_(PyEval_SaveThread()) {}
    ~ReleasedGil() {
        try {
            PyEval_RestoreThread(thread_);
        } catch (...) {
            for (;;) pause();
        }
    }
    ReleasedGil(const ReleasedGil&) = delete;

  private:
    PyThreadState* thread_;
};

using Array1i = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Array2i = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Array1f = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Seconds = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// What Python holds as a T; a TypeError tells what belongs here.
template <class T>
T& as(nb::handle object) {
    const bool is_one = nb::isinstance<T>(object);
    if (is_one && nb::inst_ready(object)) return nb::cast<T&>(object);
    const nb::object name = nb::type<T>().attr("__name__");
    const nb::object given = is_one ? nb::str("one that was never made") : nb::object(object.type().attr("__name__"));
    throw nb::type_error(nb::str("{} belongs here, not {}").format(name, given).c_str());
}

template <class A>
void require_aligned(const A& array) {
    const size_t item = array.itemsize() ? array.itemsize() : 1;
    require(reinterpret_cast<uintptr_t>(array.data()) % item == 0, "an array lies at an address for no number");
}

// For arrays within a tuple: there nanobind takes None for one.
template <class A>
void require_there(const A& array) {
    require(array.is_valid(), "None stands where an array should");
    require_aligned(array);
}

inline Dtype dtype_of(const std::string& name) {
    if (name == "float32") return Dtype::f32;
    if (name == "float16") return Dtype::f16;
    require(name == "bfloat16", "a dtype is float32, float16 or bfloat16");
    return Dtype::bf16;
}

// A dense matrix that views an array, or is made of codes; float16 and bfloat16 come as uint16.
struct Dense {
    nb::object owner;
    std::shared_ptr<const TernaryTable> codes = nullptr;
    DenseWeight weight;
    Dense(std::shared_ptr<const TernaryTable> c, const DenseWeight& w)
        : codes(std::move(c)), weight{nullptr, Dtype::f32, w.rows, w.columns, codes.get()} {}
    Dense(nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro> array, const std::string& dtype)
        : owner(nb::cast(array)),
          weight{array.data(), dtype_of(dtype), int64_t(array.shape(0)), int64_t(array.shape(1))} {
        require(array.itemsize() == (weight.dtype == Dtype::f32 ? 4u : 2u),
                "the array has another item size than dtype");
        require(array.dtype() == nb::dtype<float>() || array.dtype() == nb::dtype<uint16_t>() ||
                    (weight.dtype == Dtype::f16 && array.dtype().code == uint8_t(nb::dlpack::dtype_code::Float)),
                "a dense matrix is an array of float32, or of 16-bit floats as uint16");
        require_aligned(array);
        require(weight.columns >= 1 && weight.columns <= kMaxColumns, "a dense matrix has 1 to 262144 columns");
        require(weight.rows >= 1 && weight.rows < int64_t(1) << 31, "a dense matrix has 1 to 2^31 - 1 rows");
    }
};

template <class T>
nb::ndarray<nb::numpy, T> new_matrix(size_t rows, size_t columns) {
    if (columns && rows > size_t(std::numeric_limits<int64_t>::max()) / sizeof(T) / columns) throw std::bad_alloc();
    T* data = new T[rows * columns];
    const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    const size_t shape[2] = {rows, columns};
    return nb::ndarray<nb::numpy, T>(data, 2, shape, owner);
}

}  // namespace bitnet
