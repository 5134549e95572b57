"""GGUF files by others: PyPI's `gguf` writes and dequantises them, llama.cpp's own library quantises."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from format_models import Family, Floats, head_dim
from llama_cpp_peer import SILENCE
from numpy.typing import NDArray

I2_S, Q1_0, Q2_0 = 36, 41, 42
GROUPS = {"Q2_0 groups": 64, "TQ2_0 groups": 256}  # columns that share a scale, which differ from group to group
TERNARY = {"TQ1_0": 34, "TQ2_0": 35, "TQ2_0 groups": 35, "Q2_0": Q2_0, "Q2_0 groups": Q2_0, "Q1_0": Q1_0,
           "I2_S": I2_S, "I2_S ARM": I2_S}  # fmt: skip
FLOATS = {"F32": 0, "F16": 1, "BF16": 30, "Q8_0": 8, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q4_K": 12,
          "Q5_K": 13, "Q6_K": 14}  # fmt: skip
TYPES = FLOATS | TERNARY
_RENAMED = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}  # as the library knows them
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


def architecture(family: Family) -> str:
    """The `general.architecture` of a family's files."""
    if family.spec.family != "bitnet":
        return str(family.spec.family)
    return "bitnet" if family.config.hidden_act == "silu" else "bitnet-b1.58"


def is_possible(family: Family) -> bool:
    """Whether a file can say what the model is: BitNet has no head of its own, norms of projections no epsilon."""
    said = family.spec.quantization or {}
    eps = said.get("rms_norm_eps", 1e-6) if said.get("use_rms_norm") else family.config.rms_norm_eps
    return (family.spec.family != "bitnet" or family.is_tied) and eps == family.config.rms_norm_eps


def write(family: Family, kind: str, path: Path) -> dict[str, tuple[Floats, bool]]:
    """Write a file whose matrices are of a type of TYPES. Returns its weights, as others read them, by module."""
    writer = _writer(family, path)
    names = gguf.get_tensor_name_map(_map_of(family), family.config.num_hidden_layers)
    found = {}
    for module, values, is_ternary in family.weights():
        name = _name(names, module)
        if values.ndim == 1:
            writer.add_tensor(name, _norm(family, module, values))
            continue
        stored = "F16" if kind in TERNARY and not is_ternary else kind
        data, floats = encode(_in_pairs(family, module, values), stored)
        _add(writer, name, data, values.shape, TYPES[stored])
        found[module] = _as_meant(family, module, _in_halves(family, module, floats), stored)
    if (factors := _rope_factors(family)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def encode(values: Floats, kind: str) -> tuple[NDArray[np.uint8], Floats]:
    """The bytes of a matrix in a type, and what others read from them."""
    if kind.startswith("I2_S"):
        return _i2_s(values, 64 if kind == "I2_S ARM" else 128), values
    type_id = TYPES[kind]
    if kind in GROUPS:
        factors = np.random.default_rng(0).choice([0.5, 1.0, 1.25], (len(values), values.shape[1] // GROUPS[kind]))
        values = values * np.repeat(factors, GROUPS[kind], axis=1).astype(np.float32)
    data = _quantised(values, type_id)
    if type_id in (Q1_0, Q2_0):
        return data, _values_by_hand(data, values.shape, type_id)
    return data, gguf.dequantize(data, gguf.GGMLQuantizationType(type_id)).reshape(values.shape)


def quantise_file(source: Path, target: Path, kind: str) -> None:
    """llama.cpp's own program on a whole file: "Q4_K_M" and its like. Raises OSError."""
    llama_cpp.llama_log_set(SILENCE, None)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)):
        raise OSError(f"{source}: llama.cpp cannot make {kind} of it")


def read(family: Family, path: Path) -> dict[str, tuple[Floats, bool]]:
    """The weights of a file of types that the library knows, by module."""
    names = gguf.get_tensor_name_map(_map_of(family), family.config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = {}
    for module, values, _ in family.weights():
        if values.ndim == 2:
            tensor = tensors[_name(names, module)]
            floats = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape).astype(np.float32)
            found[module] = _as_meant(family, module, _in_halves(family, module, floats), tensor.tensor_type.name)
    return found


def _as_meant(family: Family, module: str, values: Floats, kind: str) -> tuple[Floats, bool]:
    """Projections of BitNet are ternary in whatever type; elsewhere the type tells."""
    spec = family.spec
    always = spec.family == "bitnet" or bool((spec.quantization or {}).get("use_rms_norm"))
    if kind in TERNARY or not (always and module.endswith("_proj")):
        is_head = kind.startswith(("Q1_0", "Q2_0")) and module == "lm_head"  # which may be any weights
        return values, kind in TERNARY and not is_head
    largest = np.abs(values).max()
    return (np.sign(values) * (np.abs(values) > largest / 2) * largest).astype(np.float32), True


def _quantised(values: Floats, type_id: int) -> NDArray[np.uint8]:
    """By the library of llama.cpp itself."""
    if type_id == FLOATS["F32"]:
        return np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    kind = gguf.GGMLQuantizationType.Q4_0 if type_id == Q2_0 else gguf.GGMLQuantizationType(type_id)
    num_values, num_bytes = (64, 18) if type_id == Q2_0 else gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros(values.size // num_values * num_bytes, np.uint8)
    source, pointer = np.ascontiguousarray(values, np.float32), ctypes.c_void_p
    quantise = llama_cpp.llama_cpp._lib.ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer]
    written = quantise(type_id, source.ctypes.data, data.ctypes.data, 0, *values.shape, None)
    assert written == data.size, "the library wrote another number of bytes"
    return data


def _values_by_hand(data: NDArray[np.uint8], shape: tuple[int, ...], type_id: int) -> Floats:
    """For the library of PyPI does not decode these types: a float16, then codes of 1 bit (Q1_0) or of 2."""
    blocks = data.reshape(-1, 18)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.int8)
    codes = 2 * bits - 1 if type_id == Q1_0 else bits.reshape(len(blocks), 64, 2) @ np.array([1, 2]) - 1
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    values: Floats = (codes * scales).reshape(shape).astype(np.float32)
    return values


