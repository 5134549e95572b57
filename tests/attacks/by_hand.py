"""Attacks that somebody thought of, each a name and what it does to a sound model; readers of a kind share theirs.

An attack is planted into a copy of a seed. It has to be refused, but for those of HARMLESS, which may open as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import by_hand_experts
import by_hand_gguf
import by_hand_onnx
import by_hand_weights
import by_hand_words
import readers
from mutate import gguf_fields
from plants import Attack, edited, replaced
from readers import files_of


def attacks() -> Iterator[tuple[str, Attack]]:
    """All of them, by name."""
    for number, (name, attack) in enumerate(_attacks()):
        yield f"{number:03} {attack.seed} {name}", attack


def _attacks() -> Iterator[tuple[str, Attack]]:
    yield from _odd_files()
    yield from _truncated()
    yield from _configs()
    yield from by_hand_weights.safetensors()
    yield from by_hand_weights.indexes()
    yield from by_hand_gguf.ggufs()
    yield from by_hand_experts.experts()
    yield from by_hand_weights.pickles_and_zips()
    yield from by_hand_onnx.onnx()
    yield from by_hand_words.json_files()
    yield from by_hand_words.words()
    yield from by_hand_words.templates()


# Files that are none

PART = "model-00001-of-00002.gguf"  # which stands for all


def _odd_files() -> Iterator[tuple[str, Attack]]:
    seeds = ("hf-shards", "bitnet-packed", "gemma3-embedding", "meta-shards", "gguf-types", "packed",
             "packed-compressed", "gguf-parts", "gpu", "onnx", "onnx-genai")  # fmt: skip
    optional = (
        "chat_template.jinja",
        "special_tokens_map.json",
        "additional_chat_templates/a.jinja",
        "1_Pooling/config.json",
    )
    for seed in seeds:
        has_texts = len(files_of(seed)) > 1 and seed not in ("meta-shards", "gguf-parts")
        names = [*files_of(seed), *(optional[: 3 if seed == "gpu" else 4] if has_texts else ())]
        for name in names:
            for kind, make in (("a pipe", os.mkfifo), ("a folder", os.mkdir), ("empty", lambda path: path.touch())):
                text_or_none = kind == "empty" and name in optional
                yield f"{name} is {kind}", Attack(seed, partial(_instead, name, make), readers.everything, text_or_none)
            for target in ("/dev/zero", "/etc/hostname", name.rpartition("/")[2], "gone", ".."):
                single = len(files_of(seed)) == 1 or name == PART  # who gives a link to a file wants the file
                attack = Attack(seed, partial(_instead, name, partial(_link, target)), readers.everything)
                if not (single and target.startswith("/etc")):
                    yield f"{name} links to {target}", attack


def _instead(name: str, make: Callable[[Path], object], root: Path) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).unlink(missing_ok=True)
    make(root / name)


def _link(target: str, path: Path) -> None:
    path.symlink_to(target)


def _truncated() -> Iterator[tuple[str, Attack]]:
    """At the borders of a header, and at many places besides."""
    for seed in ("hf-shards", "meta-shards", "gguf-types", "gguf-groups", "packed", "packed-compressed",
                 "gguf-parts", "gpu", "onnx", "onnx-genai", "mlx", "gguf-experts", "mlx-experts",
                 "hf-experts", "packed-experts"):  # fmt: skip
        for name, content in files_of(seed).items():
            size = len(content)
            places = {
                0,
                1,
                4,
                7,
                8,
                9,
                15,
                16,
                23,
                24,
                25,
                size // 2,
                size - 1,
                size - 8,
                size - 22,
                size - 23,
                size - 64,
            }
            if name.endswith(".gguf"):
                numbers, keys, tensors = gguf_fields(content)
                places |= {at for at, _ in numbers[:: max(1, len(numbers) // 60)]}
                places |= {end for _, end in (*keys, *tensors)}
            for place in sorted(place for place in places if 0 <= place < size):
                harmless = name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json")
                of_words = name.startswith(("tokenizer", "generation"))
                examine = readers.words if of_words and place % 2 else readers.open_only
                yield (
                    f"{name} ends at {place}",
                    Attack(seed, replaced(name, content[:place]), examine, harmless or of_words),
                )


# Configurations

_NUMBERS = (10**9, 1 << 31, 1 << 63, 1 << 64, 10**400, -1, 0, 1.5, True, "2", [], {}, float("nan"), float("inf"), 1e300)


def _configs() -> Iterator[tuple[str, Attack]]:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "head_dim")  # fmt: skip
    for key in sizes:
        for value in _NUMBERS:
            sound = {
                "rope_theta": (10**9, 1 << 31, 1 << 63, 1 << 64, 1.5),
                "rms_norm_eps": (10**9, 1.5, 1 << 31, 1 << 63, 1 << 64),
            }
            harmless = any(value is each or value == each for each in sound.get(key, ()) if type(each) is type(value))
            yield f"{key} = {value!r:.20}", _config({key: value}, harmless)
    for key in (
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "multiple_of",
        "ffn_dim_multiplier",
        "norm_eps",
        "vocab_size",
        "rope_theta",
    ):
        for value in _NUMBERS:
            plant = edited("params.json", lambda params, key=key, value=value: params.update({key: value}))
            yield f"params {key} = {value!r:.20}", Attack("meta-shards", plant, harmless=True)
    for scaling in (
        {"rope_type": "linear", "factor": float("nan")}, {"rope_type": "linear", "factor": 0},
        {"rope_type": []},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}, {"type": "dynamic",
        "factor": 2}, [], "linear",
        {"rope_type": "llama3", "factor": 1e-300, "low_freq_factor": 1, "high_freq_factor": 4}, {"full_attention": {}},
        {"rope_theta": -1},
        {"rope_type": "linear", "factor": 1 << 2000}, {"rope_type": "llama3"}, {"partial_rotary_factor": 0.5},
    ):  # fmt: skip
        yield f"rope_scaling = {scaling!r:.60}", _config({"rope_scaling": scaling})
    slight = {"factor": 2e-37, "low_freq_factor": 1, "high_freq_factor": 4}
    for kind in ("linear", "llama3", "yarn"):
        yield f"{kind} by next to nothing", _config({"rope_scaling": {"rope_type": kind, **slight}})
    yield "a base next to nothing", _config({"rope_theta": 2e-37, "rope_scaling": None})
    for change in (
        {}, {"factor": 9e36, "attention_factor": 9e36}, {"factor": float("nan")}, {"rope_theta": 1.0}, {"beta_slow": 0},
        {"rope_theta": 1.0000000000000002}, {"beta_fast": 9e36, "beta_slow": 2e-37}, {"attention_factor": 2e-37},
        {"beta_fast": 2e-37, "truncate": False}, {"mscale": 9e36, "mscale_all_dim": 2e-37},
        {"mscale": 2e-37, "mscale_all_dim": 9e36}, {"original_max_position_embeddings": 1},
        {"original_max_position_embeddings": 1 << 40},
    ):  # fmt: skip
        yarn = {"rope_type": "yarn", **change}
        plant = edited("config.json", lambda config, yarn=yarn: config.update(rope_scaling=yarn))
        yield f"yarn with {change!r:.60}", Attack("hf-shards", plant, readers.run, True)
    huge = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 512, "num_attention_heads": 512,
            "num_key_value_heads": 512, "head_dim": 1024, "vocab_size": 1 << 21}  # fmt: skip
    yield "all sizes are the largest", _config(huge)
    yield (
        "8 million positions",
        Attack(
            "hf-shards", edited("config.json", lambda c: c.update(max_position_embeddings=1 << 23)), readers.run, True
        ),
    )
    for ids in ([10**9], [-1], [True], ["1"], [1] * 100_000, 10**30, None, {}, [[1]], 1.5):
        for file in ("config.json", "generation_config.json"):
            plant = edited(file, lambda c, ids=ids: c.update(eos_token_id=ids, bos_token_id=ids))
            yield f"{file}: ids {ids!r:.20}", Attack("bitnet-packed", plant, readers.run, harmless=True)
    for value in (float("nan"), float("inf"), -1, 1e300, "hot", [], True, 10**400, 1 << 70, [1 << 40] * 1000):
        for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"):
            plant = edited("generation_config.json", lambda c, key=key, value=value: c.update({key: value}))
            yield f"{key} = {value!r:.20}", Attack("bitnet-packed", plant, readers.words, harmless=True)


def _config(change: dict[str, Any], harmless: bool = False) -> Attack:
    return Attack("hf-shards", edited("config.json", lambda config: config.update(change)), harmless=harmless)


def found() -> Iterator[tuple[str, Attack]]:
    """What was found once: found/SEED+NAME/ holds the files that take the place of the seed's."""
    for folder in sorted((readers.HERE / "found").iterdir()):
        if folder.is_dir():
            files = {
                str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
            }
            plants = [replaced(name, content) for name, content in files.items()]
            seed = folder.name.partition("+")[0]
            yield (
                folder.name,
                Attack(seed, lambda root, plants=plants: [plant(root) for plant in plants], readers.run, True),
            )


def sound() -> Iterator[tuple[str, Attack]]:
    """Every seed as it is."""
    for seed in sorted({reader.seed for reader in readers.READERS.values() if reader.examine is readers.everything}):
        yield f"{seed} as it is", Attack(seed, lambda root: None, readers.run, True)
