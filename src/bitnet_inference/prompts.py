"""What an LLM may be asked, and on which terms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from copy import copy
from numbers import Integral
from typing import Any, NoReturn, TypedDict, TypeVar

import numpy as np

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.terms import Terms
from bitnet_inference.errors import EngineError, InvalidParams, OutOfMemory, RequestError
from bitnet_inference.json_objects import without_nulls
from bitnet_inference.text.messages import check_messages

Encoded = TypeVar("Encoded")

THINKING = "enable_thinking"  # what Qwen3's chat template, and many after it, call it
Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None
Progress = Callable[[int, int], None]  # what is done, of how much
BatchProgress = Callable[[int, int | None], None] | None  # prompts done, prompts in all where that is known


class TermOptions(TypedDict, total=False):
    """On which terms requests are served; see Terms."""

    priority: int
    timeout_s: float | None
    cache_salt: str


class ChatOptions(TypedDict, total=False):
    """What a chat template may be given besides the messages; see Chat.render."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    template: str | None
    variables: Mapping[str, Any] | None


class TalkOptions(ChatOptions, TermOptions, total=False):
    """What a conversation may be answered with: ChatOptions and TermOptions."""


class ScoreOptions(TermOptions, total=False):
    """What scoring prompts may be given; see LLM.score."""

    start: int | Sequence[int]
    progress: Progress | None


class BatchOptions(TermOptions, total=False):
    """What many prompts may be continued with."""

    progress: BatchProgress


class BatchTalkOptions(TalkOptions, BatchOptions, total=False):
    """What many conversations may be answered with."""


def read_terms(options: Mapping[str, Any]) -> Terms:
    """The terms that a call was given. Raises InvalidParams, and TypeError for what are no terms."""
    _check_names(options, TermOptions)
    return Terms(**options)


def split_terms(options: Mapping[str, Any]) -> tuple[Terms, dict[str, Any]]:
    """The terms among the options of a conversation, and the others. Raises as read_terms."""
    _check_names(options, TalkOptions)
    terms = {name: value for name, value in options.items() if name in TermOptions.__annotations__}
    return Terms(**terms), {name: value for name, value in options.items() if name not in terms}


def known_variables(
    templates: Mapping[str, str], given: Mapping[str, Any] | None, told_as: str = "variables"
) -> dict[str, Any]:
    """Variables for one of these chat templates. Raises InvalidParams for those that would do nothing there.

    Not to think is what models do whose template knows nothing of it, so that many clients ask all of them for it.
    """
    variables: dict[str, Any] = without_nulls(given or {})
    for name in variables if templates else ():
        says_nothing_new = name == THINKING and variables[name] is False
        if not says_nothing_new and not any(
            re.search(rf"\b{re.escape(name)}\b", template) for template in templates.values()
        ):
            raise InvalidParams(f"{told_as}: this model's chat template knows no {name!r:.80}: leave it out")
    return variables


@contextmanager
def placed(index: int, total: int | None, among: str = "prompts") -> Iterator[None]:
    """In an error of a request, say which one of `total` it is about; None where nobody knows how many there are.

    Other errors, as of an engine that stops, are about all of them.
    """
    try:
        yield
    except (RequestError, EngineError) as error:
        is_its_own = isinstance(error, RequestError) or type(error) in (EngineError, OutOfMemory)
        if total == 1 or not is_its_own:
            raise
        told = copy(error)  # a processor may raise the same one again
        told.args = (f"{among}[{index}]: {error}",)
        raise told from error


def is_lazy(prompts: object) -> bool:
    """Whether these are prompts that come one by one, as from a generator, and not a prompt or a list."""
    if _is_array(type(prompts)):
        return False
    return isinstance(prompts, Iterable) and not isinstance(prompts, (Sequence, Mapping, Set))


def count(prompts: object) -> int | None:
    """How many prompts there are; None where nobody knows before the last one has come."""
    return len(prompts) if isinstance(prompts, Sized) else None


def params_of_each(params: Any, num_prompts: int) -> Sequence[SamplingParams | None]:
    """The parameters of each prompt, from those for all or from a list with one entry a prompt; None is the model's."""
    if isinstance(params, SamplingParams | None):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams | None) for each in params):
        raise InvalidParams("params must be SamplingParams, or a list of them with one entry a prompt")
    if len(params) != num_prompts:
        raise InvalidParams(f"{len(params)} params for {num_prompts} prompts: give one for each, or one for all")
    return params


