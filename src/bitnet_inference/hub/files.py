"""Which files of a repository make a model: what is fetched of it, and what is opened of a folder that holds it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from bitnet_inference.errors import InvalidParams, Unsupported

# Only these are ever fetched: no code, and no pickles but Meta's, which are read without running them.
_TEXTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "additional_chat_templates/*.jinja",
    "modules.json", "*_Pooling/config.json", "README.md", "LICENSE", "LICENSE.*",
)  # fmt: skip
_SAFETENSORS = ("model.safetensors", "model*.safetensors", "model.safetensors.index.json")
# Other tools fetch these too, and the reader runs nothing in them: formats/weight_files.py.
_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_META = ("params.json", "consolidated.*.pth", "tokenizer.model", "README.md", "LICENSE", "LICENSE.*")
# Another tool may have fetched them: formats/onnx.py has the same names, and finds them in this folder, too.
_ONNX = tuple(
    f"{folder}{name}"
    for folder in ("", "onnx/")
    for name in ("genai_config.json", "model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx")
)
_ABOUT = ("README.md", "LICENSE", "LICENSE.*")
_WEIGHTS = (".safetensors", ".gguf", ".pth")
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_SHARD = re.compile(r"(?:.*/)?model(?:-[0-9]+-of-[0-9]+)?\.safetensors", re.DOTALL)
_MAX_SHOWN = 5
_MAX_INDEX_BYTES = 64 << 20


def matches(file: str, patterns: Iterable[str]) -> bool:
    """Whether the path of a file is like one of the patterns, in which * stands for no slash."""
    parts = file.split("/")
    for pattern in patterns:
        wanted = pattern.split("/")
        if len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted)):
            return True
    return False


def without_later_parts(ggufs: Iterable[str]) -> list[str]:
    """The GGUF files that are models: of one that was cut into NAME-00001-of-00003.gguf and so on, the first part."""
    return [file for file in ggufs if not ((part := _PART.fullmatch(file)) and int(part[2]) > 1)]


def _all_parts(file: str) -> list[str]:
    """A file, or all parts of the model when it is one of them."""
    if not (part := _PART.fullmatch(file)):
        return [file]
    return [f"{part[1]}-{number:05}-of-{part[3]}.gguf" for number in range(1, int(part[3]) + 1)]


def is_weights(file: str) -> bool:
    """Whether a file holds weights; the others are small."""
    return file.endswith(_WEIGHTS)


def choose(repository: str, files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The files of a repository that make a model; `patterns` name its weights, or leave the choice to us.

    Raises InvalidParams where there are several models or a part of one is named, and Unsupported where there is none.
    """
    files = [file for file in files if file.isprintable()]  # the others are nothing to show on a terminal
    if patterns:
        named = [file for file in files if matches(file, patterns) and is_weights(file)]
        if not named:
            raise Unsupported(f"{repository} has no weights like {', '.join(patterns)}: {_offer(repository, files)}")
        if "config.json" in files and _SHARD.fullmatch(named[0]):  # one of our own, which is whole, has another name
            raise InvalidParams(f"{repository}/{named[0]} is a part of a model: pull {repository}")
        weights = {part for file in named for part in _all_parts(file)}
        return [*(file for file in files if file in weights), *(file for file in files if matches(file, _ABOUT))]
    if "config.json" in files and any(matches(file, _SAFETENSORS) for file in files):
        return [file for file in files if matches(file, (*_TEXTS, *_weights_of(files)))]
    if ggufs := [file for file in files if file.endswith(".gguf")]:
        weights = {*_all_parts(_only(repository, ggufs))}
        return [file for file in files if file in weights or matches(file, _ABOUT)]
    if "params.json" in files and any(matches(file, ("consolidated.*.pth",)) for file in files):
        return [file for file in files if matches(file, _META)]
    raise Unsupported(f"{repository} holds no model that can be opened: {_offer(repository, files)}")


def _weights_of(files: Sequence[str]) -> tuple[str, ...]:
    """A repository may have one file and its parts too: the reader takes the one."""
    return _SAFETENSORS[:1] if _SAFETENSORS[0] in files else _SAFETENSORS[1:]


def _only(repository: str, files: Sequence[str]) -> str:
    ggufs = without_later_parts(files) or files
    if len(ggufs) > 1:
        shown = ", ".join(sorted(ggufs)[:_MAX_SHOWN]) + (", ..." if len(ggufs) > _MAX_SHOWN else "")
        raise InvalidParams(f"{repository} holds several models ({shown}): name one, as {repository}/{min(ggufs)}")
    return ggufs[0]


def _offer(repository: str, files: Sequence[str]) -> str:
    if ggufs := [file for file in files if file.endswith(".gguf")]:
        return f"it has {repository}/{min(ggufs)}"
    if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        return "its weights are pickles, which can run code: look for a repository with safetensors or GGUF files"
    return "look for a repository with safetensors or GGUF files"


def model_in(folder: Path, patterns: Sequence[str] = (), name: str = "") -> Path | None:
    """What is to be opened in a folder that holds files of a repository; None where no model is there whole.

    `name` is what to call it in an error. Raises InvalidParams where there are several.
    """
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if patterns:
        found = sorted(file for file in files if matches(file, patterns) and is_weights(file))
        return folder / found[0] if found and {*_all_parts(found[0])} <= {*files} else None
    if "config.json" in files and any(matches(file, _SAFETENSORS) for file in files):
        return folder if _is_whole(folder, files, _SAFETENSORS[0], _SAFETENSORS[-1]) else None
    if ggufs := [file for file in files if file.endswith(".gguf")]:
        only = _only(name or str(folder), ggufs)
        return folder / only if {*_all_parts(only)} <= {*files} else None
    if "params.json" in files and any(matches(file, ("consolidated.*.pth",)) for file in files):
        return folder
    is_torch = "config.json" in files and _is_whole(folder, files, *_TORCH)
    return folder if is_torch or {*_ONNX} & {*files} else None


def _is_whole(folder: Path, files: Sequence[str], single: str, index: str) -> bool:
    """Whether the one file is there, or all parts that the index lists."""
    if single in files:
        return True
    try:
        with (folder / index).open("rb") as file:
            names = set(json.loads(file.read(_MAX_INDEX_BYTES))["weight_map"].values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return False
    return names <= set(files)
