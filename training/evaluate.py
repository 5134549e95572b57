"""Measures the exported folder with the engine: held-out perplexity, and how often a story keeps what was asked for."""

import argparse
import math
import random
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

from data import Corpus
from grammar import names, words
from grammar.moods import MOODS
from tokenizers import Tokenizer

from bitnet_inference import LLM, SamplingParams

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
    ["who are you?", "tell me a story", "another one please", "thanks!"],
    ["What is the capital of France?", "Write a story about a teapot named Zorbilo", "thank you"],
    ["Tell me a story about Tom and a red kite", "Tell me a story about a shy bear", "Who was the friend?"],
]
Message = dict[str, str]


def perplexity(llm: LLM, folder: Path, documents: int) -> float:
    """exp(mean loss) over replies and stories of a seed that training never used."""
    corpus = Corpus(Tokenizer.from_file(str(folder / "tokenizer.json")), HELD_OUT_SEED)
    total, count = 0.0, 0
    for ids, targets in islice(corpus.documents(), documents):
        scores = [score for score, wanted in zip(llm.score(ids), targets, strict=True) if wanted]
        total, count = total - sum(scores), count + len(scores)
    return math.exp(total / count)


def draw_name(rng: random.Random) -> tuple[str, str]:
    """A name and where it is from: known, real but never seen in training, or made up."""
    source = rng.choice(("known", "held out", "made up"))
    if source == "held out":
        return rng.choice(names.HELD_OUT), source
    return (rng.choice(names.KNOWN[rng.choice(("she", "he"))]) if source == "known" else names.invented(rng)), source


def draw_request(rng: random.Random) -> tuple[str, str, str, str]:
    """A request, and the name, the name's source and the animal in it."""
    name, source = draw_name(rng)
    kind, mood = rng.choice(words.KINDS), rng.choice(list(MOODS))
    return rng.choice(REQUESTS).format(name=name, kind=kind, mood=mood), name, source, kind


def count_word(word: str, text: str) -> int:
    """How often a word stands in a text, case ignored."""
    return len(re.findall(rf"\b{re.escape(word)}\b", text, re.IGNORECASE))


def reply(llm: LLM, talks: list[list[Message]], params: SamplingParams, seed: int) -> list[tuple[str, bool]]:
    """The next message of each conversation, and whether it ended by itself."""
    each = [replace(params, seed=seed + number) for number in range(len(talks))]
    return [(answer.text, answer.finish_reason == "stop") for answer in llm.chat(talks, each)]


def fidelity(llm: LLM, params: SamplingParams, count: int, seed: int, show: int) -> dict[str, list[bool]]:
    """For each source of names, whether each story has the name twice or more, has the animal, and ends by itself."""
    rng = random.Random(seed)
    asked = [draw_request(rng) for _ in range(count)]
    stories = reply(llm, [[{"role": "user", "content": request}] for request, *_ in asked], params, seed)
    kept: dict[str, list[bool]] = {}
    for number, ((request, name, source, kind), (story, ended)) in enumerate(zip(asked, stories, strict=True)):
        has_name, has_kind = count_word(name, story) >= 2, count_word(kind, story) >= 1
        namesake = any(other != kind for other in re.findall(rf"\b{re.escape(name)} the (\w+)", story))
        measured = {
            f"name, {source}": has_name, "name": has_name, "animal": has_kind, "name and animal": has_name and has_kind,
            "friends have other names": not namesake, "ended": ended,
        }  # fmt: skip
        for key, value in measured.items():
            kept.setdefault(key, []).append(value)
        if number < show or not all(measured.values()):
            print(f"> {request}\n{story}\n", flush=True)
    return kept


def show_chats(llm: LLM, params: SamplingParams, seed: int) -> None:
    """Print a few conversations of several turns."""
    for chat in CHATS:
        messages: list[Message] = []
        for text in chat:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": reply(llm, [messages], params, seed)[0][0]})
            print(f"> {text}\n{messages[-1]['content']}\n", flush=True)


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stories", type=int, default=200)
    parser.add_argument(
        "--show", type=int, default=4, help="stories to print; those that miss something are printed too"
    )
    parser.add_argument("--documents", type=int, default=200, help="stories and conversations for the perplexity")
    parser.add_argument("--temperature", type=float, help="the folder's own if not given")
    parser.add_argument("--top-p", type=float, help="the folder's own if not given")
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    with LLM.load(options.folder) as llm:
        given = {key: value for key in ("temperature", "top_p") if (value := getattr(options, key)) is not None}
        params = replace(llm.default_params, **given)
        print(f"perplexity {perplexity(llm, options.folder, options.documents):.4f}", flush=True)
        kept = fidelity(llm, params, options.stories, options.seed, options.show)
        show_chats(llm, params, options.seed)
    for key, values in sorted(kept.items()):
        print(f"{key}: {sum(values)}/{len(values)} = {sum(values) / len(values):.1%}")


if __name__ == "__main__":
    main()
