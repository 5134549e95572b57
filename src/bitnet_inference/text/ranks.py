"""The tokenizer of Meta's Llama 3: a file of ranks as tiktoken reads it, turned into a tokenizer.json.

tiktoken merges, again and again, the two neighbours that make up the token of the lowest rank. So every way to cut a
token into two tokens is a merge, in the order of the whole token's rank. The order among the ways to cut one token does
not matter: its own bytes are merged in one order, whatever stands around them, so only one of the ways ever comes up.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.own_files import has_pieces
from bitnet_inference.text.folder import MAX_TOKENIZER_BYTES, TextFiles, read_bytes, read_json, read_text_files
from bitnet_inference.text.patterns import LLAMA3_PATTERN
from bitnet_inference.text.pieces import spelled
from bitnet_inference.text.vocab import BITNET_TEMPLATE, byte_level_bpe

MAX_RANK_BYTES = 8 << 20  # Llama 3's file has 2.2 MB
_MAX_TOKEN_BYTES = 256  # Llama 3's longest token has 128
_AGAIN = "download the file again"
_NUM_SPECIAL = 256
_BEGIN, _END, _HEADER, _HEADER_END, _EOT = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip
# The first special tokens, with None for reserved ones.
_LLAMA3 = (_BEGIN, _END, None, None, None, None, _HEADER, _HEADER_END, None, _EOT)
_LLAMA31 = (
    _BEGIN, _END, None, None, "<|finetune_right_pad_id|>", "<|step_id|>", _HEADER, _HEADER_END, "<|eom_id|>", _EOT,
    "<|python_tag|>",
)  # fmt: skip
_TEMPLATE = (
    "{% if tools or messages | selectattr('tool_calls') | list %}"
    "{{ raise_exception('the chat format of this model has no tools') }}{% endif %}{{ bos_token }}"
    f"{{% for message in messages %}}{{{{ '{_HEADER}' + message['role'] + '{_HEADER_END}\\n\\n'"
    f" + message['content'] | trim + '{_EOT}' }}}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{{{{ '{_HEADER}assistant{_HEADER_END}\\n\\n' }}}}{{% endif %}}"
)


def is_meta_folder(path: str | Path) -> bool:
    """Whether a folder is Meta's, with ranks in place of a tokenizer.json."""
    there = {name for name in ("params.json", "config.json", "tokenizer.json") if os.path.lexists(Path(path) / name)}
    return there == {"params.json"} and not has_pieces(Path(path))


def read_meta_files(path: str | Path) -> TextFiles:
    """What the text files of a folder would say, from Meta's tokenizer.model.

    Special tokens have the names of Llama 3.1 where params.json says use_scaled_rope, else those of Llama 3. Raises
    FormatError, and Unsupported for SentencePiece's files.
    """
    folder = Path(path)
    tokens = _read_ranks(folder / "tokenizer.model")
    special = _special(_LLAMA31 if read_json(folder / "params.json").get("use_scaled_rope") else _LLAMA3)
    return TextFiles(
        path=folder,
        tokenizer_json=json.dumps(_tokenizer(folder / "tokenizer.model", tokens, special), ensure_ascii=False).encode(),
        named={"bos_token": _BEGIN, "eos_token": _END},
        add_bos=True,
        add_eos=False,
        templates={"default": _TEMPLATE},
        generation={},
    )


def is_gpu_folder(path: str | Path) -> bool:
    """Whether a folder is that of Microsoft's GPU code, with ranks in place of a tokenizer.json."""
    folder = Path(path)
    is_there = (folder / "tokenizer.model").is_file() and not os.path.lexists(folder / "tokenizer.json")
    return is_there and any(folder.glob("model_state*.pt"))


def read_gpu_files(path: str | Path) -> TextFiles:
    """What the text files of such a folder say, with the tokens of Llama 3 and, if need be, the template of BitNet.

    Raises FormatError.
    """
    meta = read_meta_files(path)
    files = read_text_files(path, meta)
    return replace(files, templates=files.templates or {"default": BITNET_TEMPLATE})


def _special(names: tuple[str | None, ...]) -> list[str]:
    every = [*names, *[None] * (_NUM_SPECIAL - len(names))]
    reserved = (f"<|reserved_special_token_{number}|>" for number in range(_NUM_SPECIAL))
    return [name or next(reserved) for name in every]


def _read_ranks(path: Path) -> list[bytes]:
    """The tokens in the order of their ranks, which count from 0."""
    if not path.is_file():
        raise FormatError(path, "", "the file is missing: download it from where the weights are")
    data = read_bytes(path, MAX_RANK_BYTES)
    if data.startswith(b"\n"):  # the first field of SentencePiece's message
        cure = "put a tokenizer.json beside it, as in the model's Hugging Face repository"
        raise Unsupported(f"{path}: this is a SentencePiece tokenizer, not a list of ranks: {cure}")
    ranks: dict[bytes, int] = {}
    lines = data.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise FormatError(path, f"line {number}", f'should be "BASE64 RANK": {_AGAIN}') from None
    if sorted(ranks.values()) != list(range(len(lines))):
        raise FormatError(path, "", f"the ranks of different tokens are not 0 to {len(lines) - 1}: {_AGAIN}")
    if any(bytes([byte]) not in ranks for byte in range(256)) or not all(
        0 < len(each) <= _MAX_TOKEN_BYTES for each in ranks
    ):
        raise FormatError(path, "", f"lacks some of the 256 bytes, or has a token of over {_MAX_TOKEN_BYTES}: {_AGAIN}")
    return sorted(ranks, key=ranks.__getitem__)


def _tokenizer(path: Path, tokens: list[bytes], special: list[str]) -> dict[str, Any]:
    words = {token: spelled(token) for token in tokens}
    vocab = {word: rank for rank, word in enumerate(words.values())}
    if twice := vocab.keys() & set(special):
        raise FormatError(path, min(twice), f"the special token has a rank too: {_AGAIN}")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": token_id, "content": text, **plain} for token_id, text in enumerate(special, len(tokens))]
    spelt = byte_level_bpe(vocab, _merges(path, words), (LLAMA3_PATTERN,), ignore_merges=True)
    return {"version": "1.0", "added_tokens": added, **spelt}


def _merges(path: Path, words: dict[bytes, str]) -> list[str]:
    """Every way to cut a token into two, in the order of the ranks. `words`: the tokens in that order, spelt."""
    merges: list[str] = []
    size = 0
    for token in words:
        own = list(_cuts(token, words))
        size += len(own) * (len(token) + 1)
        merges += own
        if size > MAX_TOKENIZER_BYTES:
            raise FormatError(path, "", f"more than {MAX_TOKENIZER_BYTES} bytes of merges: download the file again")
    return merges


def _cuts(token: bytes, words: dict[bytes, str]) -> Iterator[str]:
    for at in range(1, len(token)):
        left, right = words.get(token[:at]), words.get(token[at:])
        if left is not None and right is not None:
            yield f"{left} {right}"
