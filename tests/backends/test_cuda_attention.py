"""Cache and attention on CUDA against the reference, in Triton's interpreter where there is no device."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from bitnet_inference.backends import cuda_attention, reference  # noqa: E402
from bitnet_inference.backends.cuda_cache import BLOCK_TOKENS, Cache, DeviceBatch, rope_write  # noqa: E402

Floats = NDArray[np.float32]
DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
DTYPES = ["bfloat16", "float32", "int8"]
NUM_BLOCKS = 270


def batch_of(contexts: list[tuple[int, int]], seed: int = 0, spare: int = 0) -> DeviceBatch:
    """Sequences with (positions behind, new tokens), in blocks that lie anywhere."""
    free = iter(np.random.default_rng(seed).permutation(NUM_BLOCKS))
    longest = -(-max(sum(each) for each in contexts) // BLOCK_TOKENS)
    tables = np.zeros((len(contexts), longest + 1), np.int32)
    for table, (behind, new) in zip(tables, contexts, strict=True):
        num_blocks = -(-(behind + new) // BLOCK_TOKENS)
        table[:num_blocks] = [next(free) for _ in range(num_blocks)]
    sequences = np.repeat(np.arange(len(contexts)), [new for _, new in contexts])
    positions = np.concatenate([np.arange(behind, behind + new) for behind, new in contexts])
    slots = tables[sequences, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    pad = (0, spare)
    arrays = [np.zeros(len(positions) + spare), np.pad(positions, pad), np.pad(slots, pad, constant_values=-1)]
    arrays += [np.cumsum([0] + [new for _, new in contexts]), tables, np.pad(sequences, pad)]
    most = max(new for _, new in contexts)
    return DeviceBatch(
        *(torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in arrays), most, max(map(sum, contexts))
    )


def test_scratch_memory_is_as_much_as_was_said(monkeypatch):
    taken = []

    def empty(*arguments, **options):
        taken.append(room := torch.zeros(*arguments, **options))
        return room

    cache, batch = filled("bfloat16", 1, 16), batch_of([(4000, 1), (3, 1)])
    q = torch.zeros(2, 4 * 16, device=DEVICE)
    monkeypatch.setattr(cuda_attention.torch, "empty", empty)
    cuda_attention.attend(cache, 0, q, q.clone(), batch, 1.0, 0)
    assert sum(each.nbytes for each in taken) == cuda_attention.scratch_bytes(2, 4, 16)


def filled(dtype: str, kv_heads: int, dim: int, layers: int = 1) -> Cache:
    """A cache in which every slot of every layer holds something."""
    cache = Cache(dtype, layers, kv_heads, dim, DEVICE)
    cache.reserve(NUM_BLOCKS)
    rng = np.random.default_rng(dim)
    for layer in range(layers):
        for stored, scales in zip(*[iter(cache.layer(layer)[i] for i in (0, 2, 1, 3))] * 2, strict=True):
            everything = torch.tensor(rng.standard_normal(stored.shape, np.float32))
            if dtype == "int8":
                everything = (everything * 40).round().clamp(-127, 127)
                scales[:] = torch.tensor(rng.uniform(0.01, 0.03, scales.shape))
            stored[:] = everything.to(stored.dtype)
    return cache


def contents(cache: Cache, layer: int) -> tuple[Floats, Floats]:
    """Keys and values by slot, as the reference's cache: float32 [slots, kv_heads, D]."""
    keys, values, key_scales, value_scales = cache.layer(layer)
    if cache.dtype == "int8":
        keys, values = keys * key_scales[..., None], values * value_scales[..., None]
    shape = (-1, cache.num_kv_heads, cache.head_dim)
    return tuple(each.transpose(1, 2).reshape(shape).float().cpu().numpy() for each in (keys, values))


