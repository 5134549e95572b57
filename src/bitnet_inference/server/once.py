"""What of a body is worked out once, when it is asked for."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar

Value = TypeVar("Value")


class once(cached_property[Value]):
    """A cached_property without its lock: up to Python 3.11 all instances share that, and wait for each other."""

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        assert self.attrname is not None, "it is given its name where it is defined"
        if self.attrname not in instance.__dict__:
            instance.__dict__[self.attrname] = self.func(instance)
        return instance.__dict__[self.attrname]
