"""What a chat template may spend. A template comes with a model, from anywhere, and Jinja's sandbox limits neither
time nor memory: so every loop, call, filter and operator asks here first, and pays for what it makes."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

MAX_BITS = 4096
CONTAINER_WEIGHT = 8
_WIDE_PERCENT = re.compile(r"\d{5,}|\*")
_WIDE_FORMAT = re.compile(r"\d{5,}|\{[^{}]*\{")
# Filters whose result may be longer than their input times a small number: the product of all sizes must be affordable.
_AMPLIFIERS = frozenset({"center", "indent", "wordwrap", "batch", "slice", "tojson", "join", "round", "format"})
_SLOW = frozenset({"urlize", "striptags", "wordwrap", "pprint", "xmlattr", "filesizeformat", "wordcount", "truncate"})
_LAZY = frozenset({
    "length", "count", "first", "last", "default", "d", "map", "select", "reject", "selectattr", "rejectattr", "items",
    "attr", "random", "reverse", "list", "metered",
})  # fmt: skip


class OverBudget(Exception):
    """A template wants more time or memory than it may have."""


class Budget:
    """Seconds and characters for one rendering; an element of a container costs as much as eight characters."""

    def __init__(self, max_seconds: float, max_chars: int) -> None:
        self._max_seconds = max_seconds
        self._deadline = time.monotonic() + max_seconds
        self._num_left = max_chars

    def tick(self) -> None:
        """Called wherever a template can come by again and again."""
        if time.monotonic() > self._deadline:
            raise OverBudget(f"it runs for more than {self._max_seconds:g} s")

    def afford(self, size: int) -> None:
        """May something of this size be made?"""
        self.tick()
        if size > self._num_left:
            raise OverBudget("it makes too much text")

    def charge(self, value: Any) -> Any:
        """Pay for a value that was made."""
        if isinstance(value, (str, bytes)):
            self._num_left -= len(value)
        elif isinstance(value, Collection):
            self._num_left -= len(value) * CONTAINER_WEIGHT
        self.afford(0)
        return value

    def measure(self, value: Any) -> int:
        """The size of a value with all that is in it, which must be affordable; shared parts count every time."""
        size, rest = 0, [value]
        while rest:
            item = rest.pop()
            if isinstance(item, (str, bytes)):
                size += len(item)
            elif isinstance(item, Collection):
                self.tick()
                size += len(item) * CONTAINER_WEIGHT
                rest.extend(item.items() if isinstance(item, Mapping) else item)
            else:
                size += 1
            if size > self._num_left:
                raise OverBudget("it makes too much text")
        return size

    def metered(self, items: Iterable[Any]) -> Iterable[Any]:
        """The same items, each of which takes time."""
        return _Metered(self, items)

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """May this binary operator run?"""
        self.tick()
        for number in (left, right):
            if isinstance(number, int) and number.bit_length() > MAX_BITS:
                raise OverBudget("it computes with huge numbers")
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_BITS:
                raise OverBudget("it computes with huge numbers")
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "%" and isinstance(left, str):
            self.check_percent(left, right)
        elif operator == "+" and not isinstance(left, (int, float)):
            self.afford(self.measure(left) + self.measure(right))

    def _check_product(self, left: Any, right: Any) -> None:
        for times, value in ((left, right), (right, left)):
            if isinstance(times, int) and not isinstance(value, (int, float)):
                self.afford(times * self.measure(value))

    def check_percent(self, template: str, values: Any) -> None:
        """May this old-style formatting run?"""
        if _WIDE_PERCENT.search(template):
            raise OverBudget("it formats with huge widths")
        self.afford((len(template) + 1) * (1 + self.measure(values)))

    def check_format(self, template: str, values: Any) -> None:
        """May this str.format run?"""
        if _WIDE_FORMAT.search(template):
            raise OverBudget("it formats with huge widths")
        self.afford((len(template) + 1) * (1 + self.measure(values)))

    def check_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """May this call run? Methods of texts, numbers and containers can make much from little."""
        self.tick()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if not isinstance(owner, (str, bytes, int, Collection)):
            return
        values = (*args, *kwargs.values())
        if name == "replace" and isinstance(owner, str):
            self.check_replace(owner, *values[:2])
        elif name in ("join", "translate"):
            self.afford((len(owner) + 1) * (1 + self.measure(values)))  # type: ignore[arg-type]
        else:
            numbers = sum(abs(value) for value in values if isinstance(value, int))
            self.afford((self.measure(owner) + 1) * (1 + numbers) if numbers else 0)
            if name in ("split", "rsplit", "splitlines", "partition", "encode"):
                self.afford(len(owner) * CONTAINER_WEIGHT)  # type: ignore[arg-type]

    def check_replace(self, text: str, old: Any = "", new: Any = "", *_: Any) -> None:
        """May this replacement run?"""
        if isinstance(old, str) and isinstance(new, str):
            self.afford(len(text) + text.count(old) * len(new))

    def check_filter(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """May this filter run?"""
        self.tick()
        if name == "replace":
            self.check_replace(str(value), *args, *kwargs.values())
        elif name == "sum" and (len(args) > 1 or kwargs.get("start")):
            raise OverBudget("it sums what are no numbers")
        elif name == "format":
            self.check_percent(str(value), (*args, *kwargs.values()))
        elif name == "list" and isinstance(value, str):
            self.afford(len(value) * CONTAINER_WEIGHT)
        elif name not in _LAZY:
            size = self.measure(value) + 1
            extras = self._amplification((*args, *kwargs.values())) if name in _AMPLIFIERS else 1
            self.afford(size * extras * (1000 if name in _SLOW else 1))

    def _amplification(self, values: tuple[Any, ...]) -> int:
        numbers = sum(abs(value) for value in values if isinstance(value, int))
        return 1 + numbers + sum(self.measure(value) for value in values if isinstance(value, Collection))


class _Metered:
    """An iterable that asks the budget before each item; it has a length where the original has one."""

    def __init__(self, budget: Budget, items: Iterable[Any]) -> None:
        self._budget, self._items = budget, items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.tick()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]
