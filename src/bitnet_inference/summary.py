"""What a model is, what it needs, and what is wrong with it, without loading it: for `bitnet inspect`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from bitnet_inference.amounts import told_bytes, told_count
from bitnet_inference.backends import decided
from bitnet_inference.backends.packing import code_bytes, is_coded
from bitnet_inference.config import EngineConfig
from bitnet_inference.coreml_summary import describe_coreml
from bitnet_inference.errors import BitNetError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Checkpoint, ModelConfig, expected_shapes
from bitnet_inference.formats.coreml import CoreMLCheckpoint
from bitnet_inference.formats.kinds import refuse_graph
from bitnet_inference.formats.onnx import OnnxCheckpoint
from bitnet_inference.formats.packed import PackedCheckpoint
from bitnet_inference.model.loader import describe
from bitnet_inference.model_folder import defaults_of, load_tokenizer
from bitnet_inference.onnx_summary import describe_onnx
from bitnet_inference.text.chat import Chat
from bitnet_inference.text.folder import lack_of_words
from bitnet_inference.text.tokenizer import Tokenizer
from bitnet_inference.text.vocab import notes


@dataclass(frozen=True)
class Summary:
    """Lines to read, in titled groups of (name, value), and everything that is wrong, a line each."""

    groups: dict[str, list[tuple[str, str]]]
    problems: list[str]


def summarize(path: str | Path) -> Summary:
    """Look at a model folder. Raises what opening its checkpoint raises; all further mistakes are problems."""
    path = Path(path)
    checkpoint = open_checkpoint(path)
    problems = checkpoint.check()
    groups = {"model": _model(checkpoint), "memory": [*_memory(checkpoint), ("runs on", _runs_on(checkpoint))]}
    try:
        tokenizer = load_tokenizer(checkpoint)
        groups["words"] = [*_words(tokenizer), *(("note", note) for note in notes(checkpoint.metadata))]
        if beyond := tokenizer.added_beyond(checkpoint.config.vocab_size):
            groups["words"].append(("note", f"the model has no rows for added tokens: {', '.join(beyond[:3])}"))
        problems += Chat(tokenizer).broken() if tokenizer.has_words else [str(lack_of_words(tokenizer.path))]
    except BitNetError as error:
        problems.append(str(error))
    return Summary(groups, problems)


def changed_tensors(path: str | Path) -> list[str]:
    """Read a packed file whole; a line for each tensor that is not as it was written. Raises Unsupported for others."""
    checkpoint = open_checkpoint(path)
    if not isinstance(checkpoint, PackedCheckpoint):
        raise Unsupported(f"{path}: says no hashes that could be verified: only packed files do")
    return list(checkpoint.verify())


def plan_of(path: str | Path) -> str:
    """The recorded computation of a model, before and after fusion."""
    checkpoint = open_checkpoint(path)
    refuse_graph(checkpoint)
    return describe(checkpoint)


def _model(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    if isinstance(checkpoint, OnnxCheckpoint):
        return describe_onnx(checkpoint)
    if isinstance(checkpoint, CoreMLCheckpoint):
        return describe_coreml(checkpoint)
    config = checkpoint.config
    ternary = sum(_num_ternary(checkpoint))
    lines = [
        ("path", str(checkpoint.path)),
        ("family", _family(config)),
        (
            "parameters",
            f"{told_count(checkpoint.num_parameters)}, {100 * ternary / checkpoint.num_parameters:.1f}% ternary",
        ),
        ("layers", _layers(config)),
        ("attention", _attention(config)),
        ("vocabulary", f"{config.vocab_size} tokens"),
        ("context", f"{config.max_positions} tokens, {_rope(config)}"),
    ]
    if config.pooling is not None:
        lines.append(("embeddings", f"pooled by {'the mean' if config.pooling == 'mean' else 'the last token'}"))
    return [*lines, *(("note", note) for note in checkpoint.notes())]


def _family(config: ModelConfig) -> str:
    extras: list[str] = [config.activation]
    extras += ["sub-norms"] if config.sub_norms else []
    extras += ["a norm before every projection"] if config.linear_norm else []
    extras += ["norms of heads"] if config.head_norms else []
    extras += ["biases of q, k and v"] if config.qkv_bias else []
    extras += ["norms of what is added"] if config.post_norms else []
    extras += [f"embeddings times {config.embed_scale:g}"] if config.embed_scale != 1 else []
    extras += ["tied head"] if config.tie_embeddings else []
    return f"{config.family} ({', '.join(extras)})"


def _layers(config: ModelConfig) -> str:
    text = f"{config.num_layers} of hidden size {config.hidden_size}, inner size {config.intermediate_size}"
    experts = config.experts
    return text if experts is None else f"{text}, {experts.count} experts each, {experts.used} for a token"


def _attention(config: ModelConfig) -> str:
    text = f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} for keys and values"
    if config.attention_scale is not None:
        text += f", scores times {config.attention_scale:g}"
    if config.local is not None:
        text += f", {len(config.local.layers)} layers see {config.local.window} tokens (rope base "
        text += f"{config.local.rope_theta:g}"
        text += f" for {config.rotary_dim} features of a head)" if config.rotary_dim else ")"
    return text


def _rope(config: ModelConfig) -> str:
    if config.plain_global:
        return "no rotations in layers that see all of it"
    text = f"rope base {config.rope_theta:g}"
    scaling = config.rope_scaling
    return text if scaling is None else f"{text}, {scaling.kind} scaling by {scaling.factor:g}"


def _memory(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    config = checkpoint.config
    a_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    if isinstance(checkpoint, OnnxCheckpoint):
        dtype = checkpoint.decoder.cache_dtype
        cache = f"{told_bytes(1000 * a_token * (4 if dtype == 'float32' else 2))} ({dtype}) for 1000 tokens"
        return [("files", told_bytes(checkpoint.num_bytes)), ("cache", cache)]
    if isinstance(checkpoint, CoreMLCheckpoint):
        state = told_bytes(2 * a_token * config.max_positions)
        return [
            ("files", told_bytes(checkpoint.num_bytes)),
            ("state", f"{state} (float16) for {config.max_positions} tokens"),
        ]
    ternary, floats = map(told_bytes, _weight_bytes(checkpoint))
    bytes_a_number = {"bfloat16": 2, "float32": 4, "int8": 1 + 4 / checkpoint.config.head_dim}  # and its scale
    caches = [f"{told_bytes(int(1000 * a_token * size))} ({dtype})" for dtype, size in bytes_a_number.items()]
    return [
        ("files", told_bytes(checkpoint.num_bytes)),
        ("loaded", f"{ternary} of ternary weights at 2 bits or less, {floats} of floats"),
        ("cache", f"{' or '.join(caches)} for 1000 tokens"),
    ]


def _weight_bytes(checkpoint: Checkpoint) -> tuple[int, int]:
    """Of ternary codes with their scales, and of floats: matrices as they are read, vectors in float32."""
    ternary = floats = 0
    for name, shape in expected_shapes(checkpoint.config):
        if len(shape) == 2 and (checkpoint.is_ternary(name) or is_coded(checkpoint, name)):
            ternary += code_bytes(checkpoint, name, shape, "u2")
        else:
            floats += math.prod(shape) * (4 if len(shape) == 1 or checkpoint.dtype(name) == "float32" else 2)
    return ternary, floats


def _runs_on(checkpoint: Checkpoint) -> str:
    try:
        choice = decided(checkpoint, EngineConfig.from_env())
    except BitNetError as error:
        return f"nothing here: {error}"
    return f"{choice.device}: {choice.why}"


def _num_ternary(checkpoint: Checkpoint) -> list[int]:
    shapes = expected_shapes(checkpoint.config)
    return [math.prod(shape) for name, shape in shapes if len(shape) == 2 and checkpoint.is_ternary(name)]


def _words(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    def shown(token_id: int | None) -> str:
        if token_id is None or not tokenizer.has_words:
            return "none" if token_id is None else str(token_id)
        return f"{tokenizer.id_to_token(token_id)} ({token_id})"

    params = defaults_of(tokenizer)
    sampling = "greedy" if params.is_greedy else f"temperature {params.temperature:g}, top-p {params.top_p:g}"
    words = f"{tokenizer.vocab_size} tokens, {len(tokenizer.special)} special"
    templates = ", ".join(sorted(tokenizer.templates)) or "none: plain prompts only"
    return [
        ("tokenizer", words if tokenizer.has_words else "none: token ids alone"),
        ("begin of text", shown(tokenizer.bos_id)),
        ("end of text", ", ".join(map(shown, tokenizer.eos_ids)) or "none"),
        ("chat template", templates),
        ("sampling", f"{sampling}, at most {params.max_tokens} tokens"),
    ]
