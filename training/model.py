"""The story-teller in plain torch: a BitNet b1.58 decoder that quantises in its forward pass while it trains.

The arithmetic is that of Hugging Face's BitNetForCausalLM: RMSNorm, RoPE on half-rotated heads, grouped queries,
squared ReLU, sub-norms before the output and the down projection, and seven ternary projections a layer. Shapes: B
rows, T positions, C hidden features, K key-value heads, D features a head.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The shape of the model; every size is a multiple of 32, which suits the engine's kernels."""

    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def as_dict(self) -> dict[str, float]:
        """The fields as a plain dictionary, for checkpoints."""
        return asdict(self)


def ternarize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A master weight [out, in] as (ternary matrix in {-1, 0, 1}, scale): absmean over the whole tensor, in float32."""
    scale = weight.float().abs().mean().clamp(min=1e-5)
    return (weight.float() / scale).round().clamp(-1, 1), scale


class BitLinear(nn.Module):
    """y = (int8(x) @ ternary(W)^T) * m / s, with s = 127 / max|x| a token and m = mean|W|.

    Gradients pass straight through the rounding. Both factors of the product are small integers, exact in bfloat16,
    so a product in bfloat16 changes no code.
    """

    def __init__(self, num_in: int, num_out: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) * gain * num_in**-0.5)
        self.product_dtype = torch.float32

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features [..., in] as (codes [..., in] of int8 size, s [..., 1]), codes carrying the gradient of x * s."""
        with torch.no_grad():
            s = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5).reciprocal() * 127
        scaled = x * s
        return scaled + (scaled.round().clamp(-128, 127) - scaled).detach(), s

    def forward(self, x: Tensor) -> Tensor:
        """Features [..., in] to [..., out]."""
        codes, s = self.quantize_input(x)
        with torch.no_grad():
            ternary, m = ternarize(self.weight)
        scaled = self.weight / m
        ternary = scaled + (ternary - scaled).detach()
        product = functional.linear(codes.to(self.product_dtype), ternary.to(self.product_dtype))
        return product.float() * (m / s)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Features [..., size] to the same shape."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rope_table(config: Config) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, D] with inv_freq_j = theta^(-2j / D), the halves repeated (NeoX order)."""
    steps = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(config.max_positions).float(), config.rope_theta**-steps)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, heads, T, D]: dimension j pairs with j + D/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with a norm over all heads' output before the output projection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = BitLinear(config.hidden_size, width)
        self.k_proj = BitLinear(config.hidden_size, kv_width)
        self.v_proj = BitLinear(config.hidden_size, kv_width)
        self.o_proj = BitLinear(width, config.hidden_size, gain=(2 * config.num_layers) ** -0.5)
        self.attn_sub_norm = RMSNorm(width, config.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Features [B, T, C] to [B, T, C]."""
        rows, length, _ = x.shape
        q, k, v = (
            proj(x).view(rows, length, -1, self.config.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *rope), rotate(k, *rope)
        dtype = self.q_proj.product_dtype
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        group = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(rows, length, -1).float()
        return self.o_proj(self.attn_sub_norm(out))


class FeedForward(nn.Module):
    """down(norm(relu(gate(x))^2 * up(x)))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = BitLinear(config.hidden_size, config.intermediate_size)
        self.up_proj = BitLinear(config.hidden_size, config.intermediate_size)
        self.down_proj = BitLinear(config.intermediate_size, config.hidden_size, gain=(2 * config.num_layers) ** -0.5)
        self.ffn_sub_norm = RMSNorm(config.intermediate_size, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, T, C] to [B, T, C]."""
        return self.down_proj(self.ffn_sub_norm(functional.relu(self.gate_proj(x)).square() * self.up_proj(x)))


class Layer(nn.Module):
    """One decoder layer; the names are those of the Hugging Face checkpoint."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream [B, T, C], float32, after attention and feed-forward."""
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class StoryTeller(nn.Module):
    """Embedding, layers, final norm; the head is the embedding again (tied) and not quantised."""

    def __init__(self, config: Config, product_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        nn.init.normal_(self.embed_tokens.weight, std=config.hidden_size**-0.5)
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.product_dtype = product_dtype
        for module in self.modules():
            if isinstance(module, BitLinear):
                module.product_dtype = product_dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, T] at positions 0.. to logits [B, T, vocabulary], float32."""
        rope = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rope)
        x = self.norm(x).to(self.product_dtype)
        return functional.linear(x, self.embed_tokens.weight.to(self.product_dtype)).float()
