"""Small tokenizers of both kinds, written as model folders."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BOS, EOS, TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
CORPUS = [
    "The brave fox met a small owl near the river, and the owl said hello to the fox.",
    "Hello world! User: tell me a story. Assistant: once upon a time in the forest",
    "Grüße aus dem Wald, und noch ein Satz über Füchse. 12 345 678",
]
TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = message['role'] | capitalize"
    " + ': '+ message['content'] | trim + '<|eot_id|>' %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)


@cache
def byte_level_json() -> str:
    """A byte-level BPE as Llama 3's, with a BOS from the post-processor."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS, TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]),
        ]
    )
    return tokenizer.to_str()


def around(before: int | None, behind: int | None) -> dict[str, Any]:
    """A post-processor that puts special tokens of this sample in front of a text and behind it."""
    names = [None if token_id is None else (BOS, EOS, TURN)[token_id] for token_id in (before, behind)]
    special = [(name, token_id) for name, token_id in zip(names, (before, behind), strict=True) if name]
    template = f"{names[0] or ''} $A {names[1] or ''}".split()
    processor = processors.TemplateProcessing(single=template, special_tokens=special)
    state: dict[str, Any] = json.loads(processor.__getstate__())
    return state


@cache
def sentencepiece_json() -> str:
    """A BPE as Llama 2's: marks for spaces, byte tokens, a space added in front and taken away again."""
    words = Tokenizer(models.BPE())
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = json.loads(words.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(learned["vocab"], key=learned["vocab"].get)
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in learned["merges"]]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = words.normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


@cache
def metaspace_json() -> str:
    """The same vocabulary with the other way to treat spaces."""
    tokenizer = Tokenizer.from_str(sentencepiece_json())
    tokenizer.normalizer = None  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer.to_str()


def write_folder(path: Path, tokenizer_json: str | None = None, generation: Any = None, **config: Any) -> Path:
    """A model folder with text files only."""
    path.mkdir(exist_ok=True)
    if tokenizer_json is None:
        tokenizer_json = byte_level_json()
        config = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE} | config
    (path / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return path
