"""What a caller may ask of one generation."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.config import check_flag, check_unicode
from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.grammar import Grammar

Overflow = Literal["error", "truncate_left", "keep_system", "sliding"]
Processor = Callable[[NDArray[np.int32], NDArray[np.float32]], None]
Strategy = Callable[[NDArray[np.int32], NDArray[np.float32]], int]

MAX_LOGPROBS = 20  # as in OpenAI's API: more would cost more than the sampling itself
MAX_TEMPERATURE = 100.0
MAX_STOPS = 256  # a text is compared with each, and other requests wait meanwhile
_MAX_TOKENS = (1 << 31) - 1
_IN_PLACE_OF_STRATEGY = ("temperature", "top_k", "top_p", "min_p", "seed")


class _Range(NamedTuple):
    name: str
    low: float
    high: float
    meaning: str


_REALS = (
    _Range("temperature", 0.0, MAX_TEMPERATURE, "0 is greedy, 1 the model's own distribution"),
    _Range("top_p", 0.0, 1.0, "1 is off"),
    _Range("min_p", 0.0, 1.0, "0 is off"),
    _Range("repetition_penalty", 0.01, 100.0, "1 is off"),
    _Range("presence_penalty", -2.0, 2.0, "0 is off"),
    _Range("frequency_penalty", -2.0, 2.0, "0 is off"),
)
_WHOLES = (
    _Range("top_k", -1, _MAX_TOKENS, "0 and -1 are off"),
    _Range("min_tokens", 0, _MAX_TOKENS, "0 is off"),
    _Range("prompt_logprobs_from", 0, _MAX_TOKENS, "the position of a token of the prompt"),
)
_SEED = _Range("seed", -(1 << 63), (1 << 64) - 1, "None draws one")
_COUNTS = tuple(_Range(name, 0, (1 << 64) - 1, "counted from 0") for name in ("choice", "position"))
_OPTIONAL_WHOLES = (
    _SEED,
    _Range("max_tokens", 0, _MAX_TOKENS, "None is up to the end of the context"),
    _Range("logprobs", 0, MAX_LOGPROBS, "None is off, 0 the chosen token alone"),
    _Range("prompt_logprobs", 0, MAX_LOGPROBS, "None is off, 0 the prompt's own tokens alone"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Raises InvalidParams for what is impossible; nothing is ignored.

    `temperature`: 0 (or below 1e-5) is greedy, else logits are divided by it. At most 100.
    `top_k`: only the k best tokens; 0 is off, and so is -1, as in vLLM.
    `top_p`: only tokens whose better ones together have at most this probability (Llama's rule); 1 is off.
    `min_p`: only tokens of at least this part of the best one's probability; 0 is off.
    `repetition_penalty`: positive logits of tokens in prompt or output are divided by it, negative ones multiplied,
    as in Transformers; 1 is off.
    `presence_penalty`, `frequency_penalty`: subtracted from the logits of tokens in the output, once, and once an
    occurrence, as in OpenAI's API; -2 to 2.
    `logit_bias`: added to the logits of these token ids; -100 to 100.
    `seed`: equal seeds give equal text, whatever else runs; taken modulo 2^64. None draws one, for all choices of a
    prompt together (see Request.seed).
    `stop`: strings (or one), at most 256, that end the text; they are not part of it.
    `stop_token_ids`: further tokens that end the text like the model's own end tokens; they are not part of it.
    `max_tokens`: at most so many tokens. The default, 256, is a long answer that still ends where a model never stops
    by itself; None goes on to the end of the context. 0 computes the prompt alone.
    `min_tokens`: end tokens and stop_token_ids are banned until so many tokens are out; stop strings are not.
    `ignore_eos`: the model's end tokens are ordinary tokens; stop_token_ids still end the text.
    `grammar`: the form of the text, see Grammar; all tokens that do not fit are banned before everything else. End
    tokens and stop_token_ids are banned until the form is complete. The text ends with "stop" when nothing more fits,
    `min_tokens` or not; `max_tokens` and `stop` may cut it off before. None is off.
    `processors`: callables (or names that are registered with an LLM) that edit the logits first, in order:
    `processor(tokens, logits)` gets prompt and output so far, int32 [n], read-only, and the logits, float32 [vocab],
    into which it writes; -inf bans a token.
    `strategy`: a callable (or a registered name) that chooses the token in place of temperature, top_k, top_p, min_p
    and seed, which must be left out: `strategy(tokens, logits)` gets the logits after all edits, and returns an id.
    Both are called once for each token, in order, in the engine's thread; an error of theirs ends this request alone.
    `logprobs`: log-probabilities of the chosen token and of so many best ones (0 to 20), by the model itself: before
    processors, grammar, bias, penalties and temperature. None is off.
    `prompt_logprobs`: the same of the prompt's tokens, each after all before it, from position `prompt_logprobs_from`
    on; these are computed even if the cache has them. None is off.
    `overflow`: what gives way where prompt and answer do not fit into the context. "error": nothing; a longer prompt is
    refused. "truncate_left": the oldest tokens of the prompt, but for a BOS. "keep_system": the oldest turns of a
    conversation, but for its system message. With these three, the answer ends as "length" at the end of the context.
    "sliding": the prompt as by "truncate_left", and a full context becomes its first 4 tokens and its recent half, and
    the answer goes on; with max_tokens None, until something stops it. Penalties see what is in the context. A prompt
    gives way until there is room for max_tokens, or for a quarter of the context, where that is less.

    Order, as in Transformers: processors, grammar, bias and bans, repetition, frequency and presence penalty; then
    strategy, or temperature, top-k, top-p (of what top-k left), min-p.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0
    grammar: Grammar | None = None
    overflow: Overflow = "error"
    processors: Sequence[Processor | str] = ()
    strategy: Strategy | str | None = None

    def __post_init__(self) -> None:
        for wanted in _REALS:
            self._set(wanted.name, _real(wanted, getattr(self, wanted.name)))
        for wanted in _WHOLES:
            self._set(wanted.name, _whole(wanted, getattr(self, wanted.name)))
        self._set("top_k", max(self.top_k, 0))
        for wanted in _OPTIONAL_WHOLES:
            if getattr(self, wanted.name) is not None:
                self._set(wanted.name, _whole(wanted, getattr(self, wanted.name)))
        self._set("stop", _stop(self.stop))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        self._set("logit_bias", _bias(self.logit_bias))
        check_flag("ignore_eos", self.ignore_eos)
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidParams(f'grammar is {self.grammar!r:.60}: give a Grammar, as in Grammar(regex="[0-9]+")')
        if self.prompt_logprobs is None and self.prompt_logprobs_from:
            raise InvalidParams("prompt_logprobs_from is given without prompt_logprobs: give both, or none")
        if self.overflow not in get_args(Overflow):
            raise InvalidParams(f"overflow is {self.overflow!r:.60}: give one of {', '.join(get_args(Overflow))}")
        self._set("processors", _processors(self.processors))
        if self.strategy is not None:
            self._check_strategy()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            what = f"min_tokens is {self.min_tokens}, max_tokens {self.max_tokens}"
            raise InvalidParams(f"{what}: lower it, or raise max_tokens")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SamplingParams:
        """The parameters under these names; an unknown name raises InvalidParams, which tells the nearest one."""
        if not isinstance(options, Mapping):
            raise InvalidParams(f"sampling options are {options!r:.60}: give a mapping from their names")
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                nearest = difflib.get_close_matches(str(name), known, n=1)
                cure = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
                raise InvalidParams(f"unknown sampling option {name!r:.60}: {cure}")
        return cls(**options)

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken, without noise."""
        return self.temperature < 1e-5

    @property
    def edits_logits(self) -> bool:
        """Whether the model's logits are changed by bias or penalties (bans for min_tokens aside)."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)

    def check(self, vocab_size: int) -> None:
        """Raises InvalidParams for what the vocabulary of a model does not have."""
        for name, token_ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids)):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidParams(f"{name}: token {token_id} does not exist: give ids from 0 to {vocab_size - 1}")
        for given in (*self.processors, self.strategy):
            if isinstance(given, str):
                raise InvalidParams(f"{given!r:.60} is a name: only an LLM knows names, give the callable")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise InvalidParams(f"{name} is {count}: the vocabulary has only {vocab_size} tokens")

    @property
    def is_steered(self) -> bool:
        """Whether a processor or a strategy has a say."""
        return bool(self.processors) or self.strategy is not None

    def _check_strategy(self) -> None:
        if not _is_named_or_called(self.strategy):
            raise InvalidParams(f"strategy is {self.strategy!r:.60}: give a callable, or a registered name")
        for field in fields(self):
            if field.name in _IN_PLACE_OF_STRATEGY and getattr(self, field.name) != field.default:
                raise InvalidParams(f"a strategy chooses the token itself: leave {field.name} out, or the strategy")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def sampling_noise(seed: int, choice: int, position: int) -> int:
    """The noise of our own sampler: 64 bits that depend on these three numbers, and on nothing else.

    `seed` is that of SamplingParams, `choice` counts the choices of one prompt from 0, and `position` the tokens of
    prompt and output that stand before the one to be drawn. Raises InvalidParams.
    """
    words = _whole(_SEED, seed) % (1 << 64), _whole(_COUNTS[0], choice), _whole(_COUNTS[1], position)
    return int(native.sampling_noise(*words))


def _real(wanted: _Range, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidParams(f"{wanted.name} is {value!r:.60}: give a number ({wanted.meaning})")
    try:
        number = float(value)
    except OverflowError:  # a huge whole number
        number = math.inf
    if not wanted.low <= number <= wanted.high:  # NaN too
        raise InvalidParams(f"{wanted.name} is {number}: give {wanted.low:g} to {wanted.high:g} ({wanted.meaning})")
    return number


def _whole(wanted: _Range, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidParams(f"{wanted.name} is {value!r:.60}: give a whole number ({wanted.meaning})")
    number = int(value)
    if not wanted.low <= number <= wanted.high:
        raise InvalidParams(f"{wanted.name} is {number!s:.60}: give {wanted.low} to {wanted.high} ({wanted.meaning})")
    return number


def _stop(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise InvalidParams(f"stop is {value!r:.60}: give a string or a list of strings")
    if len(strings) > MAX_STOPS:
        raise InvalidParams(f"stop has {len(strings)} strings: give at most {MAX_STOPS}")
    if "" in strings:
        raise InvalidParams("stop has an empty string, which would stop at once: leave it out")
    for string in strings:
        check_unicode("stop", string)
    return tuple(strings)


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not all(_is_whole(item) for item in value):
        raise InvalidParams(f"stop_token_ids is {value!r:.60}: give a list of token ids")
    return tuple(int(item) for item in value)


def _bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(_is_whole(token_id) for token_id in value):
        raise InvalidParams(f"logit_bias is {value!r:.60}: give a mapping from token ids (whole numbers) to numbers")
    wanted = _Range("logit_bias", -100.0, 100.0, "0 is off")
    return {int(token_id): _real(wanted, bias) for token_id, bias in value.items()}


def _processors(value: object) -> tuple[Processor | str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(map(_is_named_or_called, value)):
        raise InvalidParams(f"processors is {value!r:.60}: give a list of callables and registered names")
    return tuple(value)


def _is_named_or_called(value: object) -> bool:
    return callable(value) or (isinstance(value, str) and bool(value))


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
