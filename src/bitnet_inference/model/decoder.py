"""What a decoder-only transformer is, once, in the verbs of `Ops`. A family is fields of its ModelConfig."""

from __future__ import annotations

from bitnet_inference.formats.checkpoint import ModelConfig, bias_of
from bitnet_inference.model.contract import Ops, Tensor


def decoder(ops: Ops[Tensor], config: ModelConfig, layers: range | None = None, hidden: Tensor | None = None) -> Tensor:
    """From token ids to the hidden states before the final norm: [T, hidden].

    Through all layers, or through these alone: then `hidden` is what those before them have made of the token ids, None
    where there are none before.
    """
    x = ops.embed(ops.weight(("embed",)), config.embed_scale) if hidden is None else hidden
    for layer in range(config.num_layers) if layers is None else layers:
        x = ops.add(x, _attention(ops, config, layer, x))
        x = ops.add(x, _mlp(ops, config, layer, x))
    return x


def final_norm(ops: Ops[Tensor], config: ModelConfig, x: Tensor) -> Tensor:
    """The norm after the last layer: [T, hidden]."""
    return ops.norm(x, "norm", config.norm_eps)


def head(ops: Ops[Tensor], config: ModelConfig, x: Tensor) -> Tensor:
    """From hidden states before the final norm to logits: [T, vocab]."""
    name = "embed" if config.tie_embeddings else "head"
    (logits,) = ops.linear(final_norm(ops, config, x), ops.weight((name,)))
    return logits


def _attention(ops: Ops[Tensor], config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    at = f"layers.{layer}."
    a = ops.norm(x, at + "attn_norm", config.norm_eps)
    q, k, v = _projections(ops, config, a, (at + "q", at + "k", at + "v"), config.qkv_bias)
    if config.head_norms:
        q = ops.norm(q, at + "q_norm", config.norm_eps)
        k = ops.norm(k, at + "k_norm", config.norm_eps)
    local = config.window_of(layer) > 0
    o = ops.attend(ops.rope(q, local), ops.rope(k, local), v, layer)
    if config.sub_norms:
        o = ops.norm(o, at + "attn_sub_norm", config.norm_eps)
    (y,) = _projections(ops, config, o, (at + "o",))
    return ops.norm(y, at + "attn_post_norm", config.norm_eps) if config.post_norms else y


def _mlp(ops: Ops[Tensor], config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    at = f"layers.{layer}."
    b = ops.norm(x, at + "mlp_norm", config.norm_eps)
    if config.experts is None:
        y = _gated(ops, config, at, b)
    else:
        (scores,) = ops.linear(b, ops.weight((at + "router",)))
        y = ops.mix(b, scores, config.experts, lambda ops, e, rows: _gated(ops, config, f"{at}experts.{e}.", rows))
    return ops.norm(y, at + "mlp_post_norm", config.norm_eps) if config.post_norms else y


def _gated(ops: Ops[Tensor], config: ModelConfig, at: str, x: Tensor) -> Tensor:
    gate, up = _projections(ops, config, x, (at + "gate", at + "up"))
    f = ops.gate(gate, up, config.activation)
    if config.sub_norms:
        f = ops.norm(f, at + "mlp_sub_norm", config.norm_eps)
    (y,) = _projections(ops, config, f, (at + "down",))
    return y


def _projections(
    ops: Ops[Tensor], config: ModelConfig, x: Tensor, names: tuple[str, ...], has_bias: bool = False
) -> tuple[Tensor, ...]:
    """One stacked product; where each projection has a norm of its own on its input, one product each."""

    def product(x: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        return ops.linear(x, ops.weight(names), tuple(map(bias_of, names)) if has_bias else ())

    if not config.linear_norm:
        return product(x, names)
    normed = [ops.norm(x, name + ".norm", config.linear_norm_eps) for name in names]
    return tuple(product(y, (name,))[0] for y, name in zip(normed, names, strict=True))
