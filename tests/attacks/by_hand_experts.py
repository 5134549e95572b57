"""Attacks on models with several MLPs a layer: what files say of experts, their stacks, their scales, the router."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import readers
from by_hand_gguf import gguf_key, gguf_text, with_keys
from mutate import gguf_fields
from plants import Attack, edited, in_header, patched, tensor_bytes
from readers import files_of

_FILE, _LAYER = "model.safetensors", "model.layers.0.mlp."
_MLX = f"{_LAYER}switch_mlp."
_SIZES = (0, 1, 2, 4, -1, 255, 256, 257, 10**9, 1 << 31, 1 << 63, 10**400, True, "3", 1.5, [3], {}, float("nan"))


def experts() -> Iterator[tuple[str, Attack]]:
    """By name."""
    yield from _configs()
    yield from _stacks()
    yield from _scales()
    yield from _keys()
    yield from _tensors()
    yield from _packed()


def _configs() -> Iterator[tuple[str, Attack]]:
    for seed, count in (("mlx-experts", "num_experts"), ("hf-experts", "num_local_experts")):
        for value in _SIZES:
            yield f"{count} = {value!r:.20}", _config(seed, {count: value})
            is_sound = type(value) is int and value in (1, 2)
            yield f"used = {value!r:.20}", _config(seed, {"num_experts_per_tok": value}, is_sound)
            yield f"inner = {value!r:.20}", _config(seed, {"moe_intermediate_size": value})
        for key in ("num_shared_experts", "n_shared_experts", "first_k_dense_replace", "mlp_only_layers"):
            for value in (1, -1, True, "0", [0], {"a": 0}, 1.5, float("nan"), 10**400):
                yield f"{key} = {value!r:.20}", _config(seed, {key: value})
        for value in (0, 2, -1, 10**9, True, "1", [1], 1.0):
            yield f"decoder_sparse_step = {value!r}", _config(seed, {"decoder_sparse_step": value})
        for key in ("norm_topk_prob", "moe_router_enable_expert_bias"):
            for value in (0, "true", [], 1.0, {}):
                yield f"{key} = {value!r}", _config(seed, {key: value})
        for count_now, layers in ((1 << 14, 1), (32, 512), (128, 512)):
            changes = {count: count_now, "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
            yield f"{count_now} experts in each of {layers} layers", _config(seed, changes)
        yield f"{seed}: norms of projections", _config(seed, {"quantization_config": _NORMED, "quantization": None})
    for skipped in ("experts.0.gate_proj", "experts.1.down_proj", "model.layers.0.mlp.experts.2"):
        said = _NORMED | {"use_rms_norm": False, "modules_to_not_convert": ["lm_head", skipped]}
        yield f"{skipped} is not ternary, as others are", _config("hf-experts", {"quantization_config": said})
    yield "two numbers of experts", _config("hf-experts", {"num_experts": 4}, True)
    for value in (0, -1, 1e-300, 2, 0.1, 1e300, True, "0.5", [0.5], float("nan")):
        yield f"partial_rotary_factor = {value!r}", _config("mlx-experts", {"partial_rotary_factor": value})
    for types in ([], ["full_attention"] * 2, ["a"], "full_attention", [1], {"0": 1}, ["full_attention"] * 100_000):
        yield f"layer_types = {types!r:.40}", _config("mlx-experts", {"layer_types": types}, types == [])
    for value in (0, "true", [], {}):
        yield f"nope = {value!r}", _config("mlx-experts", {"nope_on_global_attention": value})
    for value in (0, -1, 1 << 23, 1 << 31, True, "8"):
        yield f"sliding_window = {value!r}", _config("mlx-experts", {"sliding_window": value}, value == 1 << 23)


_NORMED = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online",
           "use_rms_norm": True}  # fmt: skip


def _config(seed: str, changes: dict[str, Any], harmless: bool = False) -> Attack:
    return Attack(seed, edited("config.json", lambda config: config.update(changes)), readers.run, harmless)


def _stacks() -> Iterator[tuple[str, Attack]]:
    """Of folders; the bytes stay where they are."""
    words, alpha, down = f"{_MLX}gate_proj.weight", f"{_MLX}gate_proj.row_alpha", f"{_LAYER}experts.down_proj"
    both = f"{_LAYER}experts.gate_up_proj"
    for seed, name, shapes in (
        ("mlx-experts", words, ([32, 3, 2], [96, 2], [192], [1, 96, 2], [2, 48, 2], [6, 16, 2], [3, 2, 32], [3, 64],
                                [3, 32, 2, 1], [1, 3, 32, 2])),
        ("mlx-experts", alpha, ([96], [32, 3], [96, 1], [3, 32, 1], [3, 1, 32], [1, 96])),
        ("hf-experts", down, ([96, 32], [32, 3, 32], [3, 64, 16], [3, 1024], [3072], [1, 96, 32], [3, 32, 32, 1])),
        ("hf-experts", both, ([192, 32], [64, 3, 32], [3, 32, 64], [3, 2048], [6, 32, 32], [3, 1, 2048], [3, 64, 32, 1],
                              [2048, 3, 1])),
    ):  # fmt: skip
        for shape in shapes:
            plant = in_header(_FILE, lambda header, name=name, shape=shape: header[name].update(shape=shape))
            yield f"{name} is {shape}", Attack(seed, plant, readers.run)
        yield f"{name} is missing", _moved(seed, name, "rotary_emb.inv_freq")
        yield f"{name} has another name", _moved(seed, name, name.replace(".0.", ".00."))
        for kind in ("U8", "I32", "F32"):
            plant = in_header(_FILE, lambda header, name=name, kind=kind: header[name].update(dtype=kind))
            yield f"{name} in {kind}", Attack(seed, plant, readers.run)
    for seed, name in (("mlx-experts", f"{_LAYER}experts.2.up_proj.weight"),
                       ("hf-experts", f"{_LAYER}experts.0.gate_proj.weight"),
                       ("hf-experts", f"{_LAYER}experts.3.up_proj.weight")):  # fmt: skip
        yield f"{name} beside stacks", Attack(seed, in_header(_FILE, partial(_with_empty, {name: [0]})))
    for name in ("scales", "biases"):
        more = {f"{_MLX}gate_proj.{name}": [3, 0]}
        yield f"{name} beside a scale for each row", Attack("mlx-experts", in_header(_FILE, partial(_with_empty, more)))
    long = "x" * 1_000_000
    for seed, start, end in (("mlx-experts", f"{long}.mlp.", "switch_mlp.up_proj.weight"),
                             ("mlx-experts", _LAYER, f"switch_mlp.up_proj.{long}"),
                             ("hf-experts", f"model.layers.{'0' * 1_000_000}.mlp.", "experts.down_proj")):  # fmt: skip
        for count in (3, 100_000):
            plant = in_header(_FILE, partial(_with_empty, {start + end: [count, 0]}))
            yield f"a stack of {count} with a long name: {end:.30}", Attack(seed, plant)
    many = {f"model.layers.{n}.mlp.switch_mlp.up_proj.weight": [1 << 14, 0] for n in range(40)}
    most = in_header(_FILE, partial(_with_empty, many))
    yield (
        "stacks of nothing, as many as there may be",
        Attack("mlx-experts", lambda root: (most(root), _with_most(root))),
    )
    router = f"{_LAYER}gate.weight"
    for seed in ("mlx-experts", "hf-experts"):
        yield "no router", _moved(seed, router, "rotary_emb.inv_freq")
        for shape in ([96], [32, 3], [1, 96], [6, 16], [3, 32, 1]):
            plant = in_header(_FILE, lambda header, shape=shape: header[router].update(shape=shape))
            yield f"a router of {shape}", Attack(seed, plant)
        for bits in (b"\xc0\x7f", b"\x80\x7f", b"\x80\xff", b"\x7f\x7f"):
            yield f"a router of {bits!r}", Attack(seed, tensor_bytes(_FILE, router, bits * 96), readers.run, True)


def _with_most(root: Path) -> None:
    edited("config.json", lambda config: config.update(num_experts=1 << 14, num_experts_per_tok=256))(root)


def _moved(seed: str, name: str, other: str) -> Attack:
    return Attack(seed, in_header(_FILE, lambda header: header.update({other: header.pop(name)})), readers.run)


def _with_empty(shapes: dict[str, list[int]], header: Any) -> None:
    """More tensors, which hold nothing."""
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end]}


def _scales() -> Iterator[tuple[str, Attack]]:
    alpha, codes = f"{_MLX}down_proj.row_alpha", f"{_MLX}up_proj.weight"
    for name, bits in (("NaN", b"\xc0\x7f"), ("inf", b"\x80\x7f"), ("-inf", b"\x80\xff")):
        yield f"a scale of a row is {name}", Attack("mlx-experts", tensor_bytes(_FILE, alpha, bits), readers.run)
    for name, bits in (("0", b"\0\0"), ("-1", b"\x80\xbf"), ("huge", b"\x7f\x7f"), ("the least", b"\1\0")):
        plant = tensor_bytes(_FILE, alpha, bits * 96)
        yield f"all scales of rows are {name}", Attack("mlx-experts", plant, readers.run, True)
    yield "an expert with codes of 3", Attack("mlx-experts", tensor_bytes(_FILE, codes, b"\xff" * 4), readers.run)
    content = files_of("gguf-experts")["model.gguf"]
    for name, at in _places(content).items():
        if "_exps" not in name and "gate_inp" not in name:
            continue
        for bits in (b"\0\x7e", b"\0\x7c", b"\0\xfc"):
            attack = Attack("gguf-experts", patched("model.gguf", at, bits), readers.run, "gate_inp" in name)
            yield f"{name} begins with {bits!r}", attack
        for data in (bytes(2), b"\0\x80", b"\xff\x7b", b"\x24\xa4" * 9):
            yield (
                f"{name} begins with {data!r}",
                Attack("gguf-experts", patched("model.gguf", at, data), readers.run, True),
            )


def _keys() -> Iterator[tuple[str, Attack]]:
    """Metadata of a GGUF file."""
    for key in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
        for value in (0, 1, 2, 4, 257, 10**9, 1 << 31, (1 << 63) - 1, -1):
            harmless = key == "expert_used_count" and value in (1, 2)
            yield f"{key} = {value}", _key(key, 11, struct.pack("<q", value), harmless)
        yield f"{key} is a flag", _key(key, 7, b"\1")
        yield f"{key} is a text", _key(key, 8, gguf_text(b"3"))
        yield f"{key} is NaN", _key(key, 6, b"\0\0\xc0\x7f")
        yield f"{key} is a list", _key(key, 9, struct.pack("<IQ2I", 4, 2, 3, 2))
    for key in ("expert_shared_count", "leading_dense_block_count", "expert_gating_func"):
        for kind, value in ((4, struct.pack("<I", 2)), (7, b"\1"), (8, gguf_text(b"0")), (9, struct.pack("<IQ", 4, 0))):
            yield f"{key} of the kind {kind}", _key(key, kind, value)
    flags = "attention.sliding_window_pattern"
    for what, kind, value in (("a number", 4, b"\2\0\0\0"), ("a flag", 7, b"\1"),
                              ("no flags", 9, struct.pack("<IQ", 7, 0)),
                              ("one flag", 9, struct.pack("<IQ", 7, 1) + b"\1"),
                              ("a million flags", 9, struct.pack("<IQ", 7, 1_000_000) + b"\1" * 1_000_000),
                              ("numbers", 9, struct.pack("<IQ2I", 4, 2, 1, 0)),
                              ("texts", 9, struct.pack("<IQ", 8, 2) + gguf_text(b"1") * 2)):  # fmt: skip
        yield f"{flags} is {what}", _key(flags, kind, value)
    for value in (0, -1, 1 << 31, (1 << 23) + 1):
        yield f"a window of {value}", _key("attention.sliding_window", 11, struct.pack("<q", value))
    for value in (0, 1, 3, 15, 18, 1 << 31, -1, -2):
        yield f"{value} rotated features", _key("rope.dimension_count", 11, struct.pack("<q", value))
    long = struct.pack("<IQ", 8, 20_000) + gguf_text(b"7" * 65_535) + gguf_text(b"") * 19_999
    for what, kind, value in (("a text", 8, gguf_text(b"7.0")), ("a flag", 7, b"\1"), ("NaN", 6, b"\0\0\xc0\x7f"),
                              ("huge", 10, b"\xff" * 8), ("texts", 9, struct.pack("<IQ", 8, 1) + gguf_text(b"7")),
                              ("a long text and 20,000 others", 9, long),
                              ("NaNs", 9, struct.pack("<IQ2f", 6, 2, float("nan"), 7.0))):  # fmt: skip
        yield f"swiglu_clamp_exp is {what}", _key("swiglu_clamp_exp", kind, value)


def _key(key: str, kind: int, value: bytes, harmless: bool = False) -> Attack:
    return Attack("gguf-experts", with_keys(gguf_key(f"maple.{key}", kind, value)), readers.run, harmless)


def _places(content: bytes) -> dict[str, int]:
    """Where the data of each tensor of a GGUF file begin."""
    _, _, tensors = gguf_fields(content)
    start = -(-tensors[-1][1] // 32) * 32
    return {
        content[begin + 8 : begin + 8 + content[begin]].decode(): start
        + int.from_bytes(content[end - 8 : end], "little")
        for begin, end in tensors
    }


def _packed() -> Iterator[tuple[str, Attack]]:
    """Files of ours."""
    said: list[dict[str, Any]] = [{"experts": {"count": 3, "used": 2, "renormalized": True} | change} for change in (
        {"count": 0}, {"count": 1}, {"count": 2}, {"count": 4}, {"count": -3}, {"count": 1 << 14}, {"count": 1 << 31},
        {"count": True}, {"count": "3"}, {"count": 3.0}, {"used": 0}, {"used": 4}, {"used": 257}, {"used": None},
        {"renormalized": 1}, {"more": 1},
    )]  # fmt: skip
    said += [{"experts": value} for value in ([], 3, {}, None, "3")] + [{key: True} for key in _NORMS]
    said += [{"rotary_dim": value} for value in (0, 3, 10, -2, True, "4", 1 << 31)]
    scaling = {"kind": "factors", "factor": 2.0, "factors": [2.0] * 4, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_positions": 64}  # fmt: skip
    said += [{"rope_scaling": scaling}, {"num_layers": 512}]
    for changes in said:
        plant = in_header(_FILE, lambda header, changes=changes: _say(header, changes))
        yield f"packed, {changes!r:.60}", Attack("packed-experts", plant, readers.run)
    stack, scale = "layers.0.experts.up.u2", "layers.0.experts.up.scale"
    for name, shapes in ((stack, ([1, 3, 2, 128], [3, 256], [768], [6, 1, 1, 128], [3, 2, 1, 128], [3, 1, 2, 128, 1])),
                         (scale, ([96], [32, 3], [1, 96], [3, 32, 1], [96, 1]))):  # fmt: skip
        for shape in shapes:
            plant = in_header(_FILE, lambda header, name=name, shape=shape: header[name].update(shape=shape))
            yield f"packed, {name} is {shape}", Attack("packed-experts", plant, readers.run)
        for other in (
            name.replace(".up", ".0.up"),
            name.replace(".0.", ".00."),
            f"{name}x",
            name.replace("up", "left"),
        ):
            yield f"packed, {name} as {other}", _moved("packed-experts", name, other)
        alone = in_header(_FILE, partial(_with_empty, {name.replace(".up", ".1.up"): [0]}))
        yield f"packed, an expert beside {name}", Attack("packed-experts", alone)
    long = {
        f"layers.{'0' * 1_000_000}.experts.up.u2": [16_000, 0],
        f"layers.0.experts.up.{'u' * 1_000_000}": [16_000, 0],
    }
    for name in long:
        with_long = in_header(_FILE, partial(_with_long, {name: long[name]}))
        yield f"packed, a long name {name:.30}", Attack("packed-experts", with_long)
    for name, bits in (("NaN", b"\0\0\xc0\x7f"), ("inf", b"\0\0\x80\x7f")):
        yield f"packed, a scale is {name}", Attack("packed-experts", tensor_bytes(_FILE, scale, bits), readers.run)
    yield "packed, codes of 3", Attack("packed-experts", tensor_bytes(_FILE, stack, b"\xff" * 16), readers.run)


_NORMS = ("linear_norm", "sub_norms", "post_norms", "qkv_bias")


def _say(header: Any, changes: dict[str, Any]) -> None:
    said = header["__metadata__"]
    said["config"] = json.dumps(json.loads(said["config"]) | changes)


def _with_long(shapes: dict[str, list[int]], header: Any) -> None:
    _with_empty(shapes, header)
    _say(header, {"experts": {"count": 16_000, "used": 2, "renormalized": True}})


def _tensors() -> Iterator[tuple[str, Attack]]:
    """Of a GGUF file, whose data stay where they are."""
    up, router, q = (f"blk.0.{name}.weight" for name in ("ffn_up_exps", "ffn_gate_inp", "attn_q"))
    stack = [64, 64, 3]
    for name, shapes in ((up, ([64, 192], [3, 64, 64], [12288], [64, 3, 64], [64, 64, 1, 3], [64, 64, 3, 1],
                               [64, 32, 6],
                               [64, 1, 192], [64, 64, 2])),
                         (router, ([3, 64], [192], [64, 1], [64, 2], [64, 3, 2], [32, 6]))):  # fmt: skip
        for shape in shapes:
            harmless = shape == [*stack, 1]
            yield f"{name} is {shape}", _tensor(name, lambda own, shape=shape: _info(own, shape=shape), harmless)
    for name in (up, router):
        yield f"no {name}", _tensor(name, lambda own: b"")
        for other in ("blk.1.ffn_up_exps.weight", "blk.00.ffn_up_exps.weight", "blk.2.ffn_up_exps.weight",
                      f"blk.{'0' * 60_000}.ffn_up_exps.weight", "blk.\u0660.ffn_up_exps.weight"):  # fmt: skip
            yield f"{name} as {other:.40}", _tensor(name, lambda own, other=other: _info(own, name=other))
    for kind in (0, 1, 30, 36, 99):
        yield f"{up} of the type {kind}", _tensor(up, lambda own, kind=kind: _info(own, kind=kind))
    alone = "blk.0.ffn_up.1.weight"
    yield "an expert beside its stack", _tensor(q, lambda own: _info(own, name=alone))
    yield (
        "a norm before q",
        _tensor("blk.0.attn_norm.weight", lambda own: _info(own, name="blk.0.attn_q_norm_in.weight")),
    )


def _tensor(name: str, change: Callable[[bytes], bytes], harmless: bool = False) -> Attack:
    """Another record in the place of a tensor's, or none."""

    def plant(root: Path) -> None:
        content = (root / "model.gguf").read_bytes()
        _, _, tensors = gguf_fields(content)
        own = [content[begin:end] for begin, end in tensors]
        at = next(at for at, record in enumerate(own) if record[8:].startswith(name.encode()))
        own[at] = change(own[at])
        count = len(own) - (not own[at])
        head = content[:8] + struct.pack("<Q", count) + content[16 : tensors[0][0]] + b"".join(own)
        data = -(-tensors[-1][1] // 32) * 32
        (root / "model.gguf").write_bytes(head + bytes(-len(head) % 32) + content[data:])

    return Attack("gguf-experts", plant, readers.run, harmless)


def _info(own: bytes, name: str = "", shape: list[int] | None = None, kind: int | None = None) -> bytes:
    """The record of a tensor with another name, sizes (the row's length first) or type."""
    end = 8 + int.from_bytes(own[:8], "little")
    dims = int.from_bytes(own[end : end + 4], "little")
    sizes = shape or list(struct.unpack_from(f"<{dims}Q", own, end + 4))
    at = end + 4 + 8 * dims
    own_name = gguf_text(name.encode()) if name else own[:end]
    own_kind = own[at : at + 4] if kind is None else struct.pack("<I", kind)
    return own_name + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes) + own_kind + own[at + 4 :]