def _i2_s(values: Floats, block: int) -> NDArray[np.uint8]:
    """By hand, as Microsoft's converters have it: a flat array, in blocks whose first quarter is the highest bits."""
    scale = np.abs(values).max()
    fields = (np.sign(values).astype(np.int8) + 1).reshape(-1, 4, block // 4).astype(np.uint8)
    packed = (fields << np.array([6, 4, 2, 0], np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    tail = np.zeros(8, np.float32)
    tail[0] = scale
    return np.concatenate([packed.reshape(-1), tail.view(np.uint8)])


def _add(writer: Any, name: str, data: NDArray[np.uint8], shape: tuple[int, ...], type_id: int) -> None:
    """A tensor of any type: the library writes the bytes, and of the types that it knows not, the number."""
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.I8)
    info = writer.tensors[-1][name]
    info.shape, info.dtype = shape, type_id


def _map_of(family: Family) -> Any:
    kinds = {"bitnet": "BITNET", "llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gemma3": "GEMMA3"}
    return gguf.MODEL_ARCH[kinds[family.spec.family]]


def _name(names: Any, module: str) -> str:
    for ours, theirs in _RENAMED.items():
        module = module.replace(ours, theirs)
    if module.endswith(".bias"):
        return f"{names.get_name(module.removesuffix('.bias'))}.bias"
    found = names.get_name(module.removesuffix(".rms_norm"))
    return f"{found}{'_norm_in' if module.endswith('.rms_norm') else ''}.weight"


def _norm(family: Family, module: str, values: Floats) -> Floats:
    """Gemma's own norms multiply by 1 + w, and its files hold that."""
    own = family.spec.family == "gemma3" and not module.endswith("rms_norm")
    return values + np.float32(1) if own else values


def _in_pairs(family: Family, module: str, values: Floats) -> Floats:
    return _moved(family, module, values, 2)


def _in_halves(family: Family, module: str, values: Floats) -> Floats:
    return _moved(family, module, values, head_dim(family) // 2)


def _moved(family: Family, module: str, values: Floats, num_parts: int) -> Floats:
    """The rows of q and k of Llama, between two halves of a head and pairs that are rotated together."""
    if family.spec.family != "llama" or not module.endswith(("q_proj", "k_proj")):
        return values
    heads = values.reshape(-1, num_parts, head_dim(family) // num_parts, values.shape[1])
    return heads.swapaxes(1, 2).reshape(values.shape)


def _rope_factors(family: Family) -> Floats | None:
    """What the frequencies of Llama 3.1 are divided by, as Transformers computes them."""
    parameters = dict(getattr(family.config, "rope_parameters", None) or {})
    if parameters.get("rope_type") != "llama3":
        return None
    scaled = family.model.model.rotary_emb.inv_freq.float().numpy()
    exponents = np.arange(len(scaled)) / len(scaled)
    factors: Floats = (float(parameters["rope_theta"]) ** -exponents / scaled).astype(np.float32)
    return factors


def _writer(family: Family, path: Path) -> Any:
    config = family.config
    rotary = dict(config.rope_parameters)
    whole = rotary.get("full_attention", rotary)
    writer = gguf.GGUFWriter(path, architecture(family))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(family))
    writer.add_value_length(head_dim(family))
    writer.add_rope_dimension_count(head_dim(family))
    writer.add_rope_freq_base(float(whole["rope_theta"]))
    if whole["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(whole["factor"]))
    if "sliding_attention" in rotary:
        writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_words(writer, family)
    return writer


def _add_words(writer: Any, family: Family) -> None:
    spec = json.loads((family.folder / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    by_id = {number: token for token, number in (spec["model"]["vocab"] | added).items()}
    size = family.config.vocab_size
    kinds = [_UNUSED if each not in by_id else _CONTROL if by_id[each] in added else _NORMAL for each in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([by_id.get(each, f"[PAD{each}]") for each in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_bos_token_id(family.config.bos_token_id)
    writer.add_eos_token_id(family.config.eos_token_id)
    writer.add_add_bos_token(True)
