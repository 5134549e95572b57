"""How a model is run: frozen, and the only place that reads the environment.

BITNET_ISA      one of generic, avx2, avxvnni, avx512, avx512amx, neon: forces the instruction set of the CPU backend
BITNET_THREADS  a number: the default for `threads`
TRITON_INTERPRET  1: Triton's own; the kernels of the CUDA backend run in Python then, without a GPU, to be checked

Where models come from and are kept is told by the variables that Hugging Face's own tools read: HF_ENDPOINT, HF_TOKEN
(or the file HF_TOKEN_PATH), HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE), HF_HUB_DOWNLOAD_TIMEOUT, HF_HUB_ETAG_TIMEOUT,
HF_HUB_CACHE (or HUGGINGFACE_HUB_CACHE), HF_HOME and XDG_CACHE_HOME. The command line has variables of its own for
options of `bitnet serve`, which its help names.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

from bitnet_inference import cgroup
from bitnet_inference.cgroup import read
from bitnet_inference.errors import InvalidParams, Unavailable

DEVICES = ("auto", "cuda", "mlx", "cpu", "coreml", "onnx", "reference")
GRAPH_DEVICES = ("onnx", "coreml")  # each for files of its own
CACHE_DTYPES = ("bfloat16", "float32", "int8")  # of our own caches
TERNARY_FORMATS = ("auto", "u2", "t5")
QUANTIZATIONS = ("none", "ternary", "int8")
FALLBACKS = ("none", "cpu")
HEADS = ("exact", "unscreened", "int8", "int6")
EMBEDDINGS = ("exact", "int8")
ISAS = ("generic", "avx2", "avxvnni", "avx512", "avx512amx", "neon")
MAX_THREADS = 1024
MAX_GPUS = 64
_MAX_TOKEN_BYTES = 1 << 16
_COUNTS = {"gpu_layers": 1 << 16, "gpus": MAX_GPUS, "threads": MAX_THREADS, "max_batch_tokens": 1 << 16}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Where and how a model runs.

    `device`: "cuda" (an NVIDIA GPU; "cuda:1" is the second), "mlx" (Apple's GPUs, or MLX on a processor), "cpu" (native
    kernels), "reference" (NumPy, slow, the specification), "onnx" (ONNX Runtime, for ONNX files and for nothing else),
    "coreml" (Core ML on macOS, for its packages alike), or "auto": the best that works here and holds the model.
    `gpu_layers`: so many layers, with the head, are on the GPU and those before them on the CPU, for GPUs that are too
    small; "auto" for as many as fit; None for all or none.
    `gpus`: so many NVIDIA GPUs of this machine have a part of every layer each, from the first on, for device "cuda".
    `threads`: CPU threads, None for one a physical core that this process may use.
    `isa`: instruction set of what the CPU computes, "auto" for the best that this machine has.
    `cache_dtype`: of keys and values, "bfloat16", which "auto" means, "float32" or "int8" (a scale for each token and
    head). Unless it is "float32", the CPU rounds what these are multiplied by to bfloat16. An ONNX file has its own,
    "float32" or "float16", and a Core ML package "float16".
    `ternary_format`: of ternary weights in memory, "u2" (2 bits), "t5" (1.6 bits, more to decode) or "auto": t5 where
    the CPU decodes it in registers (AVX-512 with VBMI) and it saves a tenth, which is faster there. Results are the
    same. Groups with scales are always u2. For device "cpu" alone.
    `quantize`: what the layers' dense matrices become: "none" leaves them as they are; "ternary" rounds each to one
    scale and -1, 0, 1, as models of BitNet were trained to be; "int8" to 255 steps with a scale a row. Both round what
    they are multiplied with to int8, token by token.
    `head`: "exact"; "unscreened" is the same without the screen, which lets large heads find their best tokens from a
    fraction of their bytes and takes half their memory; "int8" and "int6" round a dense head, and change the logits.
    `embedding`: "exact", or "int8": the table of embeddings in 255 steps with a scale a row, for device "cpu" and
    "reference". A tied head keeps a table of its own, so that memory is saved only where the head is rounded or apart.
    `fallback`: "cpu" lets the CPU go on where the device fails while it computes; "none" ends its requests.
    `max_batch_tokens`: at most so many tokens are computed in one step; None for 512, on a GPU 1,024.
    """

    device: str = "auto"
    gpu_layers: int | str | None = None
    gpus: int = 1
    threads: int | None = None
    isa: str = "auto"
    cache_dtype: str = "auto"
    ternary_format: str = "auto"
    quantize: str = "none"
    head: str = "exact"
    embedding: str = "exact"
    fallback: str = "none"
    max_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_device(self.device)
        _check_gpu_layers(self.gpu_layers, self.backend)
        for name, most in _COUNTS.items():
            value = getattr(self, name)
            if (value is not None or name == "gpus") and (name, value) != ("gpu_layers", "auto"):
                object.__setattr__(self, name, checked_count(name, value, most))
        _one_of("isa", self.isa, ("auto", *ISAS))
        _one_of("cache_dtype", self.cache_dtype, ("auto", *CACHE_DTYPES, "float16"))
        _one_of("ternary_format", self.ternary_format, TERNARY_FORMATS)
        _one_of("quantize", self.quantize, QUANTIZATIONS)
        _one_of("head", self.head, HEADS)
        _one_of("embedding", self.embedding, EMBEDDINGS)
        _one_of("fallback", self.fallback, FALLBACKS)
        if self.fallback != "none" and self.device in ("cpu", "reference", *GRAPH_DEVICES):
            raise InvalidParams(
                f'fallback is "{self.fallback}", but nothing stands in for "{self.device}": leave it out'
            )
        if self.gpus > 1 and self.device != "cuda":
            raise InvalidParams(f'gpus is {self.gpus}, but device is "{self.device}": choose device="cuda", or one GPU')
        if self.gpus > 1 and self.gpu_layers is not None:
            raise InvalidParams("gpus and gpu_layers don't go together: several GPUs have all layers; leave one out")

    @property
    def batch_tokens(self) -> int:
        """`max_batch_tokens`, or what it is where nobody says."""
        return self.max_batch_tokens or (1024 if self.on_gpu else 512)

    @classmethod
    def from_env(cls, **options: Any) -> EngineConfig:
        """The given options, and what the environment says about the ones that are left at None or absent.

        Raises TypeError for what is no option, and InvalidParams.
        """
        for name in options.keys() - EngineOptions.__annotations__.keys():
            raise TypeError(
                f"the option {name} is not known here: there are {', '.join(EngineOptions.__annotations__)}"
            )
        given = {name: value for name, value in options.items() if value is not None}
        if "isa" not in given and (isa := os.environ.get("BITNET_ISA")):
            _one_of("BITNET_ISA", isa, ("auto", *ISAS))
            given["isa"] = isa
        if "threads" not in given and (threads := os.environ.get("BITNET_THREADS")):
            number = _whole_number("BITNET_THREADS", threads)
            given["threads"] = checked_count("BITNET_THREADS", number, MAX_THREADS)
        return cls(**given)

    @property
    def backend(self) -> str:
        """The device without its number."""
        return self.device.partition(":")[0]

    @property
    def on_gpu(self) -> bool:
        """Whether the device is an NVIDIA GPU."""
        return self.backend == "cuda"

    @property
    def device_index(self) -> int:
        """Which of several devices; the first is 0."""
        return int(self.device.partition(":")[2] or 0)

    def on_cpu(self) -> EngineConfig:
        """The same on the CPU, without what only other devices have."""
        return replace(self, device="cpu", gpu_layers=None, gpus=1, fallback="none")

    def resolve(self) -> EngineConfig:
        """The same with every "auto" decided for this machine; raises Unavailable for what it cannot do.

        A device that is left open is "cpu" here; what a model would run on, backends.resolved says. `ternary_format`
        depends on the model.
        """
        from bitnet_inference import native

        found = native.isas()
        isa = found[0] if self.isa == "auto" else self.isa
        if isa not in found:
            raise Unavailable(isa, f"this machine has {', '.join(found)}", "unset BITNET_ISA or choose one of these")
        placed = self.on_cpu() if self.device == "auto" else self
        if self.cache_dtype == "float16" and placed.device not in GRAPH_DEVICES:
            raise InvalidParams('cache_dtype is "float16", which only ONNX and Core ML have: choose "bfloat16"')
        cache_dtype = "bfloat16" if self.cache_dtype == "auto" else self.cache_dtype
        if self.ternary_format != "auto" and placed.device != "cpu":
            why = f'which "cpu" has, but device is "{self.device}"'
            raise InvalidParams(f'ternary_format is "{self.ternary_format}", {why}: leave it out')
        if self.embedding != "exact" and placed.device not in ("cpu", "reference"):
            why = f'which "cpu" and "reference" have, but device is "{self.device}"'
            raise InvalidParams(f'embedding is "{self.embedding}", {why}: leave it out')
        return replace(placed, isa=isa, threads=self.threads or num_cores(), cache_dtype=cache_dtype)


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig, of which None or none leaves what the environment says, or the default."""

    device: str
    gpu_layers: int | str | None
    gpus: int
    threads: int | None
    isa: str | None
    cache_dtype: str
    ternary_format: str
    quantize: str
    head: str
    embedding: str
    fallback: str
    max_batch_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """Where models come from, and where they are kept.

    `cache` is the folder in which Hugging Face's tools keep repositories. `endpoint` is the hub, or a mirror of it.
    `token` is sent there, for private and gated models. With `offline` nothing is fetched. A server that says nothing
    for `timeout_s` seconds is given up; `retry_wait_s` is waited before the second try, and twice as long before each
    further one.
    """

    cache: Path
    endpoint: str = "https://huggingface.co"
    token: str | None = field(default=None, repr=False)
    offline: bool = False
    timeout_s: float = 10.0
    retry_wait_s: float = 1.0

    def __post_init__(self) -> None:
        if not _is_address(self.endpoint):
            raise InvalidParams(f"HF_ENDPOINT is {self.endpoint!r}: give an address that begins with https://")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise InvalidParams("HF_TOKEN, or the file of HF_TOKEN_PATH, has letters that no token has: copy it again")
        if not self.timeout_s > 0:
            raise InvalidParams(f"HF_HUB_DOWNLOAD_TIMEOUT is {self.timeout_s}: give a number of seconds above 0")

    @classmethod
    def from_env(cls) -> HubConfig:
        """What the environment says, in the words of Hugging Face's own tools. Raises InvalidParams."""
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        home = Path(os.environ.get("HF_HOME") or caches / "huggingface")
        cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
        token_file = os.environ.get("HF_TOKEN_PATH") or home / "token"
        _seconds("HF_HUB_ETAG_TIMEOUT")  # over which huggingface_hub stumbles when it is imported
        return cls(
            cache=_in_home(cache),
            endpoint=(os.environ.get("HF_ENDPOINT", "").strip() or cls.endpoint).rstrip("/"),
            token=os.environ.get("HF_TOKEN", "").strip() or _token_in(token_file),
            offline=_is_true("HF_HUB_OFFLINE") or _is_true("TRANSFORMERS_OFFLINE"),
            timeout_s=_seconds("HF_HUB_DOWNLOAD_TIMEOUT"),
        )


