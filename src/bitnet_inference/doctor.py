"""Checks this machine: every kernel of every path against the generic one, the default model's logits against the ones
kept beside it, and what the machine can do. For `bitnet doctor`."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bitnet_inference import native
from bitnet_inference.amounts import told_bytes
from bitnet_inference.backends import load_model
from bitnet_inference.backends.table import overview
from bitnet_inference.config import ISAS, EngineConfig, available_bytes, num_cores, num_processors
from bitnet_inference.doctor_checks import CHECKS
from bitnet_inference.errors import BitNetError, ModelError, OutOfMemory, Unavailable
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch
from bitnet_inference.model_folder import find_model
from bitnet_inference.probe import Sampler, make_limits, median

GOLDEN = "golden.json"
SHORT = "not checked: memory ran out: free memory"
NUM_PROMPT, NUM_STEPS = 40, 8  # tokens computed at once, and then one by one
_AVX2 = ("avx2", "fma", "f16c")
# What the paths need, by its name in /proc/cpuinfo, and where.
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", *_AVX2)
FEATURES = {
    "avx512amx": ("amx_tile", "amx_int8", "amx_bf16", "avx512vbmi", "gfni", *_AVX512),
    "avx512": _AVX512,
    "avxvnni": ("avx_vnni", *_AVX2),
    "avx2": _AVX2,
    "neon": ("asimddp",),
}


@dataclass(frozen=True)
class Diagnosis:
    """Lines to read, in titled groups of (name, value), and everything that is wrong, a line each."""

    groups: dict[str, list[tuple[str, str]]]
    problems: list[str]


def diagnose(config: EngineConfig | None = None, folder: Path | None = None) -> Diagnosis:
    """Check this machine with the model in a folder (the default model), in seconds.

    Raises Unavailable for an instruction set that the machine lacks.
    """
    wanted = (config or EngineConfig.from_env()).isa
    config = (config or EngineConfig.from_env()).resolve()
    kernels = {isa: _kernel_results(isa) for isa in native.isas()}
    problems = differences(kernels)
    golden, wrong_logits = check_golden(folder or find_model("default"), config)
    groups = {
        "instruction sets": [(isa, _about(isa, wanted, config.isa)) for isa in sorted(ISAS, key=_order)],
        "results": [*((name, _verdict(name, kernels)) for name in CHECKS), ("golden logits", golden)],
        "machine": _machine(config),
        "backends": overview(),
    }
    return Diagnosis(groups, [*problems, *(line for line in wrong_logits if line not in problems)])


def differences(results: Mapping[str, Mapping[str, bytes | None]]) -> list[str]:
    """A line for each result that is not the generic one, and what to do. `results`: by path, by name of the check.

    And one for all that are None, for want of memory.
    """
    truth = results["generic"]
    wrong = {isa: [name for name in truth if _differs(found, truth, name)] for isa, found in results.items()}
    safe = next(isa for isa, names in wrong.items() if not names)  # the generic one at the latest
    lines = [
        f"{isa}: {name} differs from generic: do not trust this machine or build; set BITNET_ISA={safe}"
        for isa, names in wrong.items()
        for name in names
    ]
    return [*lines, SHORT] if any(None in found.values() for found in results.values()) else lines


def logits_differences(expected: str, found: Mapping[str, str]) -> list[str]:
    """A line for each path whose logits of the default model are not the ones kept. Both are SHA-256 sums."""
    wrong = [isa for isa, digest in found.items() if digest != expected]
    if len(wrong) == len(found) or "generic" in wrong:
        return [
            f"{isa}: the logits of the default model are not the ones kept in {GOLDEN}: do not trust this machine or "
            "build; install the package again, and report it if this stays"
            for isa in wrong
        ]
    safe = next(isa for isa in found if isa not in wrong)
    return [
        f"{isa}: the logits of the default model differ from the generic ones: do not trust this machine or build; "
        f"set BITNET_ISA={safe}"
        for isa in wrong
    ]


def write_golden(folder: Path) -> None:
    """Keep the logits of the model in a folder beside it, as a sum, computed on the generic path."""
    vocab_size = open_checkpoint(folder).config.vocab_size
    token_ids = [(17 + 7919 * i) % vocab_size for i in range(NUM_PROMPT + NUM_STEPS)]
    golden = {
        "model_sha256": _model_sum(folder),
        "token_ids": token_ids,
        "logits_sha256": logits_sum(folder, token_ids, EngineConfig(device="cpu", isa="generic", threads=1)),
    }
    (folder / GOLDEN).write_text(json.dumps(golden) + "\n")


def logits_sum(folder: Path, token_ids: list[int], config: EngineConfig) -> str:
    """SHA-256 of the float32 logits of all tokens: the first NUM_PROMPT at once, the rest one by one."""
    model = load_model(open_checkpoint(folder), config)
    try:
        num_blocks = -(-len(token_ids) // model.capabilities.block_size)
        model.reserve(num_blocks)
        ids, table = np.array(token_ids, np.int32), np.arange(num_blocks, dtype=np.int32)[None]
        digest, begin = hashlib.sha256(), 0
        while begin < len(ids):
            end = max(begin + 1, NUM_PROMPT)
            at = np.arange(begin, end, dtype=np.int32)
            starts = np.array([0, end - begin], np.int32)
            output = model.forward(Batch(ids[begin:end], at, at, starts, table))
            digest.update(output.full(range(end - begin)).tobytes())
            begin = end
        return digest.hexdigest()
    finally:
        model.close()


def check_golden(folder: Path, config: EngineConfig) -> tuple[str, list[str]]:
    """What to say about the logits of the model in a folder, and what is wrong with them."""
    try:
        golden = json.loads((folder / GOLDEN).read_text())
        expected, token_ids, model_sum = (golden[key] for key in ("logits_sha256", "token_ids", "model_sha256"))
        is_known = model_sum == _model_sum(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        damaged = getattr(error, "filename", None) or folder / GOLDEN
        return "not checked", [f"{damaged} is missing or damaged: install the package again"]
    if not is_known:
        return "not checked", [f"{folder}: the weights are not those of {GOLDEN}: install the package again"]
    found: dict[str, str] = {}
    problems: list[str] = []
    unknown: list[str] = []
    for isa in native.isas():
        try:
            found[isa] = logits_sum(folder, token_ids, EngineConfig(device="cpu", isa=isa, threads=config.threads))
        except ModelError as error:  # of its files, not of this machine
            return "not checked", [f"the default model cannot be read: install the package again ({error})"]
        except Unavailable as error:  # the system gives no threads
            unknown = [f"not checked: {error}"]
        except (BitNetError, MemoryError, ValueError, RuntimeError) as error:
            if _is_short(error):
                unknown = [SHORT]
            else:
                problems.append(f"{isa}: the default model fails: {error}: do not trust this machine or build")
    problems += logits_differences(expected, found)
    if problems or unknown:
        return "WRONG" if problems else "not checked", problems + unknown
    return f"{len(token_ids)} tokens of the default model: the same bits on {', '.join(found)}", []


def _model_sum(folder: Path) -> str:
    with (folder / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kernel_results(isa: str) -> dict[str, bytes | None]:
    """The result of every check; an error's text where there is none, which then differs; None without memory."""
    results: dict[str, bytes | None] = {}
    for name, check in CHECKS.items():
        try:
            results[name] = check(isa)
        except (MemoryError, ValueError, RuntimeError) as error:
            results[name] = None if _is_short(error) else f"{isa}: {error}".encode()
    return results


