"""Tests of devices whose packages are not here are left out."""

from __future__ import annotations

from typing import Any

from devices import NEEDS, has

collect_ignore_glob = [pattern for pattern, packages in NEEDS.items() if not has(*packages)]

if has(*NEEDS["test_cuda*"]):
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        """Triton's interpreter changes its language, member by member, at each launch, and again at each call of a
        function in a kernel, where nothing is left to change: a third of the time of these tests."""
        languages = [each for each in function.__globals__.values() if each is language or each is language.core]
        return patch(function) if any(language.core.is_builtin(each.load) for each in languages) else None

    interpreter._patch_lang = patch_once
