"""The same shape in bfloat16, in torch: cuBLAS, its own attention, a whole step in one CUDA graph."""

from __future__ import annotations

import torch
from gpu_clock import seconds_each
from torch.nn import functional

from bitnet_inference.formats.checkpoint import ModelConfig


class BfloatCopy:
    """A BitNet b1.58 of a given shape with random weights, decoding one token a sequence; only its time counts."""

    def __init__(self, config: ModelConfig, num_sequences: int, num_positions: int, device: torch.device) -> None:
        """Takes 2 bytes a weight, and a cache of so many positions for each sequence."""
        self.config, self.device = config, device
        self._tokens = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        width, heads, inner = config.hidden_size, config.num_kv_heads * config.head_dim, config.intermediate_size
        self._embed = self._matrix(config.vocab_size, width)
        self._layers = [
            (self._matrix(width + 2 * heads, width), self._matrix(width, width), self._matrix(2 * inner, width),
             self._matrix(width, inner), *self._cache(num_sequences, num_positions))
            for _ in range(config.num_layers)
        ]  # fmt: skip
        self._norms = {size: torch.ones(size, dtype=torch.bfloat16, device=device) for size in {width, inner}}

    def seconds_a_step(self) -> float:
        """A step of all sequences, with the choice of the best token."""
        with torch.inference_mode():
            return seconds_each([self._step], self.device)

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=self.device) * columns**-0.5

    def _cache(self, num_sequences: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (num_sequences, self.config.num_kv_heads, num_positions, self.config.head_dim)
        return (torch.zeros(shape, dtype=torch.bfloat16, device=self.device),
                torch.zeros(shape, dtype=torch.bfloat16, device=self.device))  # fmt: skip

    def _step(self) -> None:
        x = self._embed[self._tokens]
        for qkv, o, gate_up, down, keys, values in self._layers:
            x = x + functional.linear(self._norm(self._attend(functional.linear(self._norm(x), qkv), keys, values)), o)
            gate, up = functional.linear(self._norm(x), gate_up).chunk(2, dim=-1)
            x = x + functional.linear(self._norm(functional.relu(gate).square() * up), down)
        self._tokens.copy_(functional.linear(self._norm(x), self._embed).argmax(-1))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._norms[x.shape[-1]], 1e-5)

    def _attend(self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        heads, size = self.config.num_kv_heads, self.config.head_dim
        q, k, v = qkv.split([self.config.num_heads * size, heads * size, heads * size], dim=-1)
        keys[:, :, 0] = k.view(-1, heads, size)
        values[:, :, 0] = v.view(-1, heads, size)
        q = q.view(len(q), -1, 1, size)
        return functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True).reshape(len(q), -1)
