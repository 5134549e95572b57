"""Compile every CUDA kernel for every generation of devices, without one, and look at the machine code.

What fails: a kernel that does not compile, takes local memory (spills), takes more shared memory than a program may
have, or lacks the instructions that it was written for. Run by scripts/check-cuda, with Triton's interpreter off.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import struct
import subprocess
import sys
import tempfile
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bitnet_inference import backends
from bitnet_inference.backends.cuda_variants import Variant

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MATRIX = ("IGMMA", "IMMA", "UTCIMMA", "HGMMA", "HMMA", "UTCHMMA", "IDP")
LOCAL = ("STL", "LDL")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", re.MULTILINE)


class Code(NamedTuple):
    """What the compiler made of a variant."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    text: bytes


@cache
def wanted(part: str) -> list[tuple[str, Variant]]:
    """The variants of all files of kernels, each with a name that has this part."""
    found: list[tuple[str, Variant]] = []
    for pair in _variants():
        if part in pair[0] and pair not in found:
            found.append(pair)
    return found


def _variants() -> Iterator[tuple[str, Variant]]:
    for module in pkgutil.iter_modules(backends.__path__):
        if module.name.startswith("cuda_"):
            found = importlib.import_module(f"{backends.__name__}.{module.name}")
            for variant in found.variants() if hasattr(found, "variants") else ():
                yield f"{module.name}.{variant.kernel.__name__.strip('_')}", variant


def compiled(variant: Variant, capability: int) -> Code:
    """The machine code of a variant."""
    kernel = variant.kernel
    types = {name: variant.signature.get(name, "constexpr") for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    constants = variant.constants | ({"EARLY": capability >= 90} if "EARLY" in kernel.arg_names else {})
    source = ASTSource(
        kernel,
        {name: each.split(":")[0] for name, each in types.items()},
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name, each in types.items() if each.endswith(":16")},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile() as file:
        file.write(code.asm["cubin"])
        file.flush()
        usage = _told("cuobjdump", "--dump-resource-usage", file.name)
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    return Code(registers, stack, code.metadata.shared, _text(code.asm["cubin"]))


def _text(elf: bytes) -> bytes:
    """The instructions of an object file of 64 bits: its sections .text.NAME."""
    (start,), (size, count, names) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<3H", elf, 58)
    sections = [struct.unpack_from("<2I4Q", elf, start + size * each) for each in range(count)]
    at = sections[names][4]
    return b"".join(
        elf[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if elf.startswith(b".text.", at + name)
    )


def instructions(capability: int, texts: list[bytes]) -> list[Counter[str]]:
    """How many of each instruction each of them has; all in one run, because the disassembler takes long to start."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(texts))
        file.flush()
        lines = _told("nvdisasm", "--binary", f"SM{capability}{'a' if capability >= 90 else ''}", file.name)
    ends = list(accumulate(map(len, texts)))
    counts: list[Counter[str]] = [Counter() for _ in texts]
    for address, name in INSTRUCTION.findall(lines):
        counts[bisect(ends, int(address, 16))][name] += 1
    return counts


def _told(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def problems(variant: Variant, capability: int, code: Code, counts: Counter[str]) -> list[str]:
    """What is not as it should be."""
    found = []
    if code.stack_bytes or any(counts[each] for each in LOCAL):
        found.append(f"takes {code.stack_bytes} bytes of local memory")
    if code.shared_bytes > SHARED_BYTES[capability]:
        found.append(f"takes more than {SHARED_BYTES[capability]} bytes of shared memory")
    if variant.instructions and not any(counts[each] for each in variant.instructions):
        found.append(f"has no {' or '.join(variant.instructions)}")
    return found


def attempt(part: str, place: int, capability: int) -> Code | str:
    """The machine code of one of the wanted variants, or why there is none."""
    try:
        return compiled(wanted(part)[place][1], capability)
    except Exception as error:  # whatever the compiler raises: the next kernel is looked at all the same
        return " ".join(str(error.__cause__ or error).split())[-300:]


def row(name: str, variant: Variant, capability: int, code: Code | str, counts: Counter[str]) -> tuple[str, bool]:
    """A line of the table, and whether all is well."""
    constants = " ".join(f"{key}={value}" for key, value in variant.constants.items() if type(value) is int)
    start = f"{name:32} sm_{capability:<4}"
    if isinstance(code, str):
        return f"{start} DOES NOT COMPILE {constants}: {code}", False
    found = problems(variant, capability, code, counts)
    weights = next(iter(variant.signature.values()))
    matrix = " ".join(f"{each}:{counts[each]}" for each in MATRIX if counts[each]) or "-"
    numbers = f"{code.registers:4} {code.stack_bytes:6} {code.shared_bytes:7}  {matrix:18}"
    how = f"{weights:9} {constants} warps={variant.num_warps} stages={variant.num_stages}"
    return f"{start} {numbers} {how}{''.join(f'  <- {each}' for each in found)}", not found


def table(part: str, capabilities: list[int], jobs: int) -> Iterator[tuple[str, bool]]:
    """The line of each wanted variant for each generation of devices, and whether all is well."""
    places = [
        (place, capability)
        for capability in capabilities
        for place, (_, variant) in enumerate(wanted(part))
        if capability in (variant.capabilities or capabilities)
    ]
    with ProcessPoolExecutor(jobs) as pool:
        codes = dict(zip(places, pool.map(partial(attempt, part), *zip(*places, strict=True)), strict=True))
    for capability in capabilities:
        mine = {place: code for (place, of), code in codes.items() if of == capability}
        texts = [code.text if isinstance(code, Code) else b"" for code in mine.values()]
        for (place, code), counts in zip(mine.items(), instructions(capability, texts), strict=True):
            yield row(*wanted(part)[place], capability, code, counts)


def main() -> int:
    """Print the table; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sm", default="80,90,120", help="compute capabilities, separated by commas")
    parser.add_argument("--only", default="", help="variants whose name has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    print(f"{'kernel':32} {'for':7} regs  stack  shared  {'matrix units':18} first     constants")
    lines = bad = 0
    for line, is_well in table(arguments.only, [int(each) for each in arguments.sm.split(",")], arguments.jobs):
        print(line, flush=True)
        lines, bad = lines + 1, bad + (not is_well)
    print(f"{lines} compiled, {bad} not as they should be")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
