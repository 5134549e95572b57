"""Everything that this package raises on purpose.

BitNetError
├── ModelError      NotFound · FormatError(path, where, why) · Unsupported(what) · VersionError(found, wanted)
│                   DownloadError
├── RequestError    InvalidParams · PromptTooLong(num_tokens, max_tokens) · Filtered
├── EngineError     OutOfMemory · QueueFull · Cancelled · Stopped
└── BackendError    Unavailable(name, why, install) · KernelError

A message is one line: what is wrong, where, and the cure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def one_line(text: str) -> str:
    """What a stranger has written, as names of files and tokens, without what a terminal does not print."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def said(error: object, most: int = 300) -> str:
    """What somebody else's exception or warning says, on one line. Of a long text both ends, for reasons stand last."""
    text = " ".join(str(error).split())
    if len(text) > most:
        text = f"{text[: most // 4]} ... {text[most // 4 - most :]}"
    return text or type(error).__name__


class BitNetError(Exception):
    """The root: catch this to catch everything that the package raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(one_line(each) if isinstance(each, str) else each for each in args))

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew in another process from its message and fields, whatever its __init__ wants.
        return _made_anew, (type(self), self.args), self.__dict__


def _made_anew(kind: type[BitNetError], args: tuple[object, ...]) -> BitNetError:
    return kind.__new__(kind, *args)


class ModelError(BitNetError):
    """A model could not be found, read or run."""


class NotFound(ModelError):
    """There is no model under the given name or path."""


class FormatError(ModelError):
    """A file breaks its format: `path` is the file, `where` the place in it, `why` what is wrong and what to do."""

    def __init__(self, path: str | Path, where: str, why: str) -> None:
        super().__init__(f"{path}: {where}: {why}" if where else f"{path}: {why}")
        self.path, self.where, self.why = Path(path), where, why


class Unsupported(ModelError):
    """The file is sound, but asks for something that this version does not do."""


class VersionError(ModelError):
    """A file was written by a newer version of its format than this package knows."""

    def __init__(self, found: int, wanted: int, path: str | Path = "") -> None:
        what = f"format version {found} found, at most {wanted} is known: upgrade bitnet-inference"
        super().__init__(f"{path}: {what}" if path else what)
        self.found, self.wanted = found, wanted


class DownloadError(ModelError):
    """A model could not be fetched: the hub refuses, cannot be reached, or sends something else than it announced."""


class RequestError(BitNetError):
    """A request cannot be served as it stands; the server answers 400."""


class InvalidParams(RequestError):
    """An option is unknown, out of range, or contradicts another."""


class PromptTooLong(RequestError):
    """The prompt does not fit into the model's context; `what` of it "has", and what to do."""

    def __init__(
        self, num_tokens: int, max_tokens: int, what: str = "the prompt has", cure: str = "shorten the prompt"
    ) -> None:
        super().__init__(f"{what} {num_tokens} tokens, at most {max_tokens} fit: {cure}")
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


class Filtered(RequestError):
    """A content filter refused the prompt."""


class EngineError(BitNetError):
    """The engine cannot go on with a request; the server answers 503."""


class OutOfMemory(EngineError):
    """There is not enough memory for the model or for its KV cache."""


class QueueFull(EngineError):
    """Too many requests are waiting; the server answers 429."""


class Cancelled(EngineError):
    """The request was cancelled by its owner."""


class Stopped(EngineError):
    """The engine was shut down, or stopped working."""


class BackendError(BitNetError):
    """A backend cannot compute."""


class Unavailable(BackendError):
    """A backend is not usable here: `why`, and the command that would `install` it."""

    def __init__(self, name: str, why: str, install: str = "") -> None:
        super().__init__(f"backend {name!r} is not available: {why}" + (f": {install}" if install else ""))
        self.name, self.why, self.install = name, why, install


class KernelError(BackendError):
    """A native kernel refused its arguments or gave a wrong result."""


NO_THREADS = (
    "the system gives this process no more threads: lower `threads`, or raise the limit of processes (ulimit -u)"
)


def is_no_thread(error: BaseException) -> bool:
    """Whether the system has refused a thread, for which Python has no error of its own."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


def is_of_library(library: str, error: BaseException) -> bool:
    """Whether a library in Rust raised it: its own error, a bare one, or a panic; and no handler of signals."""
    is_end = isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, TimeoutError))
    return type(error).__module__.partition(".")[0] in ("builtins", "pyo3_runtime", library) and not is_end
