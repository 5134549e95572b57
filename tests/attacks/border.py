"""Calls all that the compiled extension exports with arguments at random, of the types that its signatures ask for.

    python tests/attacks/border.py [NUMBER OF CALLS]

Objects that come to be are arguments of later calls, programs are run. Every call returns, or raises TypeError,
ValueError, MemoryError, IndexError, OverflowError or RuntimeError; a process that ends otherwise is a finding.
"""

from __future__ import annotations

import faulthandler
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np
from judge import bounded_memory, bounded_time

from bitnet_inference import native

_INTS = (0, 1, 2, 3, 4, 8, 15, 16, 17, 32, 48, 64, 80, 128, 256, 1024)
_ODD_INTS = (
    -1,
    -16,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 48) - 16,
    1 << 62,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 64,
)
_FLOATS = (0.0, 1.0, 0.5, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"), 1e300)
_WORDS = ("float32", "float16", "bfloat16", "int8", "u2", "t5", "quarters", "codes", "generic", "", "x", *native.isas())
_REFUSALS = (TypeError, ValueError, MemoryError, IndexError, OverflowError, RuntimeError)
_CALLS_A_PROCESS, _MAX_OBJECTS = 3000, 12
# Constructors, and methods of objects; what measures the machine is left out, for it takes its time.
_CLASSES = ("Arena", "Cache", "DenseWeight", "Executor", "Program", "QuantisedHead", "RowSampler", "SamplingRule",
            "Screen", "TernaryWeight")  # fmt: skip
_ARRAY = re.compile(r"ndarray\[(?:dtype=(\w+), )?shape=\(([*, ]*)\)[^\]]*\]")


class Caller:
    """One process' calls: `rng` decides about all of them."""

    def __init__(self, rng: random.Random, tell: Callable[[str], object]) -> None:
        """`tell` hears what is called, before it is."""
        self._rng, self._tell = rng, tell
        self._objects: dict[str, list[Any]] = {name: [] for name in _CLASSES}
        self.outcomes: Counter[str] = Counter()

    def call(self) -> None:
        """One call."""
        name = self._rng.choice((*_CLASSES, *_CLASSES, "ternarize", "sampling_noise"))
        own, target = self._objects.get(name), getattr(native, name)
        if own and self._rng.random() < 0.7:
            target = self._rng.choice(own)
            methods = [each for each in dir(target) if not each.startswith("_") and callable(getattr(target, each))]
            if not methods:
                return
            name = f"{name}.{self._rng.choice(methods)}"
            target = getattr(target, name.partition(".")[2])
            own = None
        document = target.__init__.__doc__ if isinstance(target, type) else target.__doc__
        self._try(name, target, self._rng.choice((document or "").split("\n\n")[0].splitlines()), own)

    def _try(self, name: str, target: Callable[..., Any], signature: str, keep: list[Any] | None) -> None:
        args, named = [], {}
        for part in _parts(signature[signature.index("(") + 1 : signature.rindex(")")]):
            key, _, kind = part.partition(": ")
            kind, has_default, _ = kind.partition(" = ")
            if key in ("self", "/", "*") or (has_default and self._rng.random() < 0.5):
                continue
            (named.__setitem__(key, self._value(kind)) if not key.startswith("arg") else args.append(self._value(kind)))
        self._tell(
            f"{name}({', '.join([*map(_shown, args), *(f'{key}={_shown(value)}' for key, value in named.items())])})"
        )
        try:
            result = target(*args, **named)
        except _REFUSALS as error:
            self.outcomes[type(error).__name__] += 1
            return
        self.outcomes["returned"] += 1
        if keep is not None:
            keep[len(keep) - _MAX_OBJECTS + 1 :] = [*keep[len(keep) - _MAX_OBJECTS + 1 :], result][-_MAX_OBJECTS:]

    def _value(self, kind: str) -> Any:
        kind, rng = kind.strip(), self._rng
        if rng.random() < 0.02:
            return rng.choice((None, "x", -1, [], (), 1.5, np.zeros(3), b"", object()))
        if kind.endswith("| None"):
            return None if rng.random() < 0.4 else self._value(kind[:-6])
        if kind == "int":
            return rng.choice(_INTS) if rng.random() < 0.85 else rng.choice(_ODD_INTS)
        if kind in ("float", "bool", "str"):
            return {"float": rng.choice(_FLOATS), "bool": rng.random() < 0.5, "str": rng.choice(_WORDS)}[kind]
        if kind.startswith("collections"):
            return [self._value(kind[kind.index("[") + 1 : -1]) for _ in range(rng.choice((0, 1, 2, 3, 8)))]
        if kind == "tuple[int, int, int, int, int]":  # a place: where, its row's width and its columns
            width = rng.choice((16, 16, 32, 48, 64))
            return rng.choice((0, 1, 2, 2)), 0, width, 0, width if rng.random() < 0.8 else self._value("int")
        if kind.startswith("tuple["):
            return tuple(map(self._value, _parts(kind[6:-1])))
        if match := _ARRAY.fullmatch(kind):
            return self._array(match[1], match[2].count("*"))
        wanted = kind.rpartition(".")[2]
        names = [wanted] if wanted in self._objects else ["Cache", "DenseWeight", "TernaryWeight", "QuantisedHead"]
        return rng.choice(self._objects[rng.choice(names)] or [None])

    def _array(self, dtype: str | None, rank: int) -> Any:
        rng = self._rng
        shape = tuple(rng.choice((0, 1, 2, 3, 4, 8, 16, 16, 32, 48, 64)) for _ in range(rank))
        kind = np.dtype(dtype or rng.choice(("float32", "float16", "uint16", "int8", "uint8")))
        array = (
            np.frombuffer(rng.randbytes(max(1, int(np.prod(shape))) * kind.itemsize), kind)[: int(np.prod(shape))]
            .reshape(shape)
            .copy()
        )
        way = rng.randrange(12)
        if way < 4:
            array = (
                (array.view(np.uint8) % 3).view(kind).reshape(shape)
                if kind.itemsize == 1
                else (np.arange(array.size) % 3).astype(kind).reshape(shape)
            )
        elif way == 4 and array.ndim > 1:
            array = array[:, ::2]
        elif way == 5:
            array.flags.writeable = False
        elif way == 6:
            array = array[::-1]
        return array


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} of strides {value.strides}"
    return f"({', '.join(map(_shown, value))})" if isinstance(value, tuple) else repr(value)


