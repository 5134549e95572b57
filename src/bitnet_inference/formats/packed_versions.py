"""What older versions of our own file say, in the words of the newest (docs/packed_format.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError, VersionError
from bitnet_inference.formats.json_files import shown

VERSION = 2
_Said = dict[str, Any]


def _from_1(said: _Said) -> _Said:
    """Version 1 compresses nothing."""
    return said | {"compressed": "{}"}


# From each older version to the next one: only what __metadata__ says has changed so far.
_MIGRATIONS: Mapping[int, Callable[[_Said], _Said]] = {1: _from_1}


def version_of(said: _Said, path: Path) -> int:
    """The version of a file, by its __metadata__; raises FormatError for none, VersionError for a newer one."""
    version = said.get("version")
    if not isinstance(version, str) or not re.fullmatch("[1-9][0-9]{0,8}", version):
        raise FormatError(path, "__metadata__.version", f"{shown(version)} is no version: convert the model again")
    if int(version) > VERSION:
        raise VersionError(int(version), VERSION, path)
    return int(version)


def migrated(said: _Said, path: Path) -> _Said:
    """What the __metadata__ of a file would be in VERSION; raises as `version_of`."""
    for version in range(version_of(said, path), VERSION):
        said = _MIGRATIONS[version](said)
    return said
