"""What /openapi.json tells is true: requests made from it, right and wrong ones, are answered as it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import positive_data_acceptance

from bitnet_inference.models import Models
from bitnet_inference.server import ServedModels, make_app

MAX_CONTEXT = 64  # so that no answer is long
LONG = ("n", "best_of", "overflow", "background")  # what makes much work of a request
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{identity}/input_items"),
    ("POST", "/v1/responses/{identity}/cancel"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models/{name}"),
]


@pytest.fixture(scope="module")
def document() -> Iterator[Any]:
    served = ServedModels(Models(max_cache_tokens=MAX_CONTEXT, threads=1), {"": "default"})
    yield schemathesis.openapi.from_asgi("/openapi.json", make_app(served))
    served.close()


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_request_is_answered_as_documented(document: Any, method: str, path: str, mode: GenerationMode) -> None:
    if "{" in path and mode is GenerationMode.NEGATIVE:
        return  # every text may stand there
    strategy = document[path][method].as_strategy(generation_mode=mode)

    @settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def ask(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):  # else it may be what is wrong
            for name in LONG:
                case.body.pop(name, None)
        case.call_and_validate(excluded_checks=[positive_data_acceptance])  # a schema cannot tell all that is wrong

    ask()
