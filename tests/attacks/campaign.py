"""Damages sound models at random, opens what comes out, and reports what was not refused as promised.

    python tests/attacks/campaign.py --executions 100000 [--only gguf ...]     what scripts/fuzz calls
    python tests/attacks/campaign.py --show gguf 4711 --out FOLDER             the files of one execution

An execution is a reader and a number, which give the same files in every run. Each reader is attacked in a process of
its own, which may get MAX_BYTES more of memory; a process that ends or hangs is a finding, and the next goes on behind.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from judge import MAX_BYTES, Broken, Watch, bounded_memory, bounded_time, judge, shape
from mutate import damaged
from readers import READERS, Files, files_of, write

SHARES = {
    "header": 1.0,
    "open_only": 0.1,
    "words": 0.02,
    "everything": 0.02,
    "run": 0.005,
}  # of the executions, by what is done
_TEMPLATE = (
    b"{% for message in messages %}{{ message['role'] + ': ' + message['content'] | trim }}{% endfor %}"
    b"{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
_ROOM = "/dev/shm" if os.path.isdir("/dev/shm") else None
_SHIFT, _MAX_ENDED = 2000, 200  # executions of a process, whose memory goes to pieces; processes that may end badly


def changes(reader: str, number: int, seed: Files) -> Files:
    """The files that execution `number` changes, with their new content."""
    rng, targets = random.Random(f"{reader}/{number}"), READERS[reader].targets
    name = rng.choice(sorted(seed) if targets == ("*",) else targets)
    return {name: damaged(name, seed.get(name, _TEMPLATE), rng)}


class Campaign:
    """The executions of one reader."""

    def __init__(self, reader: str, first: int, count: int) -> None:
        self._reader, self._first, self._end = reader, first, first + count
        self._seed = files_of(READERS[reader].seed)
        self.findings: dict[str, tuple[int, str]] = {}
        self.kinds: Counter[str] = Counter()
        self.done, self.opened, self.seconds = 0, 0, 0.0

    def run(self) -> None:
        """All of them, in processes that are started again behind what ended one."""
        start, at = time.monotonic(), self._first
        board = mmap.mmap(-1, 16)
        self._quiet = os.open(os.devnull if not os.environ.get("FUZZ_STDERR") else "/dev/stderr", os.O_WRONLY)
        num_ended = 0
        while at < self._end and num_ended < _MAX_ENDED:
            end = min(self._end, at + _SHIFT)
            status, last = self._in_a_process(at, end, board)
            if status == 0:
                at = end
            else:
                num_ended += 1
                what = (
                    f"the process ends by signal {os.WTERMSIG(status)}"
                    if os.WIFSIGNALED(status)
                    else "the process exits"
                )
                self.findings.setdefault(what, (last, ""))
                at = last + 1
        self.done, self.seconds = at - self._first, time.monotonic() - start

    def _in_a_process(self, at: int, end: int, board: mmap.mmap) -> tuple[int, int]:
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            os.dup2(self._quiet, 2)  # a panic of the tokenizers library prints a page, though it is caught
            try:
                with os.fdopen(write_end, "w", encoding="utf-8", errors="replace") as out:
                    self._work(range(at, end), board, out)
            except BaseException:
                traceback.print_exc()
                os._exit(9)
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._note(*line.rstrip("\n").split("\t", 2))
        status = os.waitpid(child, 0)[1]
        return status, struct.unpack_from("<q", board, 0)[0]

    def _note(self, kind: str, number: str, text: str) -> None:
        if kind == "finding":
            what, _, details = text.partition("\t")
            self.findings.setdefault(what, (int(number), details.replace("\x1f", "\n")))
        elif kind == "opened":
            self.opened += int(number)
        else:
            self.kinds[text] += int(number)

    def _work(self, numbers: range, board: mmap.mmap, out) -> None:
        watch, kinds = Watch(), Counter()
        with tempfile.TemporaryDirectory(dir=_ROOM) as room:
            root = Path(room) / "model"
            root.mkdir()
            write(root, self._seed)
            examine = READERS[self._reader].examine
            judge(root, examine)  # what is loaded when it is needed is loaded now
            bounded_memory()
            told: set[str] = set()
            files: Files = {}
            gc.disable()  # what was opened is thrown away by hundreds, and what was there before is not looked through
            gc.freeze()
            for number in numbers:
                struct.pack_into("<q", board, 0, number)
                before, files = files, changes(self._reader, number, self._seed)
                self._restore(root, before.keys() - files.keys())
                write(root, files)
                bounded_time(10)
                try:
                    kinds[shape(judge(root, examine, watch))] += 1
                except Broken as error:
                    if error.what not in told:
                        told.add(error.what)
                        details = str(error).replace("\n", "\x1f").replace("\t", " ")
                        print("finding", number, f"{error.what}\t{details}", sep="\t", file=out, flush=True)
                if number % 100 == 99 or number == numbers[-1]:
                    _tell(kinds, out)
                    gc.collect()

    def _restore(self, root: Path, names: Iterable[str]) -> None:
        for name in names:
            if name in self._seed:
                (root / name).write_bytes(self._seed[name])
            else:
                (root / name).unlink()


def _tell(kinds: Counter[str], out) -> None:
    for kind, count in kinds.items():
        print("kind" if kind else "opened", count, kind, sep="\t", file=out)
    out.flush()
    kinds.clear()


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=100_000, help="of each reader that only opens")
    parser.add_argument("--only", nargs="*", default=list(READERS), choices=list(READERS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--show", nargs=2, metavar=("READER", "NUMBER"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.show:
        reader, number = options.show[0], int(options.show[1])
        seed = files_of(READERS[reader].seed)
        shutil.rmtree(options.out, ignore_errors=True)
        options.out.mkdir(parents=True)
        write(options.out, seed | changes(reader, number, seed))
        return
    total, failed = 0, 0
    print(f"{'reader':<22}{'executions':>11}{'opened':>9}{'errors':>8}{'findings':>9}{'a second':>10}")
    for reader in options.only:
        share = 0.1 if reader.endswith(".jinja") else SHARES[READERS[reader].examine.__name__]
        count = max(1, int(options.executions * share))
        campaign = Campaign(reader, options.first, count)
        campaign.run()
        total, failed = total + campaign.done, failed + len(campaign.findings)
        rate = campaign.done / campaign.seconds
        numbers = (
            f"{campaign.done:>11}{campaign.opened:>9}{len(campaign.kinds):>8}{len(campaign.findings):>9}{rate:>10.0f}"
        )
        print(f"{reader:<22}{numbers}", flush=True)
        for what, (number, details) in sorted(campaign.findings.items()):
            print(f"  {reader} {number}: {what}\n    " + details.replace("\n", "\n    "), flush=True)
    print(f"{total} executions, {failed} findings; each process had {MAX_BYTES >> 20} MB")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
