"""What a model says in a conversation, whichever API asks: text, of which some may turn out to be calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.grammar import Grammar
from bitnet_inference.llm import LLM
from bitnet_inference.prompts import TermOptions
from bitnet_inference.stream import Stream
from bitnet_inference.tools import HeldText, Style, ToolCall, Tools, call_style


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation to answer: OpenAI's messages and tools, and how. `tools` are those that may be called."""

    messages: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    grammar: Grammar | None = None
    shown_tools: Sequence[Mapping[str, Any]] | None = None
    tools: Tools | None = None
    num_choices: int = 1


def open_talk(llm: LLM, talk: Talk, terms: TermOptions) -> list[Stream]:
    """Begin to answer. Raises InvalidParams and all else that is wrong with the request."""
    knows_tools = any("tools" in each for each in llm.tokenizer.templates.values())
    if talk.tools is not None and not (talk.tools.forced or knows_tools):
        raise InvalidParams("tools: this model's chat template knows none: leave them out, or force a call")
    grammar = talk.grammar if talk.tools is None else _form(talk.tools, reply_style(llm), talk.grammar)
    return llm.stream_chat_choices(
        talk.messages,
        talk.num_choices,
        sampling(llm.default_params, talk.sampling, grammar),
        tools=tools_shown(talk),
        **terms,
    )


def _form(tools: Tools, style: Style, form: Grammar | None) -> Grammar | None:
    try:
        return tools.grammar(style, form)
    except InvalidParams as error:
        raise InvalidParams(f"tools: {error}") from None


def tools_shown(talk: Talk) -> Sequence[Mapping[str, Any]] | None:
    """The tools that the model is told of."""
    return talk.shown_tools if talk.tools is not None else None


def sampling(defaults: SamplingParams, given: Mapping[str, Any], grammar: Grammar | None) -> SamplingParams:
    """The model's own parameters, but for what the request says. Raises InvalidParams."""
    return replace(defaults, **given, grammar=grammar)


class Reply:
    """One answer on its way: what of it may be shown, and what it ends with."""

    def __init__(self, style: Style, tools: Tools | None, one_call: bool = False) -> None:
        self._style, self._tools, self._one_call = style, tools, one_call
        self._held, self._num_shown = HeldText(style), 0

    def push(self, text: str) -> str:
        """The part of the text so far that may be shown now; the rest may be a call."""
        shown = text if self._tools is None else self._held.push(text)
        self._num_shown += len(shown)
        return shown

    def end(self) -> tuple[str, list[ToolCall]]:
        """What is still to be shown, and the calls."""
        if self._tools is None:
            return "", []
        content, calls = self._tools.find_calls(self._held.text, self._style)
        if not calls:
            return content[self._num_shown :], []
        before = self._held.text[: self._num_shown].strip()
        rest = content[len(before) :] if content.startswith(before) else ""
        return rest, calls[:1] if self._one_call else calls

    def whole(self, text: str) -> tuple[str, list[ToolCall]]:
        """The same for a text that is there: all that is shown of it, and the calls."""
        shown = self.push(text)
        rest, calls = self.end()
        return shown + rest, calls


def reply_style(llm: LLM) -> Style:
    """How this model writes calls."""
    return call_style(llm.tokenizer.templates)
