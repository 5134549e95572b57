"""Files that are mapped into memory, so that the system reads what is looked at, and may take it back."""

from __future__ import annotations

import mmap
from pathlib import Path

from bitnet_inference.errors import FormatError


def map_file(path: Path) -> mmap.mmap:
    """A file that is not empty, read-only; raises FormatError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FormatError(path, "", f"cannot be read ({error.strerror}): check its permissions") from error


def release_pages(data: mmap.mmap, begin: int, end: int) -> None:
    """Let the system take back the memory of these bytes' pages; they can be read again."""
    begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    if end > begin and hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED, begin, end - begin)
