"""Tests of devices whose packages are not here are left out."""

from __future__ import annotations

from devices import NEEDS, has

collect_ignore_glob = [pattern for pattern, packages in NEEDS.items() if not has(*packages)]
