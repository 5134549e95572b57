"""The models that an LLM holds: its own, and perhaps one that drafts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TypeVar

from bitnet_inference.amounts import told_bytes
from bitnet_inference.backends import Choice, load_fallback, load_model
from bitnet_inference.drafts import Drafts
from bitnet_inference.engine.events import PlanTimes
from bitnet_inference.engine.worker import Worker
from bitnet_inference.errors import BackendError, InvalidParams, OutOfMemory
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.model.contract import Model
from bitnet_inference.model.loader import Progress
from bitnet_inference.text.tokenizer import Tokenizer

Made = TypeVar("Made")
Maker = Callable[..., Made]  # of a model, and of `fallback`, which loads another one


class Held:
    """`notes` are what their user should know. `device` and `why` tell where the first one computes, if that is known.

    May be read from any thread.
    """

    def __init__(self, model: Model, drafts: Drafts, fallback: Callable[[], Model] | None = None) -> None:
        """`fallback` loads what stands for the first one where that fails."""
        self._load_other = fallback
        self._models = [model] if isinstance(drafts, str) else [model, drafts]
        self.notes: tuple[str, ...] = getattr(model, "notes", ())  # no part of the contract
        self.device = self.why = ""
        self.failure = ""  # why it is not the first one any more
        self._lost: Model | None = None  # closed, and no other one is in its place yet

    def tell(self, choice: Choice) -> None:
        """How the device of the first one was chosen."""
        self.device, self.why = choice.device, choice.why
        self.notes += (choice.note,) if choice.note else ()

    @property
    def num_bytes(self) -> int:
        """Memory of weights and caches."""
        return sum(each.num_bytes for each in self._models)

    @property
    def fallback(self) -> Callable[[BackendError], Model] | None:
        """What the engine calls where the first one fails."""
        return None if self._load_other is None else self._replace

    def _replace(self, error: BackendError) -> Model:
        assert self._load_other is not None, "there is no other"
        self._lost = self._models[0]
        with suppress(Exception):  # its device has failed
            self._lost.close()
        self._models[0], self._lost = self._load_other(), None
        self.failure = f"{self.device or 'the device'} failed, so the model was loaded for the CPU: {error}"
        self.device, self.why, self.notes = "cpu", self.failure, (*self.notes, self.failure)
        return self._models[0]

    def plan_times(self) -> PlanTimes:
        """From now on, measure the steps of the model's plans. Raises InvalidParams where that is impossible."""
        start: Callable[[], PlanTimes] | None = getattr(self._models[0], "time_steps", None)  # no part of the contract
        if start is None:
            raise InvalidParams('profile: this device cannot time the steps of its plan: choose "cpu", or leave it out')
        return start()

    def close(self, worker: Worker) -> None:
        """End the worker, which computes with them, and give their memory and threads back."""
        worker.stop(drain=False)
        for model in [] if worker.is_forked else self._models:  # the threads that closing would join are the parent's
            if model is not self._lost:
                with suppress(Exception) if worker.is_lost else nullcontext():  # its device has failed
                    model.close()


class Holder:
    """What an LLM tells of the models that it holds."""

    tokenizer: Tokenizer
    _held: Held
    _worker: Worker

    def __repr__(self) -> str:
        where = f" on {self.device}" if self.device else ""
        return f"<LLM {self.tokenizer.path}{where}, {told_bytes(self.num_bytes)}{'' if self.is_open else ', closed'}>"

    @property
    def is_open(self) -> bool:
        """Whether requests are taken.

        Not behind `drain` and `close`, nor once the engine or the device has failed, nor in a forked process.
        """
        return self._worker.is_open

    @property
    def notes(self) -> tuple[str, ...]:
        """What its user should know, a line each."""
        return self._held.notes

    @property
    def device(self) -> str:
        """Where it computes, as in "cuda"; empty for a model that was given loaded."""
        return self._held.device

    @property
    def why_there(self) -> str:
        """Why that device was chosen, in a few words; empty for a model that was given loaded."""
        return self._held.why

    @property
    def failure(self) -> str:
        """How its device failed, so that the CPU has the model (see `fallback`); empty where it has not.

        Whether it goes on there, or finds no room for its cache, `LLM.is_open` says.
        """
        return self._held.failure

    @property
    def num_bytes(self) -> int:
        """Memory of its weights and of its KV cache."""
        return self._held.num_bytes


def made_on(
    choice: Choice, checkpoint: Checkpoint, progress: Progress | None, make: Maker[Made]
) -> tuple[Made, Choice]:
    """What `make` makes of the model on the device of this choice, or on the CPU if that device fails at it; and which.

    Raises what loading raises; a BackendError or OutOfMemory of a device only where that was asked for.
    """
    try:
        model = load_model(checkpoint, choice.config, progress)
        try:
            return make(model, fallback=load_fallback(checkpoint, choice.config)), choice
        except (BackendError, OutOfMemory):
            model.close()
            raise
    except (BackendError, OutOfMemory) as error:
        if (instead := choice.instead(error)) is None:
            raise
        return made_on(instead, checkpoint, progress, make)
