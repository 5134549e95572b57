"""Lines of OpenAI's Batch API: a request each in the input, and a response each in the output."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitnet_inference.answer_file import AnswerForm, Key
from bitnet_inference.errors import FormatError, InvalidParams
from bitnet_inference.in_flight import MAX_IN_FLIGHT
from bitnet_inference.json_objects import parse_object, shown, without_nulls
from bitnet_inference.line_file import CURE, fingerprint
from bitnet_inference.prompt_file import OPENAI_KEYS
from bitnet_inference.server.bodies import check_depth
from bitnet_inference.server.failures import Failure

# Where lines may be sent, and what has the prompts there: a list of these is that many requests.
URLS: Mapping[str, str | None] = {
    "/v1/chat/completions": None,
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/responses": None,
}


@dataclass(frozen=True)
class RequestLine:
    """A request: `body` goes to the path `url`, and its answer is called `custom_id`.

    `number` counts the lines of the file from 1. An engine has `num_requests` of it at a time, MAX_IN_FLIGHT at most.
    """

    number: int
    custom_id: str
    url: str
    body: bytes
    num_requests: int


def read_request(path: Path, number: int, data: bytes) -> RequestLine:
    """The line with this number of a file. Raises FormatError; what is wrong within a body is for the server to say."""
    where = f"line {number}"
    fields: Mapping[str, Any] = without_nulls(parse_object(data, path, where, CURE))
    try:
        _check(fields)
        body = fields["body"]
        check_depth(body)
    except (InvalidParams, Failure) as error:
        raise FormatError(path, where, str(error)) from None
    url = fields["url"]
    return RequestLine(number, fields["custom_id"], url, json.dumps(body).encode(), _num_requests(URLS[url], body))


def check_ids(path: Path, lines: Iterator[RequestLine]) -> None:
    """Raises FormatError for a custom_id that stands in two lines. Keeps 16 bytes a line meanwhile."""
    hashes, numbers = array("Q"), array("Q")
    for line in lines:
        hashes.append(fingerprint(line.custom_id.encode("utf-8", "surrogatepass")))
        numbers.append(line.number)
    order = np.argsort(np.asarray(hashes), kind="stable")
    ordered = np.asarray(hashes)[order]
    again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    if len(again):
        at = min(again, key=lambda place: order[place])
        first, second = (numbers[int(order[place])] for place in (at - 1, at))
        raise FormatError(path, f"line {second}", f"has the custom_id of line {first}: give each line its own")


def _check(fields: Mapping[str, Any]) -> None:
    """Raises InvalidParams for what is no request, and for one that is not answered in one piece."""
    if unknown := [key for key in fields if key not in OPENAI_KEYS]:
        keys = ", ".join(OPENAI_KEYS)
        raise InvalidParams(f"the key {shown(unknown[0])} is not known: lines of OpenAI's Batch API have {keys}")
    if missing := [key for key in OPENAI_KEYS if key not in fields]:
        raise InvalidParams(f"has no {missing[0]}: lines of OpenAI's Batch API have {', '.join(OPENAI_KEYS)}")
    custom_id, method, url, body = (fields[key] for key in OPENAI_KEYS)
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidParams(f"custom_id is {shown(custom_id)}: give a text")
    if method != "POST":
        raise InvalidParams(f'method is {shown(method)}: give "POST"')
    if not isinstance(url, str) or url not in URLS:
        raise InvalidParams(f"url is {shown(url)}: there are {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise InvalidParams(f"body is {shown(body)}: give an object")
    for name in ("stream", "background"):
        if body.get(name) is True:
            raise InvalidParams(f"body.{name} is true: a line is answered in one piece: leave it out")


def _num_requests(prompts: str | None, body: Mapping[str, Any]) -> int:
    """A guess: only the server says whether the body is sound."""
    number = max((each for each in map(body.get, ("n", "best_of")) if isinstance(each, int)), default=1)
    several = body.get(prompts) if prompts else None
    if isinstance(several, list) and several and not isinstance(several[0], int):
        number *= len(several)
    return min(max(1, number), MAX_IN_FLIGHT)


def _keyed(key: Key, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"id": f"batch_req_{key.line:010d}{key.fingerprint:016x}{key.settings:016x}", **answer}


# {"id": "batch_req_" and the key, "custom_id", "response": {"status_code", ...}, "error"}.
OPENAI_ANSWERS = AnswerForm(
    b'{"id": "batch_req_',
    re.compile(
        rb'\{"id": "batch_req_(?P<line>\d{10})(?P<fingerprint>[0-9a-f]{16})(?P<settings>[0-9a-f]{16})", '
        rb'"custom_id": "[^"\\\n]*(?:\\.[^"\\\n]*)*", '
        rb'"response": \{"status_code": (?:200|(?P<failed>\d{3})), [^\n]*\}\n'
    ),
    _keyed,
    lambda answer: answer["response"]["status_code"] != 200,
)
