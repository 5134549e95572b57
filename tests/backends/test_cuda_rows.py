"""Row kernels and the best logits on CUDA against the reference, in Triton's interpreter where there is no device."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from bitnet_inference import ternary  # noqa: E402
from bitnet_inference.backends import cuda_rows, cuda_top, reference  # noqa: E402
from bitnet_inference.backends.cuda_rows import Codes  # noqa: E402

Floats = NDArray[np.float32]
DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
WIDTHS = [1, 48, 2560, 8192, 9000]


def random_rows(num_rows: int, width: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((num_rows, width), np.float32) * np.float32(3)


def on_device(numbers: NDArray[np.generic]) -> torch.Tensor:
    return torch.tensor(numbers, device=DEVICE)


def wide(rows: Floats) -> torch.Tensor:
    """The rows as columns of a wider buffer."""
    return on_device(np.pad(rows, ((0, 0), (3, 4)), constant_values=np.nan))[:, 3:-4]


def codes_of(rows: Floats) -> Codes:
    return Codes(torch.full(rows.shape, 99, dtype=torch.int8, device=DEVICE), torch.empty(len(rows), device=DEVICE))


@pytest.mark.parametrize("width", WIDTHS)
def test_codes_are_those_of_the_definition_to_the_bit(width: int) -> None:
    x = random_rows(7, width)
    x[1] = 0
    x[2] *= 1e-30
    x[3] *= np.float32(1e38) / np.abs(x[3]).max()
    x[4] = np.resize(np.arange(-127, 128) / np.float32(2), width)  # halves
    out = codes_of(x)
    cuda_rows.rows(wide(x), None, None, None, 0.0, out)
    codes, scales = ternary.quantize_rows(x)
    assert np.array_equal(out.codes.cpu().numpy(), codes)
    assert np.array_equal(out.scales.cpu().numpy(), scales)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [48, 9000])
def test_a_row_that_is_not_finite_has_no_scale(width: int, broken: float) -> None:
    x = random_rows(3, width)
    x[1, 5] = broken
    out = codes_of(x)
    with np.errstate(all="ignore"):
        cuda_rows.rows(on_device(x), None, None, None, 0.0, out)
    assert out.scales.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", [None, "relu2", "silu", "gelu"])
@pytest.mark.parametrize("is_normed", [False, True])
def test_every_subset_is_the_reference(width: int, activation: str | None, is_normed: bool) -> None:
    x, up, weight = random_rows(4, width), random_rows(4, width, 1), random_rows(1, width, 2)[0]
    x[2] = 1e-3
    expected = reference.gated(x, up, activation) if activation else x
    expected = reference.rms_norm(expected, weight, 1e-5) if is_normed else expected
    norm = on_device(weight) if is_normed else None
    floats, out = wide(np.empty_like(x)), codes_of(x)
    for target in (floats, out):
        cuda_rows.rows(wide(x), wide(up) if activation else None, activation, norm, 1e-5, target)
    assert np.allclose(floats.cpu().numpy(), expected, rtol=1e-5, atol=1e-6)
    codes, scales = ternary.quantize_rows(floats.cpu().numpy())
    is_other_order = is_normed and DEVICE.type == "cuda"  # of a row's squares, where it is quantised in the same launch
    assert np.allclose(out.scales.cpu().numpy(), scales, rtol=3e-7 if is_other_order else 0, atol=0)
    assert np.abs(out.codes.cpu().numpy().astype(int) - codes).max() <= is_other_order
    codes, _ = ternary.quantize_rows(expected)
    assert np.abs(out.codes.cpu().numpy().astype(int) - codes).max() <= 1


@pytest.mark.parametrize("parts", [2, 5])
def test_heads_are_normed_on_their_own_and_in_place(parts: int) -> None:
    x, weight = random_rows(3, 24 * parts), random_rows(1, 24, 1)[0]
    expected = reference.rms_norm(x, weight, 1e-6)
    rows, out = wide(x), codes_of(x)
    cuda_rows.rows(rows, None, None, on_device(weight), 1e-6, out)
    cuda_rows.rows(rows, None, None, on_device(weight), 1e-6, rows)
    assert np.allclose(rows.cpu().numpy(), expected, rtol=1e-5, atol=1e-6)
    codes, scales = ternary.quantize_rows(rows.cpu().numpy())
    assert np.array_equal(out.codes.cpu().numpy(), codes)
    assert np.array_equal(out.scales.cpu().numpy(), scales)


def test_a_row_depends_on_nothing_but_itself() -> None:
    x, weight = random_rows(5, 300), on_device(random_rows(1, 300, 2)[0])
    whole, alone = torch.empty(5, 300, device=DEVICE), torch.empty(1, 300, device=DEVICE)
    cuda_rows.rows(on_device(x), None, None, weight, 1e-5, whole)
    cuda_rows.rows(on_device(x[3:4]), None, None, weight, 1e-5, alone)
    assert torch.equal(whole[3:4], alone)


@pytest.mark.parametrize("half", [8, 40])
def test_rotations_are_cosines_and_sines(half: int) -> None:
    positions = np.array([0, 1, 17, 4095, 131071], np.int32)
    frequencies = np.geomspace(1, 1e-5, half).astype(np.float32)
    out = wide(np.empty((5, 2 * half), np.float32))
    cuda_rows.rotations(on_device(positions), on_device(frequencies), out)
    angles = positions.astype(np.float32)[:, None] * frequencies
    assert np.allclose(out.cpu().numpy(), np.concatenate([np.cos(angles), np.sin(angles)], axis=1), atol=1e-6)


@pytest.mark.parametrize("width", [5, 1024, 2000])
def test_rows_are_added_in_place(width: int) -> None:
    x, y = random_rows(3, width), random_rows(3, width, 1)
    out = wide(x)
    cuda_rows.add(out, wide(y), out)
    assert np.array_equal(out.cpu().numpy(), x + y)


def best(logits: Floats, k: int) -> tuple[NDArray[np.int32], Floats]:
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return ids.astype(np.int32), np.take_along_axis(logits, ids, axis=1)


@pytest.mark.parametrize(
    ("num_ids", "k", "is_flat"), [(1, 1, False), (9000, 1, True), (3, 5, False), (1100, 64, True), (1100, 65, True)]
)
def test_the_best_come_first_and_low_ids_among_equals(num_ids: int, k: int, is_flat: bool) -> None:
    logits = np.rint(-np.abs(random_rows(2, num_ids))) if is_flat else random_rows(2, num_ids)
    logits[0, ::2] += 0.0  # 0 among -0
    logits[1, ::3] = -np.inf
    ids, found = cuda_top.top(wide(logits), k)
    for given, expected in zip((ids, found), best(logits, k), strict=True):
        assert given.cpu().numpy().dtype == expected.dtype
        assert np.array_equal(given.cpu().numpy(), expected)


@pytest.mark.parametrize("k", [1, 5, 70])
def test_what_is_no_number_comes_first(k: int) -> None:
    logits = random_rows(2, 950)
    logits[1, [900, 30]] = np.nan, -np.nan
    logits[1, 7] = np.inf
    ids, found = cuda_top.top(on_device(logits), k)
    assert ids[1, :3].tolist() == [30, 900, 7][:k]
    assert found[1, 0].isnan() and not found[0].isnan().any()
