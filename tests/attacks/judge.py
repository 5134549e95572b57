"""What a stranger's file must come to: it opens, or one of our errors says in one line which file, where, and the cure.

Anything else raises Broken: another exception, a warning, a message that does not help, a file that is opened
elsewhere or written, and more than a second of a usual processor. Memory is bounded from outside, see `bounded_memory`.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bitnet_inference.errors import BitNetError, FormatError, ModelError
from bitnet_inference.text.chat import Template


def _slowness() -> float:
    """How many times as long as a usual processor this one takes for plain Python; at least 1."""
    usual_s, taken = 0.007, []
    for _ in range(3):
        start, found = time.process_time(), dict[int, list[int]]()
        for number in range(100_000):
            found.setdefault(number & 255, []).append(number)
        taken.append(time.process_time() - start)
    return max(1.0, min(taken) / usual_s)


MAX_SECONDS, MAX_BYTES = _slowness(), 200 << 20  # a second of a usual processor
_MAX_MESSAGE = 2000
# A cure is an order: one of these stands at the beginning of a part of the message.
_ORDERS = (
    "add ask call check choose convert copy correct download export free give inline install join keep leave make put "
    "remove replace rename save set shorten upgrade use write"
).split()
_CURE = re.compile(
    rf"(?:[:,;(]|\bor|\band|\bthen) (?:{'|'.join(_ORDERS)})\b|: (?:only\b|this is no)|are (?:read|supported)$"
)
# What may be read besides the model: modules that are loaded when they are needed, and what the system says of itself.
_KNOWN = re.compile(r"^(?:/proc/|/sys/|/dev/urandom|/dev/null)|\.(?:py|pyc|so|pyi)$|/__pycache__/")
_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "os.remove", "os.rename",
              "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.truncate", "pickle.find_class",
              "shutil.rmtree", "ctypes.dlopen", "marshal.loads")  # fmt: skip


class Broken(AssertionError):
    """A promise about hostile files was not kept; `what` is the same for findings of one cause."""

    def __init__(self, what: str, details: str = "") -> None:
        super().__init__(f"{what}\n{details}".rstrip())
        self.what = what


class Watch:
    """Notes what is done to files and processes while it is on; one a process, because audit hooks stay."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen = ""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if self.folder is None or self.seen:
            return
        if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            name, flags = os.fsdecode(args[0]), args[2] if isinstance(args[2], int) else 0
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            known = _KNOWN.search(name) or os.path.isdir(name)
            if not known and (writes or not os.path.realpath(name).startswith(self.folder)):
                self.seen = f"{'writes' if writes else 'opens'} {name}"
        elif event in _FORBIDDEN and not (event == "marshal.loads" and _is_importing()):
            self.seen = f"{event} {args!r:.100}"


def _is_importing() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def judge(root: Path, examine: Callable[[Path], object], watch: Watch | None = None) -> str:
    """The message with which a model under `root` is refused; empty where it opens. Raises Broken.

    What takes too long is tried once more: on a shared machine the same work can cost twice the time.
    """
    for _ in range(2):
        start = time.process_time()
        message = _judge(root, examine, watch)
        if (seconds := time.process_time() - start) <= MAX_SECONDS:
            return message
    raise Broken(f"takes more than {MAX_SECONDS:g} s", f"{seconds:.1f} s: {message}")


def _judge(root: Path, examine: Callable[[Path], object], watch: Watch | None) -> str:
    if watch:
        watch.folder, watch.seen = os.path.realpath(root), ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            examine(root)
        message = ""
    except BitNetError as error:
        message = str(error)
        _check_message(message, str(root), isinstance(error, ModelError))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        ours = [each for each in traceback.extract_tb(error.__traceback__) if "bitnet_inference" in each.filename]
        place = f"{Path((ours or [where])[-1].filename).name}:{(ours or [where])[-1].lineno}"
        details = "".join(traceback.format_exception(error))[-3000:]
        raise Broken(f"{type(error).__name__} at {place}", details) from None
    finally:
        if watch:
            watch.folder = None
    if watch and watch.seen:
        raise Broken(f"does more than reading the model: {watch.seen}")
    return message


def _check_message(message: str, root: str, names_file: bool) -> None:
    line = message.replace(root, "", 1)
    if not message.isprintable() and message.replace(root, "").isascii():
        raise Broken("the message is not one printable line", repr(message))
    if "\n" in message or "\r" in message:
        raise Broken("the message is not one line", repr(message))
    if names_file and root not in message:
        raise Broken(f"the message does not name the file: {_shape(line)}", message)
    if len(message.replace(root, "")) > _MAX_MESSAGE and message.count(root) < 2:
        raise Broken(f"the message is too long: {_shape(line)}", message)
    if names_file and not _CURE.search(message):
        raise Broken(f"the message has no cure: {_shape(line)}", message)


def _shape(message: str) -> str:
    """A message without its names and numbers, for counting those of one kind."""
    return re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "#", message)[:70]


def shape(message: str) -> str:
    """The kind of a message: without paths, names and numbers."""
    return re.sub(r"\S*/\S*|\d+|'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)", "#", message)[:120]


def bounded_memory(more: int = MAX_BYTES) -> None:
    """From now on this process gets that much more address space and no more: else a MemoryError, or its end."""
    _deepen_stack()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _deepen_stack() -> None:
    """Have the stack grow as far as Python lets it: at a limit that would end the process, not be a MemoryError."""
    with suppress(FormatError):
        Template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "stack").render({})


def bounded_time(seconds: float) -> None:
    """The process ends by a signal when so much of its own time, or thirty times as much by the clock, is over."""
    for timer, name in ((signal.ITIMER_PROF, signal.SIGPROF), (signal.ITIMER_REAL, signal.SIGALRM)):
        signal.signal(name, signal.SIG_DFL)
        signal.setitimer(timer, seconds * (1 if timer == signal.ITIMER_PROF else 30))
