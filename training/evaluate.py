"""Measures the exported folder: held-out perplexity, and how often a story keeps the name and the animal asked for."""

import argparse
import math
import random
import re
from pathlib import Path

import torch
import torch.nn.functional as functional
from data import IGNORED, Corpus
from grammar import names, words
from grammar.moods import MOODS
from sample import Sampler

HELD_OUT_SEED = 20_000_003
REQUESTS = [
    "Tell me a story about a {mood} {kind} called {name}",
    "Can you write a story about {name} the {kind}?",
    "I want a tale about a {kind} named {name} who lives by the sea",
    "tell me a story about a {mood} {kind} named {name}",
    "Please write a short story about {name}, a {mood} {kind}.",
]
CHATS = [
    ["hello", "Tell me a story about a brave fox called Mia", "what was the moral?", "what was her name?", "thank you"],
    ["who are you?", "tell me a story", "another one please"],
    ["What is the capital of France?", "Write a story about a teapot named Zorbilo"],
    ["Tell me a story about Tom and a red kite", "Tell me a story about a shy bear", "Who was the friend?"],
]


@torch.inference_mode()
def perplexity(sampler: Sampler, rows: int, length: int) -> float:
    """exp(mean loss) over replies and stories of a seed that training never used."""
    ids, labels = next(Corpus(sampler.tokenizer, HELD_OUT_SEED).batches(rows, length))
    total = count = 0.0
    for row, wanted in zip(ids.split(4), labels.split(4), strict=True):
        loss = functional.cross_entropy(
            sampler.model(row).flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        total, count = total + loss.item(), count + (wanted != IGNORED).sum().item()
    return math.exp(total / count)


def draw_name(rng: random.Random) -> tuple[str, str]:
    """A name and where it is from: known, real but never seen in training, or made up."""
    source = rng.choice(("known", "held out", "made up"))
    if source == "held out":
        return rng.choice(names.HELD_OUT), source
    return (rng.choice(names.KNOWN[rng.choice(("she", "he"))]) if source == "known" else names.invented(rng)), source


def count_word(word: str, text: str) -> int:
    """How often a word stands in a text, case ignored."""
    return len(re.findall(rf"\b{re.escape(word)}\b", text, re.IGNORECASE))


def fidelity(sampler: Sampler, count: int, seed: int, show: int) -> dict[str, list[bool]]:
    """For each source of names, whether each story has the name twice or more, has the animal, and ends by itself."""
    rng = random.Random(seed)
    kept: dict[str, list[bool]] = {}
    for number in range(count):
        name, source = draw_name(rng)
        kind = rng.choice(words.KINDS)
        request = rng.choice(REQUESTS).format(name=name, kind=kind, mood=rng.choice(list(MOODS)))
        story, ended = sampler.tell(request)
        has_name, has_kind = count_word(name, story) >= 2, count_word(kind, story) >= 1
        for key, value in ((f"name, {source}", has_name), ("name", has_name), ("animal", has_kind), ("ended", ended)):
            kept.setdefault(key, []).append(value)
        kept.setdefault("name and animal", []).append(has_name and has_kind)
        if number < show or not (has_name and has_kind and ended):
            print(f"> {request}\n{story}\n", flush=True)
    return kept


def show_chats(sampler: Sampler) -> None:
    """Print a few conversations of several turns."""
    for chat in CHATS:
        messages = []
        for text in chat:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": sampler.chat(messages)[0]})
            print(f"> {text}\n{messages[-1]['content']}\n", flush=True)


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stories", type=int, default=200)
    parser.add_argument(
        "--show", type=int, default=4, help="stories to print; those that miss something are printed too"
    )
    parser.add_argument("--rows", type=int, default=32, help="rows of 1024 tokens for the perplexity")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sampler = Sampler(options.folder, options.temperature, options.top_p, options.seed)
    print(f"perplexity {perplexity(sampler, options.rows, 1024):.4f}", flush=True)
    kept = fidelity(sampler, options.stories, options.seed, options.show)
    show_chats(sampler)
    for key, values in sorted(kept.items()):
        print(f"{key}: {sum(values)}/{len(values)} = {sum(values) / len(values):.1%}")


if __name__ == "__main__":
    main()