def _seconds(name: str) -> int:
    return _whole_number(name, os.environ.get(name) or "10")


def _in_home(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        cure = "set HOME, or HF_HUB_CACHE and HF_TOKEN_PATH to whole paths"
        raise InvalidParams(f"{path}: there is no such home folder: {cure}") from None


def _token_in(path: str | Path) -> str | None:
    path = _in_home(path)
    if not os.path.isfile(path) or os.path.getsize(path) > _MAX_TOKEN_BYTES:  # nor is one where we may not look
        return None
    return read(path) or None


def _is_address(text: str) -> bool:
    try:
        return text.startswith(("https://", "http://")) and bool(urlsplit(text).hostname)
    except ValueError:  # of a bracket alone, over which huggingface_hub stumbles when it is imported
        return False


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidParams(f"{name} is {value!r}: choose one of {', '.join(allowed)}")


def _check_device(device: object) -> None:
    name, colon, index = str(device).partition(":")
    _one_of("device", name if isinstance(device, str) else device, DEVICES)
    if colon and not (name == "cuda" and index.isascii() and index.isdigit() and len(index) < 4):
        raise InvalidParams(f'device is {device!r}: give a number to GPUs alone, as in "cuda:1"')


def _check_gpu_layers(gpu_layers: object, backend: str) -> None:
    if isinstance(gpu_layers, str) and gpu_layers != "auto":
        raise InvalidParams(f'gpu_layers is {gpu_layers!r}: give a whole number, or "auto"')
    if gpu_layers is not None and backend not in ("auto", "cuda"):
        raise InvalidParams(f'gpu_layers are for NVIDIA GPUs, but device is "{backend}": leave one of them out')


def checked_count(name: str, value: object, most: float = math.inf) -> int:
    """How many of something: a whole number, NumPy's too, from 1 to `most`. Raises InvalidParams."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= most:
        limits = "of at least 1" if most == math.inf else f"from 1 to {most}"
        raise InvalidParams(f"{name} is {value!r}: give a whole number {limits}")
    return int(value)


def check_progress(progress: object) -> None:
    """Refuse what cannot be called, before there is work whose progress it would be told. Raises InvalidParams."""
    if progress is not None and not callable(progress):
        raise InvalidParams(f"progress is {progress!r:.60}: give a function of (done, total)")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False, as "no", which would count as the first. Raises InvalidParams."""
    if not isinstance(value, bool):
        raise InvalidParams(f"{name} is {value!r:.60}: give True or False")


def check_unicode(what: str, text: str) -> None:
    """Raises InvalidParams for a text that no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParams(f"{what} has half a surrogate pair at character {error.start}: leave it out") from None


def from_utf8(what: str, data: bytes) -> str:
    """A text that was read as bytes. Raises InvalidParams for what is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{what} is not UTF-8 at byte {error.start}: convert it") from None


def read_text(file: Path) -> str:
    """A text file of the user's, ends of lines as they are, without the byte order mark of Windows' editors.

    Raises InvalidParams.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InvalidParams(f"{file} cannot be read: {error.strerror}") from None
    return from_utf8(f"{file}", data).removeprefix("\ufeff")


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidParams(f"{name} is {text!r}: give a whole number") from None


def is_interpreted() -> bool:
    """Whether Triton runs kernels in Python, on the processor."""
    return _is_true("TRITON_INTERPRET")


def num_cores() -> int:
    """Physical cores that this process may use: its affinity, hyper-threads counted once, and the cgroups' limits."""
    return _within_quota(len({_siblings(cpu) for cpu in _processors()}))


def num_processors() -> int:
    """The same with each hyper-thread counted."""
    return _within_quota(len(_processors()))


def _processors() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _within_quota(count: int) -> int:
    return max(1, min(count, cgroup.num_cpus() or MAX_THREADS))


def _siblings(cpu: int) -> str:
    text = read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
    return text or str(cpu)


def available_bytes() -> int:
    """Memory that this process may still take: what the system calls available, within limits of cgroups and ulimit."""
    lines = dict(line.split(":", 1) for line in read(Path("/proc/meminfo")).splitlines() if ":" in line)
    system = int(lines.get("MemAvailable", "8388608 kB").split()[0]) * 1024
    left = cgroup.memory_left()
    if left is not None:
        system = min(system, left)
    return max(0, min(system, _address_space_left(system)))


def _address_space_left(system: int) -> int:
    """What `ulimit -v` leaves to this process; `system` without such a limit."""
    limits = (line.split() for line in read(Path("/proc/self/limits")).splitlines())
    limit = next((words[3] for words in limits if words[:3] == ["Max", "address", "space"]), "unlimited")
    if not limit.isdigit():
        return system
    return int(limit) - int(read(Path("/proc/self/statm")).split()[0]) * os.sysconf("SC_PAGE_SIZE")


def installed_version() -> str:
    """The version of this package, or "0+uninstalled" where it runs from a checkout."""
    try:
        return version("bitnet-inference")
    except PackageNotFoundError:
        return "0+uninstalled"
