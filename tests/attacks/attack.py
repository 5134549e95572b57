"""Plants the attacks that were thought of and those that were found, and reports what was not refused as promised.

    python tests/attacks/attack.py [PART OF A NAME]        -v prints all messages

The whole runs in a process that may get MAX_BYTES more of memory; where that ends, the next goes on behind it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from by_hand import Attack, attacks, found, sound
from judge import MAX_BYTES, Broken, Watch, bounded_memory, bounded_time, judge
from readers import files_of, write

_ROOM = "/dev/shm" if os.path.isdir("/dev/shm") else None
_MAX_RESTARTS = 50


def run(items: list[tuple[str, Attack]], verbose: bool = False) -> tuple[list[str], int]:
    """The findings, a line each, and how many models opened."""
    findings: list[str] = []
    num_opened, at = 0, 0
    for _ in range(_MAX_RESTARTS):
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # panics of the tokenizers library
            with os.fdopen(write_end, "w", errors="backslashreplace") as out:
                _work(items, at, out)
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, errors="replace") as lines:
            for line in lines:
                kind, _, text = line.rstrip("\n").partition("\t")
                at = int(text) if kind == "at" else at
                num_opened += kind == "opened"
                findings += [text] if kind == "finding" else []
                if verbose and kind in ("opened", "refused"):
                    print(text)
        status = os.waitpid(child, 0)[1]
        if not status:
            return findings, num_opened
        findings.append(f"{items[at][0]}: the process ends ({status})")
        at += 1
    return findings, num_opened


def _work(items: list[tuple[str, Attack]], begin: int, out: TextIO) -> None:
    watch = Watch()
    with tempfile.TemporaryDirectory(dir=_ROOM) as room:
        for name, attack in sound():  # what is loaded when it is needed is loaded now
            _plant(Path(room) / name, attack)
            if said := judge(Path(room) / name, attack.examine):
                print("finding", f"{name}: {said}", sep="\t", file=out)
        bounded_memory()
        for at in range(begin, len(items)):
            name, attack = items[at]
            print("at", at, sep="\t", file=out, flush=True)
            root = Path(room) / str(at)
            _plant(root, attack)
            bounded_time(10)
            try:
                message = judge(root, attack.examine, watch)
                if not message and not attack.harmless:
                    print("finding", f"{name}: opens", sep="\t", file=out)
                print("refused" if message else "opened", f"{name}: {message}", sep="\t", file=out)
            except Broken as error:
                print("finding", f"{name}: {error!s:.2000}".replace("\n", " | "), sep="\t", file=out)


def _plant(root: Path, attack: Attack) -> None:
    root.mkdir()
    write(root, files_of(attack.seed))
    attack.plant(root)


def main() -> None:
    """Run it from the command line."""
    parts = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    items = [item for item in (*sound(), *found(), *attacks()) if not parts or parts[0] in item[0]]
    start = time.monotonic()
    findings, num_opened = run(items, "-v" in sys.argv)
    for finding in findings:
        print(finding)
    seconds = time.monotonic() - start
    print(
        f"{len(items)} attacks in {seconds:.0f} s and {MAX_BYTES >> 20} MB: {num_opened} open, {len(findings)} findings"
    )
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
