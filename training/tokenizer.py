"""Trains the byte-level BPE on the grammar's text and writes the tokenizer files of the default model.

The pre-tokenizer is GPT-2's. The roles of the chat template end in a line break, not in a space, so that a rendered
conversation and a reply that follows its prompt give the same tokens. The template holds no BOS; the post-processor
adds it.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from grammar import chat
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, BOS, EOS, TURN = "<|pad|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
SPECIALS = [PAD, BOS, EOS, TURN]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ':\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the special tokens, by their text."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {token: vocabulary[token] for token in SPECIALS}


def render(messages: list[chat.Message], add_generation_prompt: bool = False) -> str:
    """What the chat template renders, without Jinja."""
    turns = [f"{message['role'].capitalize()}:\n{message['content'].strip()}{TURN}" for message in messages]
    return "".join(turns) + ("Assistant:\n" if add_generation_prompt else "")


def texts(seed: int, count: int) -> Iterator[str]:
    """Stories and messages to learn merges from."""
    rng = random.Random(seed)
    for _ in range(count):
        for message in chat.conversation(rng):
            yield f"{message['role'].capitalize()}:\n{message['content']}"


def train(vocab_size: int, seed: int, count: int) -> Tokenizer:
    """A byte-level BPE that knows all 256 bytes and adds BOS in front when asked for special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts(seed, count), trainer)
    bos = special_ids(tokenizer)[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": TURN, "pad_token": PAD}
    config = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=2) + "\n")


def main() -> None:
    """Train on a seeded sample of the corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab-size", type=int, default=3072)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=12000)
    options = parser.parse_args()
    tokenizer = train(options.vocab_size, options.seed, options.conversations)
    save(tokenizer, options.folder)
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
