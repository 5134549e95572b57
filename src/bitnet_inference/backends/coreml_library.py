"""The one door to coremltools, which writes Core ML programs everywhere and runs them on macOS."""

from __future__ import annotations

import io
import logging
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from bitnet_inference.errors import Unavailable

MIN_MACOS = 15  # the first with states
_INSTALL = 'pip install "bitnet-inference[coreml]"'


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is shown of what the package logs, warns of, and draws of its progress."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def coremltools() -> Any:
    """The package. Raises Unavailable."""
    try:
        with quiet():
            import coremltools
    except ImportError as error:
        raise Unavailable("coreml", f"the package coremltools cannot be imported ({error})", _INSTALL) from None
    return coremltools


def writing_coremltools() -> Any:
    """The same, where it can write weights. Raises Unavailable."""
    found = coremltools()
    try:
        from coremltools import libmilstoragepython  # noqa: F401
    except ImportError:
        why = "this coremltools has no compiled part for this Python, and cannot write weights"
        raise Unavailable("coreml", why, "use a Python of a version that its wheels name, such as 3.11") from None
    return found


def require_macos() -> None:
    """Raises Unavailable where programs do not run, with what to do instead."""
    version = platform.mac_ver()[0]
    if not version or int(version.split(".")[0]) < MIN_MACOS:
        here = f"this is macOS {version}" if version else f"this is {platform.system() or 'another system'}"
        cure = "copy packages to such a Mac, or run here what they were converted from, such as a GGUF file"
        raise Unavailable("coreml", f"programs with a state run on macOS {MIN_MACOS} or newer, and {here}", cure)


def running_coremltools() -> Any:
    """The same as coremltools, where it can run programs. Raises Unavailable."""
    require_macos()
    found = coremltools()
    if not hasattr(found.models.model.MLState, "write_state"):
        raise Unavailable("coreml", f"coremltools {found.__version__} is too old, 9 is needed", _INSTALL)
    return found
