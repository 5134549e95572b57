"""The shapes of OpenAI's Responses API: a response, its items, its parts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.server.response_schema import CallItem, MessageItem, ResponsesRequest
from bitnet_inference.stream import Generation
from bitnet_inference.tools import ToolCall


def response_head(body: ResponsesRequest, model: str, created: int, params: SamplingParams) -> dict[str, Any]:
    """All of a response but what it gives: what was asked for."""
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": body.previous_response_id,
        "background": body.background,
        "store": body.store,
        "truncation": body.truncation or "disabled",
        "text": {"format": _form(body), "verbosity": body.text.verbosity if body.text else None},
        "tool_choice": _choice(body),
        "tools": [_tool(each) for each in body.nested_tools],
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def message_item(identity: str, parts: Sequence[Mapping[str, Any]], status: str) -> dict[str, Any]:
    """What the assistant says."""
    return {"id": identity, "type": "message", "role": "assistant", "status": status, "content": list(parts)}


def text_part(text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The text of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_item(call: ToolCall, status: str = "completed") -> dict[str, Any]:
    """A call of a function."""
    function = call["function"]
    return {
        "id": call["id"].replace("call_", "fc_", 1),
        "type": "function_call",
        "status": status,
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
    }


def ended(output: Generation) -> dict[str, Any]:
    """Fields of a response that has ended: how, and what it has cost."""
    reasons = {"length": "max_output_tokens", "timeout": "max_output_tokens", "filtered": "content_filter"}
    reason, used = reasons.get(output.finish_reason), output.usage
    return {
        "status": "completed" if reason is None else "incomplete",
        "incomplete_details": None if reason is None else {"reason": reason},
        "usage": {
            "input_tokens": used.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": used.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.num_prompt_tokens + used.num_output_tokens,
        },
    }


def said(output: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, for a next turn, that the items of an output are; a call that was cut is none."""
    texts = ["".join(part["text"] for part in item["content"]) for item in output if item["type"] == "message"]
    calls = [
        {"id": item["call_id"], "type": "function", "function": {name: item[name] for name in ("name", "arguments")}}
        for item in output
        if item["type"] == "function_call" and item["status"] == "completed"
    ]
    message = {"role": "assistant", "content": "".join(texts)} | ({"tool_calls": calls} if calls else {})
    return [message] if texts or calls else []


def input_items(body: ResponsesRequest) -> Iterator[dict[str, Any]]:
    """The items that were sent, each with an id."""
    given = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for item in given:
        prefix = "msg" if isinstance(item, MessageItem) else "fc" if isinstance(item, CallItem) else "fco"
        shape = item.model_dump(exclude_none=True)
        if isinstance(item, MessageItem) and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            part = {"type": kind, "text": item.content}
            shape["content"] = [part | {"annotations": []} if kind == "output_text" else part]
        yield {"id": f"{prefix}_{secrets.token_hex(12)}", "status": "completed", **shape}


def _form(body: ResponsesRequest) -> dict[str, Any]:
    form = body.text.format if body.text else None
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _tool(nested: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = nested["function"]
    return {"type": "function", "parameters": None, "strict": None, "description": None} | function