def _parts(text: str) -> list[str]:
    """The arguments of a signature, or of tuple[...]: split at commas outside of brackets."""
    found, depth, begin = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "[(") - (char in "])")
        if char == "," and not depth:
            found.append(text[begin:at].strip())
            begin = at + 1
    return [*found, text[begin:].strip()]


def _work(first: int, count: int, out: TextIO) -> None:
    faulthandler.enable()
    bounded_memory(1 << 30)
    bounded_time(60)
    caller = Caller(random.Random(first), lambda what: print(what, file=out, flush=True))
    for _ in range(count):
        caller.call()
    print(f"done {dict(caller.outcomes)}", file=out, flush=True)


def main() -> None:
    """Run it from the command line."""
    count, findings = int(sys.argv[1]) if len(sys.argv) > 1 else 30_000, 0
    total: Counter[str] = Counter()
    for first in range(0, count, _CALLS_A_PROCESS):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _work(first, min(_CALLS_A_PROCESS, count - first), os.fdopen(write_end, "w"))
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as lines:
            last = ["", *lines][-1]
        status = os.waitpid(child, 0)[1]
        if status:
            findings += 1
            print(f"seed {first}: the process ends ({status}) in {last.strip()}")
        else:
            total.update({key: int(value) for key, value in re.findall(r"'(\w+)': (\d+)", last)})
    print(f"{sum(total.values())} calls: {dict(total)}; {findings} findings")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
