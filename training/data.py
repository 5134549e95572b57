"""The corpus as rows of token ids: unlimited, seeded, packed without cutting a document, only replies in the loss."""

import random
from collections.abc import Iterator

import torch
from grammar import chat
from tokenizer import BOS, EOS, PAD, render, special_ids
from tokenizers import Tokenizer
from torch import Tensor

IGNORED = -100
PLAIN_SHARE = 0.1
Document = tuple[list[int], list[bool]]


class Corpus:
    """Documents from a seed: (ids, whether each id is a target)."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        special = special_ids(tokenizer)
        self.bos, self.eos, self.pad = special[BOS], special[EOS], special[PAD]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _story(self) -> Document:
        ids = [self.bos, *self.encode(chat.plain_story(self.rng)), self.eos]
        return ids, [False] + [True] * (len(ids) - 1)

    def _chat(self) -> Document:
        messages = chat.conversation(self.rng)
        ids, targets = [self.bos], [False]
        for message in messages:
            piece = self.encode(render([message]))
            is_reply = message["role"] == "assistant"
            # The prompt "Assistant:\n" is given, so the loss starts behind it.
            given = len(self.encode(render([], add_generation_prompt=True))) if is_reply else len(piece)
            ids += piece
            targets += [False] * given + [True] * (len(piece) - given)
        # The special token at the end of each message keeps merges from crossing: pieces equal the whole text's ids.
        return ids, targets

    def documents(self) -> Iterator[Document]:
        """Plain stories and conversations, mixed, without end."""
        while True:
            yield self._story() if self.rng.random() < PLAIN_SHARE else self._chat()

    def rows(self, length: int) -> Iterator[tuple[list[int], list[int]]]:
        """Rows of inputs and targets [length], packed best-fit from a pool of documents, padded at the end."""
        source = self.documents()
        pool: list[Document] = []
        while True:
            ids: list[int] = []
            targets: list[bool] = []
            while True:
                pool += [next(source) for _ in range(48 - len(pool))]
                room = length + 1 - len(ids)
                fitting = [number for number, (document, _) in enumerate(pool) if len(document) <= room]
                if not fitting:
                    break
                # The first document is the oldest one that fits, which keeps the order random; the rest fill the gap.
                best = fitting[0] if room > length // 2 else max(fitting, key=lambda number: len(pool[number][0]))
                document, wanted = pool.pop(best)
                ids += document
                targets += wanted
            pool = [entry for entry in pool if len(entry[0]) <= length + 1]
            if ids:
                yield self._padded(ids, targets, length)

    def _padded(self, ids: list[int], targets: list[bool], length: int) -> tuple[list[int], list[int]]:
        labels = [token if wanted else IGNORED for token, wanted in zip(ids, targets, strict=True)]
        missing = length + 1 - len(ids)
        return (ids + [self.pad] * missing)[:-1], (labels + [IGNORED] * missing)[1:]

    def batches(self, rows: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets [rows, length] of int64."""
        source = self.rows(length)
        while True:
            inputs, labels = zip(*(next(source) for _ in range(rows)), strict=True)
            yield torch.tensor(inputs), torch.tensor(labels)
