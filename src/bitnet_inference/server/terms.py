"""On which terms a request is served: whose cache it shares, its rank, and how long it may take."""

from __future__ import annotations

import json

from starlette.requests import Request

from bitnet_inference.prompts import TermOptions
from bitnet_inference.server.failures import Failure
from bitnet_inference.server.gate import CALLER, OPTIONS
from bitnet_inference.server.options import ServerOptions
from bitnet_inference.server.schema import Fields


def terms_of(request: Request, body: Fields) -> TermOptions:
    """The terms of a request with this body, which may shorten the server's own time.

    Callers, and users of one caller, don't share a cache: none learns from the time to the first token what others ask.
    Raises Failure for a rank that nobody may ask for.
    """
    options = request.scope.get(OPTIONS, ServerOptions())
    if body.rank > options.max_priority:
        why = f"priority is {body.rank}: at most {options.max_priority} may be asked for here"
        raise Failure(400, why, param="priority")
    salt = json.dumps([request.scope.get(CALLER, ""), body.salt])
    limits = [each for each in (options.request_timeout_s, body.limit_s) if each is not None]
    return {"cache_salt": salt, "priority": body.rank, "timeout_s": min(limits, default=None)}