def one_for_all(params: Params) -> SamplingParams | None:
    """The parameters for prompts whose number is not known; raises InvalidParams for a list."""
    if not isinstance(params, SamplingParams | None):
        raise InvalidParams("params must be one for all where prompts come one by one: give SamplingParams, or lists")
    return params


def is_one_talk(messages: object) -> bool:
    """A list of messages is one conversation, a list of such lists is many. Raises InvalidParams for bad messages."""
    if is_lazy(messages):
        return False
    if not isinstance(messages, Sequence) or not messages or not isinstance(messages[0], list | tuple):
        return True
    for index, talk in enumerate(messages):
        with placed(index, len(messages)):
            check_messages(talk)
    return False


def is_many(prompts: object) -> bool:
    """Whether these are several prompts to continue: a list, or what yields them. Raises InvalidParams for bad ones."""
    if is_lazy(prompts):
        return True
    if is_one_prompt(prompts):
        return False
    if isinstance(prompts, Sequence):
        for index, each in enumerate(prompts):
            if isinstance(each, Sequence) and not each:
                _refuse_prompts(f"prompts[{index}] is empty")
    return True


def is_one_prompt(prompts: Any) -> bool:
    """A string or a list of token ids is one prompt, a list of these is many. Raises InvalidParams for all else.

    An array is as good as a list, of texts too.
    """
    if isinstance(prompts, str):
        return True
    if _is_array(type(prompts)) and prompts.ndim:
        if not len(prompts):
            _refuse_prompts("there is no prompt: the array is empty")
        kind = getattr(getattr(prompts, "dtype", None), "kind", None)
        if kind in ("O", "T", "U"):  # of objects, which may be texts, or of texts
            return is_one_prompt(prompts.tolist())
        return bool(prompts.ndim == 1)
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
        _refuse_prompts(f"a prompt must be a string or a list of token ids, not {type(prompts).__name__}")
    if not prompts:
        _refuse_prompts("there is no prompt: the list is empty")
    kinds = {_prompt_kind(kind) for kind in set(map(type, prompts))}
    if len(kinds) > 1 or "nothing" in kinds:
        _refuse_prompts("a list must hold token ids only, or prompts only")
    return kinds == {"id"}


def encode_each(prompts: Iterable[Any], encode: Callable[[Any], Encoded], among: str = "prompts") -> Iterator[Encoded]:
    """The token ids of prompts in order, as they are needed; an error says which one it is about."""
    total = count(prompts)
    for index, prompt in enumerate(prompts):
        with placed(index, total, among):
            encoded = encode(prompt)
        yield encoded


def scoring_params(start: int | Sequence[int], count: int) -> list[SamplingParams]:
    """To score so many prompts, from one position on or each from its own. Raises InvalidParams."""
    starts = start if isinstance(start, Sequence) else [start] * count
    if len(starts) != count:
        raise InvalidParams(f"{len(starts)} starts for {count} prompts: give one for each, or one for all")
    for each in starts:
        if isinstance(each, bool) or not isinstance(each, Integral) or not 0 <= each < 1 << 31:
            raise InvalidParams(f"start is {each!r:.60}: give the position of a token, or a list of them")
    return [SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=each) for each in starts]


def _check_names(options: Mapping[str, Any], known: type) -> None:
    names = known.__annotations__
    for name in options:
        if name in SamplingParams.__annotations__:
            raise TypeError(f"{name} is one of SamplingParams: give params=SamplingParams({name}=...)")
        if name not in names:
            raise TypeError(f"the option {name} is not known here: there are {', '.join(names)}")


def _prompt_kind(kind: type) -> str:
    if issubclass(kind, int | np.integer) and kind is not bool:
        return "id"
    return "prompt" if issubclass(kind, str | list | tuple) or _is_array(kind) else "nothing"


def _is_array(kind: type) -> bool:
    """Whether these are arrays, NumPy's or those of others, as PyTorch's tensors."""
    return hasattr(kind, "__dlpack__")


def _refuse_prompts(why: str) -> NoReturn:
    raise InvalidParams(f'{why}: give "text", [token ids], or a list of either')