def _is_short(error: Exception) -> bool:
    """Whether memory ran out, or no thread could start, which is no fault of the machine."""
    return isinstance(error, MemoryError | OutOfMemory) or os.strerror(errno.EAGAIN) in str(error)


def _differs(found: Mapping[str, bytes | None], truth: Mapping[str, bytes | None], name: str) -> bool:
    one, other = found.get(name, b""), truth[name]
    return one is not None and other is not None and one != other


def _verdict(name: str, results: Mapping[str, Mapping[str, bytes | None]]) -> str:
    wrong = [isa for isa, found in results.items() if _differs(found, results["generic"], name)]
    if wrong:
        return f"WRONG on {', '.join(wrong)}"
    is_known = all(found[name] is not None for found in results.values())
    return f"the same bits on {', '.join(results)}" if is_known else "not checked"


def _about(isa: str, wanted: str, chosen: str) -> str:
    found = native.isas()
    if isa == chosen:
        return "chosen, " + ("the best that this machine has" if wanted == "auto" else "asked for by BITNET_ISA")
    if isa in found:
        return "works" + ("" if found.index(isa) < found.index(chosen) else ", slower")
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    if is_arm != (isa == "neon"):
        return "not here: " + ("for ARM" if isa == "neon" else "for x86-64")
    features = _cpu_features()  # none where the system does not list them, and an emulator lists another CPU's
    lacking = [feature for feature in FEATURES[isa] if feature not in features] if features else []
    return "not here: this " + (f"CPU lacks {', '.join(lacking)}" if lacking else "CPU, system or build lacks it")


def _order(isa: str) -> tuple[bool, int]:
    found = native.isas()
    return isa not in found, found.index(isa) if isa in found else 0


def _cpu_features() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(line[1].split()) if line else set()


def _machine(config: EngineConfig) -> list[tuple[str, str]]:
    threads = config.threads or 1
    lines = [
        ("cores", f"{num_cores()} that this process may use, {threads} threads"),
        ("memory", f"{told_bytes(available_bytes())} free for this process"),
    ]
    try:
        return lines + _speeds(config.isa, threads)
    except (MemoryError, RuntimeError) as error:
        if not _is_short(error):
            raise
        return [*lines, ("speeds", SHORT)]


def _speeds(isa: str, threads: int) -> list[tuple[str, str]]:
    counts = [count for count in sorted({1, threads}) if count <= num_processors()]
    samplers = [Sampler(make_limits(count), isa, num_samples=3, min_s=0) for count in counts]
    for sampler in samplers:
        sampler.measure(lambda: None)
    speeds = [median(sampler.all, lambda sample: sample.bandwidth) / 1e9 for sampler in samplers]
    peaks = [median(sampler.all, lambda sample: sample.int8_peak) / 1e9 for sampler in samplers]
    lines = [
        (f"{count} threads", f"{gb:.1f} GB/s read, {gmac:.0f} billion int8 multiply-adds/s ({isa})")
        for count, gb, gmac in zip(counts, speeds, peaks, strict=True)
    ]
    if threads not in counts:  # they wait for each other, in a probe as in a step
        most = f"the {num_processors()} processors that this process may use"
        lines.append((f"{threads} threads", f"not probed: more than {most}"))
    elif threads > 1:
        lines.append(("scaling", _scaling(threads, peaks[-1] / peaks[0])))
    if any(sample.is_disturbed for sampler in samplers for sample in sampler.all):
        lines.append(("disturbed", "other processes ran: the speeds are too low"))
    return lines


def _scaling(threads: int, gain: float) -> str:
    text = f"{threads} threads compute {gain:.2f} times as much as one"
    return text if gain > 0.75 * threads else f"{text}: other processes run, or these are not {threads} whole cores"
