"""The CUDA backend on a real card, measured and checked in one command: `gpu.py [FOLDER] [--section NAMES]`.

- "kernels": each kernel alone, by the card's own copy bandwidth and int8 peak, which are measured first;
- "model": a model of the size that counts: loading, prompts, decoding, batches, memory;
- "peer": the same shape in bfloat16 in torch, with cuBLAS and CUDA graphs;
- "agreement": the logits of the default model and of tiny ones of all families on the card beside the reference's;
- "checks": the tests of the CUDA backend on the card.

FOLDER is what `synthesize.py --shape bitnet-2b-4t FOLDER` writes; it is written into a temporary folder where none is
given. Each section is a process of its own with a time limit, so that one that fails spoils no other, and all of it
takes less than ten minutes. Without a card, TRITON_INTERPRET=1 runs it on tiny problems, to try the program.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bitnet_inference.backends.cuda_check import has_driver
from bitnet_inference.config import is_interpreted
from bitnet_inference.errors import BitNetError, InvalidParams
from bitnet_inference.output_files import refuse_unwritable, write_whole

ROOT = Path(__file__).parents[1]
SECTION = Path(__file__).with_name("gpu_section.py")
MOST_S = 580  # for all sections
TO_END_S = 10  # what one that is not done in time has to tell how far it came
LIMITS: Mapping[str, int] = {"kernels": 120, "model": 240, "peer": 60, "agreement": 150, "checks": MOST_S}  # seconds


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path)
    parser.add_argument("--section", metavar="NAMES", default=",".join(LIMITS), help=f"of {', '.join(LIMITS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too, after each section")
    arguments = parser.parse_args()
    try:
        sys.exit(_run(arguments))
    except (BitNetError, OSError) as error:
        parser.exit(2, f"gpu.py: {error}\n")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        refuse_unwritable(arguments.json)
    names = [name for name in arguments.section.split(",") if name]
    for name in names:
        if name not in LIMITS:
            raise InvalidParams(f"--section has {name!r}: choose of {', '.join(LIMITS)}")
    if not has_driver() and not is_interpreted():
        raise InvalidParams("there is no NVIDIA GPU here: set TRITON_INTERPRET=1 to try the program without one")
    end, found = time.monotonic() + MOST_S, {}
    with tempfile.TemporaryDirectory() as room:
        folder = arguments.folder or Path(room, "model")
        for name in names:
            limit_s = max(0.0, min(LIMITS[name], end - time.monotonic()))
            file = Path(room, f"{name}.json")
            command = [sys.executable, str(SECTION), name, str(folder), str(file)]
            found[name] = check(Path(room), limit_s) if name == "checks" else run(command, file, limit_s)
            if arguments.json:
                write_whole(arguments.json, json.dumps(found, indent=2) + "\n")
    print()
    for name, numbers in found.items():
        print(f"{name}: {numbers['s']:.0f} s, {numbers.get('failed', 'done')}")
    return int(any("failed" in numbers for numbers in found.values()))


def check(room: Path, limit_s: float) -> dict[str, Any]:
    """Files of tests in processes beside each other, because most of their time goes into compiling kernels."""
    if find_spec("pytest") is None:
        return {"failed": 'pytest is not installed: pip install ".[cuda,test]"', "s": 0.0}
    pytest = [sys.executable, "-m", "pytest", f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    files, begin = sorted((ROOT / "tests" / "backends").glob("test_cuda*.py")), time.monotonic()
    said = [room / f"{file.stem}.txt" for file in files]
    with ThreadPoolExecutor(len(files)) as pool:
        found = list(pool.map(lambda file, said: run([*pytest, str(file)], room / "none", limit_s, said), files, said))
    for file, text in zip(files, said, strict=True):
        print(f"\n-- {file.name} --\n{text.read_text(errors='replace')}", flush=True)
    failed = [f"{file.name}: {each['failed']}" for file, each in zip(files, found, strict=True) if "failed" in each]
    return ({"failed": ", ".join(failed)} if failed else {}) | {"s": time.monotonic() - begin}


def run(command: Sequence[str], file: Path, limit_s: float, said: Path | None = None) -> dict[str, Any]:
    """The numbers of a section, how many seconds it took, and why it has failed, if it has.

    `said`: where all that it says goes, if nobody shall see it now.
    """
    begin, why = time.monotonic(), ""
    with ExitStack() as opened:
        output = opened.enter_context(said.open("wb")) if said else None
        environment = {"TRITON_INTERPRET": "0"} | os.environ
        process = opened.enter_context(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        try:
            if status := process.wait(limit_s):
                why = f"exit status {status}"
        except subprocess.TimeoutExpired:
            why = f"not done within {limit_s:.0f} s"
            stop(process)
    numbers = json.loads(file.read_text()) if file.exists() else {}
    return ({"failed": why} if why else {}) | numbers | {"s": time.monotonic() - begin}


def stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does: pytest then shows which tests have failed until now."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(TO_END_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    main()
