"""Random weights at the speed of a disk: raw random bits, through a table of 65,536 values, written in chunks."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.formats.checkpoint import PROJECTIONS, ModelConfig, expected_shapes
from bitnet_inference.formats.floats import to_bfloat16
from bitnet_inference.formats.hf_names import Names
from bitnet_inference.formats.hf_quantization import Quantization
from bitnet_inference.ternary import pack_quarters

ZEROS = 0.42  # the share of zeros in the real 2B-4T
CHUNK = 1 << 22
EMBED_STD, LOGIT_STD = 0.5, 2.5
# Root mean squares of what enters the last matrix of each half of a layer, where no sub-norm makes it 1.
ATTENDED, GATED = 0.6, 0.8


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its header, and its values chunk by chunk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[NDArray[Any]]]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * (1 if self.dtype == "U8" else 2)


def write_safetensors(path: Path, entries: Iterable[Entry]) -> None:
    """Write the file, one chunk at a time."""
    entries, header, position = list(entries), {}, 0
    for entry in entries:
        offsets = [position, position + entry.num_bytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        position += entry.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            for chunk in entry.chunks():
                file.write(chunk.data)


@dataclass(frozen=True)
class Recipe:
    """The tensors of a model. Raises ValueError for a peak above sqrt(hidden size), where nothing but it is left.

    And for a seed below 0, which no generator takes.
    """

    config: ModelConfig
    quantization: Quantization | None
    seed: int
    peak: float

    def __post_init__(self) -> None:
        """Check peak and seed."""
        if not 1 <= self.peak < math.sqrt(self.config.hidden_size):
            raise ValueError(f"peak is {self.peak}: from 1 to below {math.sqrt(self.config.hidden_size):.1f}")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: give 0 or more")

    def tensors(self) -> Iterator[Entry]:
        """Every tensor of the file, in order."""
        for name, shape in expected_shapes(self.config):
            module = Names().module(name)
            if len(shape) == 1:
                values = self._bits(self._norm(name) * self._random(name).lognormal(0, 0.2, shape))
                yield Entry(f"{module}.weight", "BF16", shape, partial(_once, values))
            elif name != "embed" and self.quantization is not None and self.quantization.converts(module):
                packed = (-(-shape[0] // 4), shape[1])
                yield Entry(f"{module}.weight", "U8", packed, partial(self._looked_up, name, packed, self._trits))
                scale = self._scale(name)
                stored = self._bits(np.array([1 / scale if self.quantization.divides else scale]))
                yield Entry(f"{module}.weight_scale", "BF16", (1,), partial(_once, stored))
            else:
                table = self._normal(self._std(name))
                # The head holds the values of the embedding table, see --peak.
                values_of = "embed" if name == "head" else name
                yield Entry(f"{module}.weight", "BF16", shape, partial(self._looked_up, values_of, shape, table))

    @cached_property
    def _added(self) -> float:
        # A token's own logit stands sqrt(hidden) * std / rms out, rms being that of the last hidden state.
        growth = self.config.hidden_size / self.peak**2 - 1
        return EMBED_STD * math.sqrt(growth / (2 * self.config.num_layers))

    def _gain(self, name: str) -> float:
        """What a product should make of an input of root mean square 1, per square root of its length."""
        part, config = name.rpartition(".")[2], self.config
        if part == "o":
            return (
                self._added / (ATTENDED if not config.sub_norms else 1) / math.sqrt(config.num_heads * config.head_dim)
            )
        if part == "down":
            return self._added / (GATED if not config.sub_norms else 1) / math.sqrt(config.intermediate_size)
        return 1 / math.sqrt(config.hidden_size)

    def _scale(self, name: str) -> float:
        # With sub-norms the norms carry the gain, as in the real 2B-4T, whose scales are between 1 and 2.
        if self.config.sub_norms:
            return float(self._random(name).uniform(1, 2))
        return self._gain(name) / math.sqrt(1 - ZEROS)

    def _norm(self, name: str) -> float:
        layer, _, part = name.rpartition(".")
        if name == "norm":
            return LOGIT_STD / (EMBED_STD * math.sqrt(self.config.hidden_size))
        if not self.config.sub_norms:
            return 1.0
        fed = {"attn_norm": "q", "mlp_norm": "up", "attn_sub_norm": "o", "mlp_sub_norm": "down"}[part]
        return self._gain(f"{layer}.{fed}") / self._scale(f"{layer}.{fed}") / math.sqrt(1 - ZEROS)

    def _std(self, name: str) -> float:
        return self._gain(name) if name.rpartition(".")[2] in PROJECTIONS else EMBED_STD

    def _random(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode())]))

    @cached_property
    def _trits(self) -> NDArray[np.uint8]:
        random = self._random("trits")
        signs = random.choice(np.array([-1, 1], np.int8), (4, 1 << 16))
        codes: NDArray[np.int8] = signs * (random.random((4, 1 << 16)) >= ZEROS)
        return pack_quarters(codes).reshape(-1)

    def _normal(self, std: float) -> NDArray[np.uint16]:
        return self._bits(self._random("normal").normal(0, std, 1 << 16))

    def _bits(self, values: NDArray[Any]) -> NDArray[np.uint16]:
        return to_bfloat16(values.astype(np.float32))

    def _looked_up(self, name: str, shape: tuple[int, ...], table: NDArray[Any]) -> Iterator[NDArray[Any]]:
        bits = np.random.SFC64([self.seed, zlib.crc32(name.encode())])
        total = math.prod(shape)
        for start in range(0, total, CHUNK):
            count = min(CHUNK, total - start)
            yield table[bits.random_raw(-(-count // 4)).view(np.uint16)[:count]]


def _once(values: NDArray[Any]) -> list[NDArray[Any]]:
    return [values]
