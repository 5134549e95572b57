"""params.json of a Meta checkpoint as a ModelConfig."""

from __future__ import annotations

from collections.abc import Callable

from bitnet_inference.formats.checkpoint import ModelConfig, RopeScaling
from bitnet_inference.formats.json_files import Fields
from bitnet_inference.formats.sizes import MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_VOCAB

_LLAMA2_VOCAB = 32000
_FACTOR = 8.0  # of Llama 3.1: Meta's code has it and RopeScaling's other numbers, its files have not
# Llama 3.2 with 1B and 3B, which were trained with another factor than that code has: hidden size and layers.
_LLAMA32_SIZES, _LLAMA32_FACTOR = ((2048, 16), (3072, 28)), 32.0
_KNOWN = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "rope_theta", "rope_scaling_factor", "use_scaled_rope",
}  # fmt: skip


def read_params(
    params: Fields, num_rows: Callable[[int], int], tied: bool = False, has_pieces: bool = False
) -> ModelConfig:
    """The ModelConfig of a params.json; `num_rows` of the hidden size gives the rows of the embeddings.

    `tied`: the embeddings are the head. `has_pieces`: the tokenizer beside it is SentencePiece's, not Llama 3's.

    No file says how long texts may be: this is what the models were published with. Pieces, or a vocabulary of 32000,
    tell Llama 2, whose files lack rope_theta too, and Code Llama, whose say 1,000,000. Raises FormatError for values
    that contradict each other or cannot be.
    """
    hidden = params.size("dim", MAX_HIDDEN)
    vocab_size = _vocab_size(params, num_rows(hidden))
    num_heads = params.size("n_heads", MAX_HEADS)
    num_kv_heads = params.size("n_kv_heads", MAX_HEADS, num_heads)
    head_dim = hidden // num_heads
    if hidden % num_heads or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise params.wrong("dim", f"is not {num_heads} heads of an even number up to {MAX_HEAD_DIM}: correct it")
    if num_heads % num_kv_heads:
        raise params.wrong("n_kv_heads", f"does not divide n_heads, {num_heads}: correct one")
    num_layers = params.size("n_layers", MAX_LAYERS)
    is_llama2, scaled = has_pieces or vocab_size == _LLAMA2_VOCAB, params.flag("use_scaled_rope")
    rope_theta = params.positive("rope_theta", 10000.0 if is_llama2 else 500000.0)
    of_llama2 = 16384 if rope_theta == 1e6 else 4096
    factor = _LLAMA32_FACTOR if (hidden, num_layers) in _LLAMA32_SIZES else _FACTOR
    scaling = RopeScaling(kind="llama3", factor=params.positive("rope_scaling_factor", factor)) if scaled else None
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_intermediate_size(params, hidden),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=131072 if scaled else of_llama2 if is_llama2 else 8192,
        activation="silu",
        norm_eps=params.positive("norm_eps", 1e-5),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        tie_embeddings=tied,
    )


def ignored_keys(params: Fields) -> list[str]:
    """The keys that nothing here reads, sorted."""
    return sorted(params.values.keys() - _KNOWN)


def _vocab_size(params: Fields, num_rows: int) -> int:
    if params.values.get("vocab_size") not in (-1, None):
        return params.size("vocab_size", MAX_VOCAB)
    if not 1 <= num_rows <= MAX_VOCAB:
        raise params.wrong("vocab_size", f"leaves it to the embeddings, which have {num_rows} rows: correct it")
    return num_rows


def _intermediate_size(params: Fields, hidden: int) -> int:
    """Two thirds of 4 * dim, times ffn_dim_multiplier, each rounded down, then up to a multiple of multiple_of."""
    size = 2 * 4 * hidden // 3
    if "ffn_dim_multiplier" in params:
        size = int(params.positive("ffn_dim_multiplier") * size)
    multiple = params.size("multiple_of", MAX_INTERMEDIATE, 256)
    size = -(-size // multiple) * multiple
    if not 0 < size <= MAX_INTERMEDIATE:
        key = "ffn_dim_multiplier" if "ffn_dim_multiplier" in params else "multiple_of"
        raise params.wrong(key, f"makes an MLP of {size:.6g} features, not 1 to {MAX_INTERMEDIATE}: correct it")
    return size
