"""The readers under attack: from which sound model, by a change of which files, and what is done with the result."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bitnet_inference.backends.choose import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import BitNetError, FormatError, RequestError
from bitnet_inference.formats import ggml_blocks, open_checkpoint
from bitnet_inference.formats.checkpoint import Checkpoint, expected_shapes
from bitnet_inference.formats.gguf_file import read_gguf
from bitnet_inference.formats.hf_config import read_config
from bitnet_inference.formats.hf_quantization import read_quantization
from bitnet_inference.formats.json_files import Fields, read_json
from bitnet_inference.formats.meta_config import read_params
from bitnet_inference.formats.onnx import OnnxCheckpoint
from bitnet_inference.formats.onnx_decoder import Names, read_decoder
from bitnet_inference.formats.onnx_graph import read_graph
from bitnet_inference.formats.safetensors_files import read_header
from bitnet_inference.formats.torch_files import read_torch_file
from bitnet_inference.llm import LLM
from bitnet_inference.model.loader import sound_matrix
from bitnet_inference.model_folder import defaults_of, load_text_files, load_tokenizer
from bitnet_inference.onnx_summary import describe_onnx
from bitnet_inference.text.chat import Chat, Template
from bitnet_inference.text.sentencepiece import read_sentencepiece_files
from bitnet_inference.text.vocab import notes

HERE = Path(__file__).parent
SEEDS, GOLDEN = HERE / "seeds", HERE.parent / "golden"
TALK = [{"role": "user", "content": "Hello <|eot_id|> </s>"}, {"role": "assistant", "content": "a b"}]
Files = dict[str, bytes]
SMALL = {path.name: path.read_bytes() for path in sorted((SEEDS / "small").iterdir())}  # no models: single files


def model_path(root: Path) -> Path:
    """What a user would open: the folder, or the single file in it."""
    files = sorted(root.iterdir())
    if files[0].suffix == ".gguf":  # one of several parts stands for all
        return files[0]
    return files[0] if len(files) == 1 and files[0].suffix in (".safetensors", ".onnx") else root


def files_of(seed: str) -> Files:
    """The files of a seed by name: a folder of seeds/, or of the golden ones."""
    folder = SEEDS / seed if (SEEDS / seed).is_dir() else GOLDEN / seed
    if ":" in seed:  # a part of another
        seed, _, name = seed.partition(":")
        return {name: SMALL.get(name) or files_of(seed)[name]}
    skipped = ("golden.npz", "beams.json", "chat.json")
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in skipped)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write(root: Path, files: Files) -> None:
    """Write files into a folder."""
    for name, content in files.items():
        if "/" in name:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
        with open(f"{root}/{name}", "wb") as file:
            file.write(content)


def open_only(root: Path) -> None:
    """Open it and hear what is wrong; nothing of the weights is read."""
    checkpoint = open_checkpoint(model_path(root))
    _inspect(checkpoint)


def header(root: Path) -> None:
    """Have the reader of one file read it, and nothing around it: quick, for many executions."""
    (name,) = os.listdir(root)
    file = root / name
    if file.suffix == ".json":
        fields = read_json(file)
        read_params(fields, lambda hidden: 560) if file.name == "params.json" else _config(fields)
    elif file.suffix == ".gguf":
        gguf = read_gguf(file)
        for tensor in gguf.tensors.values():
            ggml_blocks.decode(tensor.type_id, tensor.raw(), tensor.shape)
    elif file.suffix == ".jinja":
        Template(file.read_text(encoding="utf-8", errors="replace"), str(file)).render({"messages": TALK})
    elif file.suffix == ".model":
        read_sentencepiece_files(root)
    elif file.suffix == ".onnx":
        read_decoder(read_graph(file), Names())
    else:
        tensors = dict(read_header(file)) if file.suffix == ".safetensors" else read_torch_file(file)
        for tensor in tensors.values():
            tensor.array().tobytes(), tensor.release()


def _config(fields: Fields) -> None:
    read_config(fields, read_quantization(fields), fields.ids("eos_token_id"))


def words(root: Path) -> None:
    """Its words alone: the tokenizer, the templates, what it recommends."""
    _words(open_checkpoint(model_path(root)))


def everything(root: Path) -> None:
    """All that is in it, whatever else is wrong: headers, weights, words. Raises the first error in the end."""
    checkpoint = open_checkpoint(model_path(root))
    steps: list[Callable[[], object]] = [lambda: _inspect(checkpoint), lambda: _words(checkpoint)]
    for name, shape in () if isinstance(checkpoint, OnnxCheckpoint) else expected_shapes(checkpoint.config):
        read = functools.partial(checkpoint.vector, name) if len(shape) == 1 else None
        steps.append(read or functools.partial(sound_matrix, checkpoint, name))
    _raise_first(_tried(steps[: 2 + 200]))


def run(root: Path) -> None:
    """Load it, and have it say two tokens: in text, and as a chat."""
    path = model_path(root)
    checkpoint = open_checkpoint(path)
    checkpoint_words = load_tokenizer(checkpoint)
    device = "onnx" if isinstance(checkpoint, OnnxCheckpoint) else "cpu"
    model = load_model(checkpoint, EngineConfig(device=device, threads=1))
    with LLM(model, checkpoint_words, max_cache_tokens=256, drafts="none") as llm:
        params = SamplingParams(max_tokens=2, temperature=0.0)
        steps = [lambda: llm.generate("Hello", params)]
        if checkpoint_words.templates:
            steps.append(lambda: llm.chat(TALK, params))
        _raise_first(_tried(steps))


def _inspect(checkpoint: Checkpoint) -> None:
    checkpoint.notes(), checkpoint.num_bytes, checkpoint.num_parameters, notes(checkpoint.metadata)
    if isinstance(checkpoint, OnnxCheckpoint):
        assert all("\n" not in line for _, line in describe_onnx(checkpoint))
    if problems := checkpoint.check():
        for problem in problems:
            assert "\n" not in problem
        raise FormatError(checkpoint.path, "", "; ".join(problems[:3]))


def _words(checkpoint: Checkpoint) -> None:
    tokenizer = load_tokenizer(checkpoint)
    steps: list[Callable[[], object]] = [lambda: defaults_of(tokenizer), lambda: load_text_files(checkpoint)]
    for text in ("Hello", " 12 Grüße\n\n\u2581<s><|eot_id|>\U0001f98a\x00"):
        steps.append(lambda text=text: tokenizer.decode(tokenizer.encode(text)))
    for template in list(tokenizer.templates)[:4]:
        steps.append(lambda name=template: Chat(tokenizer).encode(TALK, template=name))
    some = [*range(min(8, tokenizer.vocab_size)), tokenizer.vocab_size - 1]
    steps += [lambda token=token: tokenizer.piece(token, opening=True) for token in some]
    _raise_first(_tried(steps))


def _tried(steps: Iterable[Callable[[], object]]) -> list[BitNetError]:
    errors = []
    for step in steps:
        try:
            step()
        except BitNetError as error:
            errors.append(error)
    return errors


def _raise_first(errors: list[BitNetError]) -> None:
    files = [error for error in errors if not isinstance(error, RequestError)]
    for error in [*files, *errors]:
        raise error


@dataclass(frozen=True)
class Reader:
    """`seed`: a sound model. `targets`: the files that are changed. `examine`: what is done with the result."""

    seed: str
    targets: tuple[str, ...]
    examine: Callable[[Path], object]


_HF, _TEXT = ("config.json",), ("tokenizer_config.json", "generation_config.json")
READERS = {
    **{f"header:{seed}:{name}": Reader(f"{seed}:{name}", (name,), header) for seed, name in (
        ("small", "model.safetensors"), ("small", "model.gguf"), ("small", "model.pth"), ("hf-shards", "config.json"),
        ("bitnet-packed", "config.json"), ("gemma3-embedding", "config.json"), ("meta-shards", "params.json"),
        ("small", "tokenizer.model"), ("small", "chat_template.jinja"), ("small", "model.onnx"),
        ("mlx-experts", "config.json"), ("hf-experts", "config.json"),
    )},
    "safetensors": Reader("hf-shards", ("model-2.safetensors",), open_only),
    "index": Reader("hf-shards", ("model.safetensors.index.json",), open_only),
    "config": Reader("hf-shards", _HF, open_only),
    "config-bitnet": Reader("bitnet-packed", _HF, open_only),
    "config-mlx": Reader("mlx", _HF, open_only),
    "config-gemma": Reader("gemma3-embedding", (*_HF, "1_Pooling/config.json"), open_only),
    "gguf": Reader("gguf-types", ("model.gguf",), open_only),
    "gguf-bitnet": Reader("gguf-groups", ("model.gguf",), open_only),
    "config-maple": Reader("mlx-experts", _HF, open_only),
    "config-qwen-moe": Reader("hf-experts", _HF, open_only),
    "gguf-experts": Reader("gguf-experts", ("model.gguf",), open_only),
    "stacks-mlx": Reader("mlx-experts", ("model.safetensors",), open_only),
    "stacks-packed": Reader("packed-experts", ("model.safetensors",), open_only),
    "stacks-hf": Reader("hf-experts", ("model.safetensors",), open_only),
    "pth": Reader("meta-shards", ("consolidated.00.pth",), open_only),
    "params": Reader("meta-shards", ("params.json",), open_only),
    "packed": Reader("packed", ("model.safetensors",), open_only),
    "compressed": Reader("packed-compressed", ("model.safetensors",), open_only),
    "gguf-parts": Reader("gguf-parts", ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf"), open_only),
    "gpu": Reader("gpu", ("model_state_int2.pt",), open_only),
    "onnx": Reader("onnx", ("model.onnx",), open_only),
    "onnx-genai": Reader("onnx-genai", ("decoder.onnx", "genai_config.json"), open_only),
    "tokenizer.json": Reader("bitnet-packed", ("tokenizer.json",), words),
    "tokenizer.model": Reader("hf-shards", ("tokenizer.model",), words),
    "ranks": Reader("meta-shards", ("tokenizer.model",), words),
    "texts": Reader("hf-shards", _TEXT, words),
    "gguf-words": Reader("gguf-types", ("model.gguf",), words),
    "gguf-bpe": Reader("gguf-groups", ("model.gguf",), words),
    "template": Reader("bitnet-packed", ("chat_template.jinja",), words),
    **{f"all:{seed}": Reader(seed, ("*",), everything) for seed in (
        "hf-shards", "bitnet-packed", "gemma3-embedding", "gguf-types", "gguf-i2s", "gguf-groups", "meta-shards",
        "packed", "packed-groups", "packed-compressed", "gguf-parts", "gpu", "onnx", "onnx-genai", "mlx",
        "gguf-experts", "mlx-experts", "hf-experts", "packed-experts",
    )},
    **{f"run:{seed}": Reader(seed, ("*",), run) for seed in (
        "hf-shards", "bitnet-packed", "gguf-types", "gguf-groups", "meta-shards", "packed", "packed-compressed",
        "gguf-parts", "gpu", "mlx", "gguf-experts", "mlx-experts", "hf-experts", "packed-experts",
    )},
}  # fmt: skip
