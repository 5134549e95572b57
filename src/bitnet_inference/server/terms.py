"""On which terms a request is served: whose cache it shares, its rank, and how long it may take."""

from __future__ import annotations

import json

from starlette.requests import Request

from bitnet_inference.prompts import TermOptions
from bitnet_inference.server.failures import Failure
from bitnet_inference.server.gate import CALLER, OPTIONS
from bitnet_inference.server.options import ServerOptions


def terms_of(request: Request, user: str | None, priority: int, limit_s: float | None) -> TermOptions:
    """The terms for what a body calls `user`, `priority` and `timeout_s`, which may shorten the server's own.

    Raises Failure for a rank that nobody may ask for.

    Callers, and users of one caller, don't share a cache: none learns from the time to the first token what others ask.
    """
    options = request.scope.get(OPTIONS, ServerOptions())
    if priority > options.max_priority:
        why = f"priority is {priority}: at most {options.max_priority} may be asked for here"
        raise Failure(400, why, param="priority")
    salt = json.dumps([request.scope.get(CALLER, ""), user or ""])
    limits = [each for each in (options.request_timeout_s, limit_s) if each is not None]
    return {"cache_salt": salt, "priority": priority, "timeout_s": min(limits, default=None)}
