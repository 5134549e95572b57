"""Llama's own surface on an LLM: text_completion and chat_completion, as in Meta's llama3 repository.

They differ from the original in this: rows of a batch do not wait for each other; a prompt that fills the context gets
an empty answer with true log-probabilities; and user mistakes are InvalidParams and PromptTooLong, not assertions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from bitnet_inference.config import check_flag
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.grammar import Grammar
from bitnet_inference.grammar.response_format import read_response_format
from bitnet_inference.llm import LLM
from bitnet_inference.stream import Generation
from bitnet_inference.text.messages import Message, check_messages
from bitnet_inference.tools import Style, ToolCall, Tools, call_style, read_tools
from bitnet_inference.written_calls import WrittenCalls


class TextCompletion(TypedDict):
    """A continued text. With logprobs: each token decoded alone, and its natural log-probability at temperature 1.

    `filtered_by`: the label of the filter that ended it, where one did.
    """

    generation: str
    filtered_by: NotRequired[str]
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]


class ChatMessage(TypedDict):
    """What the assistant says, and the tools that it calls."""

    role: str
    content: str
    tool_calls: NotRequired[list[ToolCall]]


class ChatCompletion(TypedDict):
    """An answered dialog; the others as in TextCompletion."""

    generation: ChatMessage
    filtered_by: NotRequired[str]
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]


def text_completion(
    llm: LLM,
    prompts: Sequence[str],
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_gen_len: int | None = None,
    logprobs: bool = False,
    echo: bool = False,
    *,
    seed: int | None = None,
) -> list[TextCompletion]:
    """Continue texts. Special tokens written in them are plain text; a BOS goes in front.

    `max_gen_len`: at most so many tokens each; None is up to the end of the context. `echo`: the prompt, BOS and all,
    is part of the generation, and of the logprobs, where the first token has 0.0. `seed`: prompt i draws with
    seed + i. Raises InvalidParams and PromptTooLong.
    """
    check_flag("echo", echo)
    if not _is_list(prompts) or not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidParams("prompts must be a list of strings")
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    params = _params(llm, ids, temperature, top_p, max_gen_len, logprobs, seed, scores_prompt=echo and logprobs)
    outputs = llm.generate(ids, params) if ids else []
    return [_text(llm, prompt if echo else [], output) for prompt, output in zip(ids, outputs, strict=True)]


def chat_completion(
    llm: LLM,
    dialogs: Sequence[Sequence[Message]],
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_gen_len: int | None = None,
    logprobs: bool = False,
    *,
    seed: int | None = None,
    response_format: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
) -> list[ChatCompletion]:
    """Answer dialogs of {"role": ..., "content": ...}: perhaps a system message, then user and assistant in turn.

    The last message is the user's, or a tool's: behind an assistant's message with "tool_calls" come {"role": "tool",
    "tool_call_id": ..., "content": ...} with what the calls gave.

    `response_format` is OpenAI's: {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"name": ...,
    "schema": {...}}}, which is kept to. `tools` and `tool_choice` are OpenAI's too: with "auto" a call is looked for in
    the answer, "required" or a function's name forces one, and what was cut of one is not shown. Otherwise as
    text_completion.
    """
    style = call_style(llm.tokenizer.templates)
    grammar, callable_tools = read_form(style, response_format, tools, tool_choice)
    if not _is_list(dialogs) or not all(map(_is_list, dialogs)):
        raise InvalidParams("dialogs must be a list of dialogs, which are lists of messages")
    for index, dialog in enumerate(dialogs):
        _check_turns(index, dialog)
    shown_tools = callable_tools.told(tools, llm.tokenizer.templates) if callable_tools else None
    ids = [llm.encode_chat(dialog, tools=shown_tools) for dialog in dialogs]
    params = _params(llm, ids, temperature, top_p, max_gen_len, logprobs, seed, grammar)
    answers: list[ChatCompletion] = []
    # Encoded once more, and not as ids, in which a filter sees what the template has put around the messages.
    for output in llm.chat(list(map(list, dialogs)), params, tools=shown_tools) if ids else []:
        text = _text(llm, [], output)
        content: str = text.pop("generation")  # type: ignore[misc]
        message: ChatMessage = {"role": "assistant", "content": content}
        if callable_tools is not None:
            message["content"], calls = _without_calls(callable_tools, style, content)
            if calls:
                message["tool_calls"] = calls
        answers.append({"generation": message, **text})  # type: ignore[typeddict-item]
    return answers


def _without_calls(tools: Tools, style: Style, text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls.

    Where the form leaves nothing else they are taken as they are written, as a server streams them: it allows numbers
    that no float holds, which make no call elsewhere.
    """
    if tools.are_certain(style):
        written = WrittenCalls(style, tools.functions)
        list(written.more(text))
        if written.calls or written.cut:
            return "", written.calls
    return tools.find_calls(text, style)


def read_form(
    style: Style,
    response_format: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
) -> tuple[Grammar | None, Tools | None]:
    """The form that an answer shall have, and what it may call. Raises InvalidParams."""
    grammar, callable_tools = read_response_format(response_format), read_tools(tools, tool_choice)
    return grammar if callable_tools is None else callable_tools.grammar(style, grammar), callable_tools


def _params(
    llm: LLM,
    prompts: list[list[int]],
    temperature: float,
    top_p: float,
    max_gen_len: int | None,
    logprobs: bool,
    seed: int | None,
    grammar: Grammar | None = None,
    scores_prompt: bool = False,
) -> list[SamplingParams]:
    check_flag("logprobs", logprobs)
    shared = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        logprobs=0 if logprobs else None,
        prompt_logprobs=0 if scores_prompt else None,
        seed=seed,
        grammar=grammar,
    )
    return [
        replace(
            shared,
            max_tokens=_room(llm, prompt, max_gen_len),
            seed=None if shared.seed is None else (shared.seed + index) % (1 << 64),
        )
        for index, prompt in enumerate(prompts)
    ]


def _is_list(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str | bytes)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _room(llm: LLM, prompt: list[int], max_gen_len: int | None) -> int:
    room = max(0, llm.max_context - len(prompt))
    if max_gen_len is None:
        return room
    if not _is_whole(max_gen_len) or max_gen_len < 0:
        raise InvalidParams(f"max_gen_len is {max_gen_len!r}: give a whole number of at least 0")
    return min(max_gen_len, room)


def _text(llm: LLM, echoed: list[int], output: Generation) -> TextCompletion:
    ids = echoed + output.token_ids
    result: TextCompletion = {"generation": llm.tokenizer.decode(ids, skip_special_tokens=False)}
    if output.finish_reason == "filtered":
        result["filtered_by"] = str(output.stopped_by)
    if output.logprobs is not None:
        result["tokens"] = [llm.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
        entries = [*(output.prompt_logprobs or []), *output.logprobs]
        result["logprobs"] = [0.0 if entry is None else entry.logprob for entry in entries]
    return result


# A system message perhaps; then user (u), calls (c) with their results (t), and answer (a); the last waits for one.
_LETTERS = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
_TURNS = re.compile(r"s?(?:u(?:ct+)*a)*u(?:ct+)*")


def _check_turns(index: int, dialog: Sequence[Message]) -> None:
    messages = check_messages(dialog)
    letters = ("c" if "tool_calls" in message else _LETTERS.get(message["role"], "?") for message in messages)
    if not _TURNS.fullmatch("".join(letters)):
        raise InvalidParams(
            f"dialogs[{index}] has the roles {', '.join(message['role'] for message in messages)}: give user and "
            "assistant in turn, the user last, with or without a system message in front; tool results follow the calls"
        )
