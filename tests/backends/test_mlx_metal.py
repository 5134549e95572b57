"""The kernels for Apple's GPUs, as far as one can try them without: their bodies are C++ too, and are built here."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from bitnet_inference.backends import mlx_metal
from bitnet_inference.backends.mlx_weights import Codes, Floats, packed
from bitnet_inference.formats.floats import to_bfloat16, to_float32

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
# The 32 lanes of a SIMD group run one after the other, twice: first to add up, then with the sums.
SHIM = """
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>
using uint = unsigned int;
using std::min, std::fma;
struct bfloat16_t {
    uint16_t bits;
    explicit operator float() const {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        __builtin_memcpy(&value, &wide, 4);
        return value;
    }
};
static std::vector<float> sums;
static size_t next;
static bool is_adding;
static float simd_sum(float value) {
    if (is_adding && next == sums.size()) sums.push_back(0);
    if (is_adding) sums[next] += value;
    return sums[next++];
}
struct Position { uint x; };
static void body(@PARAMETERS@, Position thread_position_in_grid) {@BODY@}
extern "C" void run(@PARAMETERS@, uint num_threads) {
    for (uint first = 0; first < num_threads; first += 32) {
        sums.clear();
        for (bool adding : {true, false}) {
            is_adding = adding;
            for (uint lane = 0; lane < 32; lane++) next = 0, body(@NAMES@, {first + lane});
        }
    }
}
"""
TERNARY = {"codes": "float", "words": "uint32_t", "scales": "float", "inverse": "float"}
DENSE = {"x": "float", "weights": "bfloat16_t"}


def built(folder: Path, body: str, inputs: dict[str, str], sizes: dict[str, int]) -> Callable[..., None]:
    """The kernel for these sizes; it takes the arrays, then the number of threads."""
    parameters = ", ".join([*(f"const {kind}* {name}" for name, kind in inputs.items()), "float* out"])
    constants = "".join(f"constexpr int {name} = {size};\n" for name, size in sizes.items())
    text = SHIM.replace("@PARAMETERS@", parameters).replace("@NAMES@", ", ".join([*inputs, "out"]))
    name = "_".join(["kernel", *map(str, sizes.values())])
    (folder / f"{name}.cpp").write_text(constants + text.replace("@BODY@", body))
    command = [str(COMPILER), "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-fsanitize=undefined"]
    command += ["-fno-sanitize-recover=all", f"{name}.cpp", "-o", f"{name}.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / f"{name}.so")).run  # type: ignore[no-any-return]


class InCpp(mlx_metal.MetalProducts):
    """The kernels with their bodies built in C++: what calls them is that of the package."""

    def __init__(self, folder: Path) -> None:
        self._ternary = self._kernel(folder, mlx_metal.TERNARY, TERNARY)
        self._dense = self._kernel(folder, mlx_metal.DENSE, DENSE)

    @staticmethod
    def _kernel(folder: Path, body: str, names: dict[str, str]) -> Callable[..., list[mx.array]]:
        def call(
            inputs: list[mx.array], template: Any, grid: Any, threadgroup: Any, output_shapes: Any, output_dtypes: Any
        ) -> list[mx.array]:
            assert output_dtypes == [mx.float32] and grid[1:] == threadgroup[1:] == (1, 1) and threadgroup[0] % 32 == 0
            arrays = [np.array(each.view(mx.uint16) if each.dtype == mx.bfloat16 else each) for each in inputs]
            out = np.full(output_shapes[0], np.nan, np.float32)
            pointers = [ctypes.c_void_p(each.ctypes.data) for each in (*arrays, out)]
            built(folder, body, names, dict(template))(*pointers, ctypes.c_uint(grid[0]))
            return [mx.array(out)]

        return call


@pytest.mark.parametrize(
    ("rows", "columns", "count"), [(1, 1, 1), (9, 200, 2), (6, 2560, 1), (13, 1300, 4), (5, 40, 5)]
)
def test_ternary_products_are_those_of_mlx_to_the_bit(tmp_path: Path, rows: int, columns: int, count: int) -> None:
    rng = np.random.default_rng(rows)
    codes = rng.integers(-1, 2, (rows, columns), np.int8)
    codes[0] = 1
    words, scales = mx.array(packed(codes, 2, 128)), mx.array(rng.random(rows, np.float32))
    ones = mx.ones((rows, words.shape[1] // 8))
    weight = Codes(words, ones, -ones, scales, 2, 128, columns, (rows,))
    x = rng.integers(-127, 128, (count, columns)).astype(np.float32)
    x[0] = 127
    inverse = mx.array(rng.random((count, 1), np.float32))
    found, expected = (np.array(weight.product(mx.array(x), inverse, metal)) for metal in (InCpp(tmp_path), None))
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("rows", "columns", "count"), [(1, 1, 1), (9, 203, 2), (6, 2560, 1), (13, 300, 16)])
def test_dense_products_are_those_of_mlx(tmp_path: Path, rows: int, columns: int, count: int) -> None:
    rng = np.random.default_rng(rows)
    bits = to_bfloat16(rng.standard_normal((rows, columns), np.float32))
    x = rng.standard_normal((count, columns), np.float32)
    found = np.array(Floats(mx.array(bits).view(mx.bfloat16)).product(mx.array(x), InCpp(tmp_path)))
    expected = x.astype(np.float64) @ to_float32(bits, "bfloat16").T.astype(np.float64)
    assert np.abs(found - expected).max() < 1e-5 * columns**0.5


def test_the_trial_tells_right_kernels_from_wrong_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mlx_metal.is_right(InCpp(tmp_path))
    for name, right, wrong in (("TERNARY", "four & 48", "four & 32"), ("DENSE", "begin + together", "begin + 1")):
        broken: NDArray[Any] | str = getattr(mlx_metal, name).replace(right, wrong)
        with monkeypatch.context() as patch:
            patch.setattr(mlx_metal, name, broken)
            (tmp_path / name).mkdir()
            assert not mlx_metal.is_right(InCpp(tmp_path / name))


def test_kernels_that_do_not_compile_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX compiles them when they are first computed; what raises in NumPy's hands ends the process."""

    def fail(*arrays: mx.array) -> None:
        raise RuntimeError("[metal::Device] Unable to build metal library from source")

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mlx_metal, "MetalProducts", lambda: InCpp(tmp_path))
    assert mlx_metal.metal_products() is not None
    monkeypatch.setattr(mx, "eval", fail)
    assert mlx_metal.metal_products() is None


def test_without_metal_there_are_no_kernels() -> None:
    if not mx.metal.is_available():
        assert mlx_metal.metal_products() is None
