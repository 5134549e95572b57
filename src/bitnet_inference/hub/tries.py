"""Asking the hub again, where a reason that may pass stood in the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from bitnet_inference.config import HubConfig
from bitnet_inference.hub.client import Interrupted

_MAX_MISSES = 5  # tries in a row that bring nothing
_MAX_WAIT_S = 60.0  # where the hub asks for more, the user decides

Answer = TypeVar("Answer")


def insist(
    ask: Callable[[], Answer],
    config: HubConfig,
    passing: type[Interrupted] = Interrupted,
    num_bytes: Callable[[], int] = lambda: 0,
    wait: Callable[[float], object] = time.sleep,
) -> Answer:
    """What `ask` returns, which is called again when it raises `passing`, as long as that brings more bytes.

    Waits longer with every try that brings none, and as long as the hub asks for. Raises the error of the fifth of
    these in a row, and one for which the hub asks to wait more than a minute.
    """
    misses = 0
    while True:
        before = num_bytes()
        try:
            return ask()
        except passing as error:
            misses = 0 if num_bytes() > before else misses + 1
            if misses == _MAX_MISSES or error.retry_after_s > _MAX_WAIT_S:
                raise
            if misses:
                wait(max(config.retry_wait_s * 2 ** (misses - 1), error.retry_after_s))
