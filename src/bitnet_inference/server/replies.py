"""What a model says in a conversation, whichever API asks: text, of which some may turn out to be calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.grammar import Grammar
from bitnet_inference.llm import LLM
from bitnet_inference.prompts import THINKING, ChatOptions, TermOptions, known_variables
from bitnet_inference.stream import Stream
from bitnet_inference.tools import HeldText, Style, ToolCall, Tools, call_style
from bitnet_inference.written_calls import CallPart, WrittenCalls


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation to answer: OpenAI's messages and tools, and how. `tools` are those that may be called.

    `variables` are further ones for the chat template; `no_thinking` tells it to do without, where it knows of that.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    shown_tools: Sequence[Mapping[str, Any]] | None = None
    tools: Tools | None = None
    variables: Mapping[str, Any] | None = None
    no_thinking: bool = False
    num_choices: int = 1


def open_talk(llm: LLM, talk: Talk, terms: TermOptions) -> list[Stream]:
    """Begin to answer. Raises InvalidParams and all else that is wrong with the request."""
    grammar = talk.grammar if talk.tools is None else _form(talk.tools, reply_style(llm), talk.grammar)
    return llm.stream_chat_choices(
        talk.messages,
        talk.num_choices,
        sampling(llm.default_params, talk.sampling, grammar),
        **_shown(llm, talk),
        **terms,
    )


def _form(tools: Tools, style: Style, form: Grammar | None) -> Grammar | None:
    try:
        return tools.grammar(style, form)
    except InvalidParams as error:
        raise InvalidParams(f"tools: {error}") from None


def num_prompt_tokens(llm: LLM, talk: Talk) -> int:
    """How many tokens a conversation has, up to where the answer begins."""
    return len(llm.encode_chat(talk.messages, **_shown(llm, talk)))


def _shown(llm: LLM, talk: Talk) -> ChatOptions:
    templates = llm.tokenizer.templates
    tools = talk.tools.told(talk.shown_tools, templates) if talk.tools is not None else None
    variables = known_variables(templates, talk.variables)
    if talk.no_thinking and any(THINKING in each for each in templates.values()):
        variables = {THINKING: False, **variables}
    return {"tools": tools, "variables": variables}


def sampling(defaults: SamplingParams, given: Mapping[str, Any], grammar: Grammar | None) -> SamplingParams:
    """The model's own parameters, but for what the request says. Raises InvalidParams."""
    return replace(defaults, **given, grammar=grammar)


class Reply:
    """One answer on its way: what of it may be shown, what it calls, and what it ends with."""

    def __init__(self, style: Style, tools: Tools | None, one_call: bool = False) -> None:
        self._style, self._tools, self._one_call = style, tools, one_call
        self._held = HeldText(style)
        self._written = None
        if tools is not None and tools.are_certain(style):
            self._written = WrittenCalls(style, tools.functions)
        self._parts: list[CallPart] = []
        self._shown: list[str] = []
        self.calls: list[ToolCall] = []  # at the end
        self.cut: ToolCall | None = None  # one that was begun behind these

    def push(self, text: str) -> str:
        """The part of the text so far that may be shown now; the rest may be a call."""
        shown = text if self._tools is None else self._held.push(text)
        self._shown.append(shown)
        if self._written is not None:
            self._parts += self._written.more(self._held.text)
        return shown

    def parts(self) -> list[CallPart]:
        """What there is of calls since this was asked last."""
        parts, self._parts = self._parts, []
        return [part for part in parts if not (self._one_call and part.number)]

    def end(self) -> str:
        """What is still to be shown; from now on the calls are known."""
        if self._tools is None:
            return ""
        if self._written is not None and (self._written.calls or self._written.cut):
            rest, calls = "", self._written.calls
            self.cut = None if self._one_call and calls else self._written.cut
        else:
            rest, calls = self._find_calls(self._tools)
            self._parts = [CallPart(number, call, True, call) for number, call in enumerate(calls)]
        self._shown.append(rest)
        self.calls = calls[:1] if self._one_call else calls
        return rest

    @property
    def text(self) -> str:
        """All that has been shown."""
        return "".join(self._shown)

    @property
    def is_called(self) -> bool:
        """Whether it ends with calls, of which none is cut."""
        return bool(self.calls) and self.cut is None

    def _find_calls(self, tools: Tools) -> tuple[str, list[ToolCall]]:
        content, calls = tools.find_calls(self._held.text, self._style)
        if not calls:
            return content[len(self.text) :], []
        before = self.text.strip()
        return content[len(before) :] if content.startswith(before) else "", calls

    def read(self, text: str) -> None:
        """All of it at once."""
        self.push(text)
        self.end()


def reply_style(llm: LLM) -> Style:
    """How this model writes calls."""
    return call_style(llm.tokenizer.templates)