def expected(cache: Cache, layer: int, q: torch.Tensor, batch: DeviceBatch, scale: float, window: int) -> Floats:
    keys, values = contents(cache, layer)
    rows = []
    for s, (begin, end) in enumerate(pairwise(batch.starts.tolist())):
        positions = batch.positions[begin:end].cpu().numpy()
        seen = np.arange(positions.max(initial=0) + 1)
        slots = batch.block_tables[s].cpu().numpy()[seen // BLOCK_TOKENS] * BLOCK_TOKENS + seen % BLOCK_TOKENS
        heads = q[begin:end].reshape(end - begin, -1, cache.head_dim).cpu().numpy()
        found = reference.attention(heads, keys[slots], values[slots], positions, scale, window)
        rows.append(found.reshape(end - begin, -1))
    return np.concatenate(rows)


def attended(cache: Cache, q: torch.Tensor, batch: DeviceBatch, window: int = 0, layer: int = 0) -> Floats:
    """What attend writes into columns of a wider buffer."""
    wide = torch.full((len(q), q.shape[1] + 5), torch.nan, device=DEVICE)
    out = wide[:, 2:-3]
    cuda_attention.attend(cache, layer, q, out, batch, cache.head_dim**-0.5, window)
    assert wide[:, :2].isnan().all() and wide[:, -3:].isnan().all()
    return out.cpu().numpy()


def queries(batch: DeviceBatch, width: int, seed: int = 1) -> torch.Tensor:
    rows = np.random.default_rng(seed).standard_normal((len(batch.positions), width + 7), np.float32)
    return torch.tensor(rows, device=DEVICE)[:, 3:-4]


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "window"),
    [
        ("bfloat16", 8, 2, 16, 0), ("bfloat16", 20, 1, 80, 0), ("bfloat16", 1, 1, 256, 40), ("float32", 5, 1, 32, 0),
        ("float32", 2, 1, 256, 1), ("int8", 4, 1, 128, 0), ("int8", 3, 1, 24, 129),
    ],
)  # fmt: skip
def test_it_is_the_reference(dtype: str, heads: int, kv_heads: int, dim: int, window: int) -> None:
    cache, batch = filled(dtype, kv_heads, dim, layers=2), batch_of([(0, 1), (260, 2), (30, 20)])
    q = queries(batch, heads * dim)
    found = attended(cache, q, batch, window, layer=1)
    assert np.abs(found - expected(cache, 1, q, batch, dim**-0.5, window)).max() < 1e-4


@pytest.fixture
def sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by NumPy, whose BLAS adds a row in an order that depends on its place and the CPU."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(np, "matmul", lambda x, y, dtype: np.einsum("mk,kn->mn", x, y, dtype=dtype))


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize(("dtype", "window"), [("bfloat16", 0), ("bfloat16", 150), ("float32", 0), ("int8", 0)])
def test_a_token_does_not_see_its_neighbours_nor_who_shares_the_work(dtype: str, window: int) -> None:
    cache, batch = filled(dtype, 1, 16), batch_of([(300, 1), (3, 1), (20, 18), (130, 2)])
    q = queries(batch, 4 * 16)
    whole = attended(cache, q, batch, window)
    cache.num_processors = 100
    assert np.array_equal(attended(cache, q, batch, window), whole)
    for s, (begin, end) in enumerate(pairwise(batch.starts.tolist())):
        alone = part(batch, s, begin, end)
        assert np.array_equal(attended(cache, q[begin:end], alone, window), whole[begin:end])


def part(batch: DeviceBatch, sequence: int, begin: int, end: int) -> DeviceBatch:
    """Tokens begin .. end - 1, which are all of one sequence, as a batch of their own."""
    tokens = (each[begin:end] for each in (batch.token_ids, batch.positions, batch.slots))
    starts, table = (
        torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE),
        batch.block_tables[sequence : sequence + 1],
    )
    last = int(batch.positions[end - 1])
    return DeviceBatch(
        *tokens, starts, table, torch.zeros(end - begin, dtype=torch.int32, device=DEVICE), end - begin, last + 1
    )


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize("window", [0, 60])
def test_long_pieces_of_a_prompt_give_the_same_bits(window: int) -> None:
    cache, batch = filled("bfloat16", 1, 16), batch_of([(70, 64)])
    q = queries(batch, 3 * 16)
    whole = attended(cache, q, batch, window)
    for begin, end in pairwise((0, 17, 40, 64)):
        assert np.array_equal(attended(cache, q[begin:end], part(batch, 0, begin, end), window), whole[begin:end])


@pytest.mark.usefixtures("sums_in_order")
@pytest.mark.parametrize("window", [0, 150])
def test_short_pieces_give_the_same_bits(window: int) -> None:
    cache, batch = filled("bfloat16", 1, 16), batch_of([(250, 12)])
    q = queries(batch, 3 * 16)
    whole = attended(cache, q, batch, window)
    for begin, end in pairwise((0, 1, 2, 9, 12)):
        assert np.array_equal(attended(cache, q[begin:end], part(batch, 0, begin, end), window), whole[begin:end])


@pytest.mark.parametrize("window", [0, 100])
def test_bounds_may_be_larger_than_what_is_there(window: int) -> None:
    """As in a graph: room for longer contexts and more queries, tokens without a sequence, sequences without tokens."""
    cache, batch = filled("bfloat16", 1, 16), batch_of([(130, 1), (40, 1)], spare=2)
    q = queries(batch, 2 * 16)
    tight = attended(cache, q, batch, window)
    starts = torch.cat([batch.starts, batch.starts[-1:]])
    tables = torch.nn.functional.pad(batch.block_tables, (0, 50, 0, 1), value=10**6)
    loose = batch._replace(starts=starts, block_tables=tables, max_query=20, max_context=500)
    found = attended(cache, q, loose, window)
    assert np.array_equal(found[:2], tight[:2]) and np.isnan(found[2:]).all()


