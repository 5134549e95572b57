"""What guessed tokens save: guesses that are right with a given probability, and prompt lookup on a repeated text."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from engine_streams import Numbers, Rows, medians

from bitnet_inference.backends import load_model
from bitnet_inference.bare_batch import TimedModel
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.engine.lookup import LookupDrafter
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Finish, Request, Usage
from bitnet_inference.engine.speculative import Draft, Drafter
from bitnet_inference.engine.worker import Worker
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.probe import Sampler

ACCEPTANCES = (0.0, 0.5, 0.9)
PROMPT, ANSWER = 64, 96  # tokens
MAX_BLOCKS = 256


def speculation(folder: Path, config: EngineConfig, sampler: Sampler) -> Rows:
    """One greedy stream with and without guesses; the text is the same."""
    switch = _Switch()
    with _Stage(TimedModel(load_model(open_checkpoint(folder), config)), switch) as stage:
        prompt = np.random.default_rng(0).integers(0, stage.vocab_size, PROMPT).tolist()
        text = stage.generate(prompt).token_ids
        rows = {}
        for share in ACCEPTANCES:
            drafter = _Knowing(text, share, stage.vocab_size)
            rows[f"{share:.0%} right"] = medians(sampler, partial(_turn, stage, switch, drafter, prompt))
        again = [*prompt, *text, *prompt]
        rows["lookup, prompt + text + prompt"] = medians(sampler, partial(_turn, stage, switch, LookupDrafter(), again))
        return rows


def _turn(stage: _Stage, switch: _Switch, drafter: Drafter, prompt: Sequence[int]) -> Numbers:
    """Without, with, and without again."""
    switch.drafter = None
    before = stage.generate(prompt)
    switch.drafter = drafter
    drafted = stage.generate(prompt)
    switch.drafter = None
    after = stage.generate(prompt)
    assert drafted.token_ids == before.token_ids == after.token_ids, "a draft has changed a text"
    plain = (before.tokens_s + after.tokens_s) / 2
    return {
        "tokens/s": drafted.tokens_s,
        "without": plain,
        "ratio": drafted.tokens_s / plain,
        "tokens a step": len(drafted.token_ids) / drafted.num_steps,
    }


class _Switch:
    """A drafter that can be changed while the engine runs; None guesses nothing."""

    costs_time = False

    def __init__(self) -> None:
        self.drafter: Drafter | None = None

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> Sequence[Draft]:
        """See Drafter."""
        return [Draft(())] * len(wanted) if self.drafter is None else self.drafter.draft(wanted)

    def forget(self, request: Request) -> None:
        """See Drafter."""
        if self.drafter is not None:
            self.drafter.forget(request)


class _Knowing:
    """Knows what comes, and says it with a given probability; else something else."""

    costs_time = False

    def __init__(self, text: Sequence[int], share: float, vocab_size: int) -> None:
        right = [random.Random(position).random() < share for position in range(len(text))]
        wrong = [(token_id + 1) % vocab_size for token_id in text]
        self._guesses = [good if is_right else bad for is_right, good, bad in zip(right, text, wrong, strict=True)]
        self._kind = round(100 * share) + 1000

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> list[Draft]:
        """See Drafter."""
        return [
            Draft(self._guesses[request.num_output : request.num_output + count], self._kind)
            for request, count in wanted
        ]

    def forget(self, request: Request) -> None:
        """See Drafter."""


class _Told:
    """A Sink that keeps what it hears, and knows the speed when it is over."""

    is_full = False

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.tokens_s, self.num_steps = 0.0, 0
        self.error: Exception | None = None
        self.is_over = threading.Event()

    def token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """See Sink."""
        self.token_ids.append(token_id)
        return False

    def finish(self, finish: Finish, usage: Usage) -> None:
        """See Sink."""
        self.error, self.tokens_s = finish.error, (usage.num_output_tokens - 1) / max(usage.output_s, 1e-9)
        self.is_over.set()


class _Stage:
    """An engine with a drafter, one request at a time."""

    def __init__(self, model: TimedModel, drafter: Drafter) -> None:
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._worker = Worker(Engine(model, max_num_blocks=MAX_BLOCKS, drafter=drafter))

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.stop(drain=False)
        self._model.close()

    def generate(self, prompt: Sequence[int]) -> _Told:
        """The greedy text behind a prompt; raises its error."""
        told, num_before = _Told(), self._model.num_forwards
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        self._worker.submit(Request(prompt, params, told))
        told.is_over.wait()
        if told.error is not None:
            raise told.error
        told.num_steps = self._model.num_forwards - num_before
        return told
