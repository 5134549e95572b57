"""Prompts from a file, answers into another: as many as there are, and on from there after the process was killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Unpack

from bitnet_inference.answer_file import OWN_ANSWERS
from bitnet_inference.batch_files import BatchFiles, BatchResult
from bitnet_inference.config import check_progress
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import BackendError, FormatError, InvalidParams, Stopped, Unsupported
from bitnet_inference.in_flight import Ended, InFlight, Running
from bitnet_inference.llm import LLM
from bitnet_inference.prompt_file import PromptLine, read_prompt
from bitnet_inference.prompts import BatchProgress, TermOptions, read_terms
from bitnet_inference.ranked import Choices
from bitnet_inference.stream import Generation, Stream


def generate_file(
    llm: LLM,
    input_path: str | Path,
    output_path: str | Path,
    params: SamplingParams | None = None,
    *,
    retry_errors: bool = True,
    progress: BatchProgress = None,
    **terms: Unpack[TermOptions],
) -> BatchResult:
    """Answer the prompts of a JSONL file into another, and go on where an earlier run was ended; docs/offline.md.

    A line of the input is {"prompt": text or token ids}, which is continued, or {"messages": [...]}, which are
    answered; with "id", "n" and "best_of" (see LLM.choices) and "params" (sampling options of its own) if wanted. Every
    answer is one line of the output, in the order in which they end, written when it is there; a prompt that fails is a
    line with "error". Prompts that have an answer are left out, those with an error too unless `retry_errors`. With a
    seed, line n draws with seed + n - 1, so that the texts are those of a run that was not interrupted. `progress` and
    `terms` are those of LLM.generate.

    Raises FormatError for a line that is wrong or an output that belongs to another input, model or params,
    InvalidParams for files that cannot be read or written, Unsupported, and Stopped.
    """
    with BatchRun(input_path, output_path, retry_errors=retry_errors) as run:
        return run.run(llm, params, progress=progress, **terms)


class BatchRun(BatchFiles[PromptLine]):
    """The two files of `generate_file`, checked before there is a model. Nobody else writes the output meanwhile."""

    def __init__(self, input_path: str | Path, output_path: str | Path, *, retry_errors: bool = True) -> None:
        """Raises what generate_file raises for files."""
        super().__init__(input_path, output_path, read_prompt, OWN_ANSWERS, retry_errors=retry_errors)

    def run(
        self,
        llm: LLM,
        params: SamplingParams | None = None,
        *,
        progress: BatchProgress = None,
        **terms: Unpack[TermOptions],
    ) -> BatchResult:
        """Answer what has no answer; see generate_file."""
        check_progress(progress)
        shared = _checked(llm, params)
        read_terms(terms)  # refused once, and not for every line
        if not llm.tokenizer.templates:
            self._refuse_messages()
        num_before, start = self.num_done, time.monotonic()
        num_prompt_tokens = num_output_tokens = 0
        self._answers.begin(settings_of(llm, shared))
        lines = self._prompts.lines(self._answers.lacks)
        with InFlight(lines, partial(_start, llm, shared, terms), lambda line: line.num_texts) as in_flight:
            for ended in in_flight:
                answer = _answer(llm, ended)
                self._answers.write(ended.item.number, answer)
                num_prompt_tokens += answer.get("num_prompt_tokens", 0)
                num_output_tokens += answer.get("num_output_tokens", 0)
                if progress is not None:
                    progress(self.num_done, self.num_prompts)
        wall_s, num_errors = time.monotonic() - start, self._answers.num_errors
        return BatchResult(self.num_prompts, num_before, num_errors, num_prompt_tokens, num_output_tokens, wall_s)

    def _refuse_messages(self) -> None:
        """Raise FormatError for the first line that is left and has messages."""
        for line in self._prompts.lines(self._answers.lacks):
            if line.messages is not None:
                why = "has messages, and the model has no chat template: give a prompt"
                raise FormatError(self._prompts.path, f"line {line.number}", why)


def _checked(llm: LLM, params: SamplingParams | None) -> SamplingParams:
    """What is wrong with the shared parameters is refused once, and not for every line."""
    if not isinstance(params, SamplingParams | None):
        raise InvalidParams("params must be SamplingParams: options of single prompts stand in their lines")
    shared = llm.default_params if params is None else params
    llm.resolved(shared).check(llm.config.vocab_size)
    return shared


def settings_of(llm: LLM, shared: SamplingParams) -> int:
    """A hash of what all answers of a file have in common; callables count by their names, which every run has."""
    processors = [_name(each) for each in shared.processors]
    named = replace(shared, processors=processors, strategy=shared.strategy and _name(shared.strategy))
    return int.from_bytes(blake2b(repr((named, llm.config)).encode(), digest_size=8).digest())


def _name(given: str | Callable[..., Any]) -> str:
    return given if isinstance(given, str) else getattr(given, "__qualname__", type(given).__qualname__)


def _start(
    llm: LLM, shared: SamplingParams, terms: TermOptions, line: PromptLine
) -> Running[Generation | list[Generation]]:
    params = line.params(shared)
    if line.num_choices is not None:
        return Choices.begin(partial(_start_choices, llm, terms, line), line.num_choices, line.best_of, params)
    if line.messages is not None:
        return llm.stream_chat(line.messages, params, **terms)
    assert line.prompt is not None, "a line has a prompt or messages"
    return llm.stream(line.prompt, params, **terms)


def _start_choices(
    llm: LLM, terms: TermOptions, line: PromptLine, number: int, params: SamplingParams
) -> Sequence[Stream]:
    if line.messages is not None:
        return llm.stream_chat_choices(line.messages, number, params, **terms)
    assert line.prompt is not None, "a line has a prompt or messages"
    return llm.stream_choices(line.prompt, number, params, **terms)


def _answer(llm: LLM, ended: Ended[PromptLine, Generation | list[Generation]]) -> dict[str, Any]:
    identity = {} if ended.item.id is None else {"id": ended.item.id}
    try:
        found = ended.read()
    except (Stopped, Unsupported):  # this concerns all of them
        raise
    except Exception as error:
        if isinstance(error, BackendError) and not llm.is_open:  # so does a device that is lost
            raise
        return {"error": f"{type(error).__name__}: {error}", **identity}
    has_words = llm.tokenizer.has_words
    if isinstance(found, Generation):
        return {**identity, **_fields(found, has_words)}
    assert isinstance(ended.outcome, Choices), "choices have several texts"
    counts = {
        "num_prompt_tokens": found[0].usage.num_prompt_tokens,
        "num_output_tokens": ended.outcome.num_output_tokens,
    }
    return {**identity, "choices": [_fields(each, has_words) for each in found], **counts}


def _fields(output: Generation, has_words: bool) -> dict[str, Any]:
    """What does not depend on what else was under way: times do."""
    fields: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stopped_by": output.stopped_by,
        "num_prompt_tokens": output.usage.num_prompt_tokens,
        "num_output_tokens": output.usage.num_output_tokens,
    }
    counts = {name: getattr(output.usage, name) for name in ("num_dropped_tokens", "num_slides")}
    fields |= {name: count for name, count in counts.items() if count}
    if output.logprobs is not None or not has_words:
        fields["token_ids"] = output.token_ids
    if output.logprobs is not None:
        fields["logprobs"] = [asdict(entry) for entry in output.logprobs]
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [None if entry is None else asdict(entry) for entry in output.prompt_logprobs]
    return fields