def test_what_lies_behind_a_sequence_is_not_read() -> None:
    cache, batch = filled("bfloat16", 1, 16), batch_of([(20, 1), (5, 20)])
    q = queries(batch, 2 * 16)
    expected_rows = attended(cache, q, batch)
    used = torch.zeros(NUM_BLOCKS * BLOCK_TOKENS, dtype=torch.bool)
    for table, length in zip(batch.block_tables.tolist(), (21, 25), strict=True):
        used[[table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(length)]] = True
    for stored in cache.layer(0)[:2]:
        stored.transpose(1, 2).reshape(-1, 16)[~used] = torch.nan
        assert stored.isnan().any()
    assert np.array_equal(attended(cache, q, batch), expected_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (5, 5, 20)])
def test_the_cache_holds_what_the_reference_rounds(dtype: str, heads: int, kv_heads: int, dim: int) -> None:
    cache, batch = Cache(dtype, 2, kv_heads, dim, DEVICE), batch_of([(14, 3), (0, 2)], spare=1)
    cache.reserve(NUM_BLOCKS)
    before = contents(cache, 0)[0].tobytes()
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, n * dim), np.float32) for n in (heads, kv_heads, kv_heads))
    v[1] = 0
    angles = rng.uniform(-1, 1, (6, dim)).astype(np.float32)
    cosine, sine = angles[:, None, : dim // 2], angles[:, None, dim // 2 :]
    turned = torch.tensor(np.pad(q, ((0, 0), (2, 2))), device=DEVICE)
    rope_write(cache, 1, turned[:, 2:-2], *(torch.tensor(each, device=DEVICE) for each in (k, v, angles)), batch)
    assert np.array_equal(
        turned[:, 2:-2].cpu().numpy(), reference.rotated(q.reshape(6, -1, dim), cosine, sine).reshape(6, -1)
    )
    rounded = reference.ROUNDINGS[dtype]
    wanted = (rounded(reference.rotated(k.reshape(6, -1, dim), cosine, sine)), rounded(v.reshape(6, -1, dim)))
    slots = batch.slots[:5].cpu().numpy()
    for found, each in zip(contents(cache, 1), wanted, strict=True):
        assert np.array_equal(found[slots], each[:5])
    assert contents(cache, 0)[0].tobytes() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_copied_in_order(dtype: str) -> None:
    cache = filled(dtype, 2, 16, layers=2)
    before = [contents(cache, layer) for layer in range(2)]
    cache.copy([(1, 2), (2, 3), (5, 1), (6, 1), (7, 8)])
    origin = list(range(NUM_BLOCKS))
    origin[2] = origin[3] = 1
    origin[1], origin[8] = 6, 7
    for layer in range(2):
        for old, new in zip(before[layer], contents(cache, layer), strict=True):
            blocks = old.reshape(NUM_BLOCKS, BLOCK_TOKENS, 2, 16)[origin]
            assert np.array_equal(blocks, new.reshape(blocks.shape))


@pytest.mark.parametrize(("dtype", "item_bytes"), [("bfloat16", 2 * 80), ("float32", 4 * 80), ("int8", 80 + 4)])
def test_a_block_takes_what_is_said(dtype: str, item_bytes: int) -> None:
    cache = Cache(dtype, 3, 5, 80, DEVICE)
    assert cache.num_bytes == 0
    assert cache.block_bytes == 2 * 3 * 5 * BLOCK_TOKENS * item_bytes
    cache.reserve(7)
    assert cache.num_bytes == 7 * cache.block_bytes


def test_a_sequence_that_is_alone_may_be_shorter_than_said() -> None:
    cache, padded = filled("bfloat16", 1, 16), batch_of([(30, 3)], spare=30)
    q = queries(padded, 2 * 16)
    found = attended(cache, q, padded._replace(max_query=33))
    assert np.array_equal(found[:3], attended(cache, q[:3], batch_of([(30, 3)])))
    assert np.isnan(found[3:]).all()


def test_long_contexts_have_longer_segments() -> None:
    cache, batch = filled("bfloat16", 1, 16), batch_of([(4100, 1)])
    q = queries(batch, 2 * 16)
    assert np.abs(attended(cache, q, batch) - expected(cache, 0, q, batch, 0.25, 0)).max() < 1e-4
