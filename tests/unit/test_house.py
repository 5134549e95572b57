"""Enforces the rules of house.py over the checkout, and shows with examples that every rule bites."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import house
import pytest
from house import Found, Source

ROOT = Path(__file__).resolve().parents[2]
Rule = Callable[[Source], Found]
IN_PACKAGE: tuple[Rule, ...] = (
    house.layers, house.doors, house.lengths, house.names, house.global_state, house.environment, house.docstrings,
    house.types, house.tables, house.prints, house.running_code,
)  # fmt: skip
EVERYWHERE = (
    "src/**/*.py",
    "src/**/web/*",
    "kernels/*",
    "training/**/*.py",
    "benchmarks/**/*.py",
    "scripts/*",
    "docs/**/*.md",
)
SCOPES: dict[Rule, tuple[str, ...]] = dict.fromkeys(IN_PACKAGE, ("src/**/*.py",)) | {
    house.native: ("kernels/**/*",),
    house.web: ("src/bitnet_inference/server/web/*",),
    house.unfinished: EVERYWHERE,
    house.machine_paths: (*EVERYWHERE, "tests/**/*.py", "*/README.md", ".ci/*", "*.md", "*.toml", ".*.yaml"),
}
TEXTS = {"", ".py", ".md", ".toml", ".yaml", ".txt", ".cpp", ".h", ".cu", ".js", ".css", ".html", ".svg"}
IGNORED = {"house.py", "test_house.py"}  # they show what is forbidden


def read(patterns: Iterable[str]) -> Iterator[Source]:
    """The text files under the patterns."""
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        if path.is_file() and path.suffix in TEXTS and path.name not in IGNORED:
            yield parsed(path)


@cache
def parsed(path: Path) -> Source:
    """The same object for every rule, so that a file is parsed once."""
    return Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("rule", SCOPES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    found = [f"{source.path}:{line}: {what}" for source in read(SCOPES[rule]) for line, what in rule(source)]
    if found:
        pytest.fail("\n".join([str(rule.__doc__), *found]), pytrace=False)


def test_every_dependency_has_a_door_and_goes_through_it() -> None:
    """pyproject.toml, DOORS and the imports name the same libraries."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in ("coreml", "cuda", "mlx", "onnx") for line in extras[name])]
    wanted = {re.split(r"[^\w-]", line)[0].replace("-", "_").lower() for line in lines}
    wanted |= {line.split("-")[0] for line in extras["otel"]}  # one name, several packages
    used = {name.split(".")[0] for source in read(("src/**/*.py",)) for _, name, _ in house.imports(source)}
    doors = set(house.DOORS) - {"_native"}
    assert wanted == doors | set(house.UNSEEN), "a dependency of pyproject.toml without a door, or the other way round"
    assert doors <= used, f"nothing imports {sorted(doors - used)}: take it out of pyproject.toml and DOORS"


def test_no_file_needs_itself() -> None:
    """Imports within a room are free, but for circles; those in functions and for types count."""
    sources = {source.path.removeprefix("src/").removesuffix(".py"): source for source in read(("src/**/*.py",))}
    graph = TopologicalSorter[str]()
    for path, source in sources.items():
        for _, name, _ in house.imports(source):
            module = name.replace(".", "/")
            graph.add(path, module if module in sources else module.rpartition("/")[0])
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail(f"{' -> '.join(error.args[1])}: let the lower one say what it needs of the upper one")


def test_reasons_to_be_longer_are_still_needed() -> None:
    paths = {source.inside for source in read(("src/**/*.py",))}
    assert {place.split(":")[0] for place in house.LONGER} <= paths


# A rule, the file (within the package, or from the root with a /), and a text that breaks the rule once.
BREAKS: list[tuple[Rule, str, str]] = [
    (house.layers, "nowhere/x.py", ""),
    (house.layers, "text/x.py", "import bitnet_inference.formats.hf"),
    (house.layers, "text/x.py", "from bitnet_inference import hub"),
    (house.layers, "text/x.py", "from ..formats import hf"),
    (house.layers, "text/x.py", "def f():\n    from bitnet_inference.model import plan"),
    (house.layers, "errors.py", "import bitnet_inference.model.plan"),
    (house.layers, "engine/x.py", "from bitnet_inference.backends import load_model"),
    (house.layers, "engine/x.py", "from bitnet_inference.text.filter import Filter"),
    (house.layers, "model/x.py", "from bitnet_inference.formats import open_checkpoint"),
    (house.layers, "bench.py", "from bitnet_inference.completions import x"),
    (house.layers, "server/app.py", "import importlib\nimportlib.import_module('bitnet_inference.cli')"),
    (house.layers, "llm.py", "from bitnet_inference import LLM"),
    (house.layers, "engine/x.py", "from bitnet_inference.stream import Stream"),
    (house.layers, "cli/x.py", "from bitnet_inference.llm import LLM"),
    (house.doors, "formats/x.py", "import torch.nn"),
    (house.doors, "engine/x.py", "from tokenizers import Tokenizer"),
    (house.doors, "text/tokenizer.py", "def f():\n    from jinja2.sandbox import x"),
    (house.doors, "backends/cpu.py", "from bitnet_inference._native import Cache"),
    (house.doors, "backends/cpu.py", "from bitnet_inference import _native"),
    (house.doors, "llm.py", "import importlib\nimportlib.import_module(name)"),
    (house.lengths, "x.py", "x = 1\n" * 401),
    (house.lengths, "x.py", "def f():\n" + "    x = 1\n" * 40),
    (house.names, "formats/utils.py", ""),
    (house.names, "engine/common/x.py", ""),
    (house.names, "x.py", "class CacheManager: ..."),
    (house.names, "x.py", "class BaseModel: ..."),
    (house.names, "x.py", "class _ModelBase: ..."),
    (house.names, "x.py", "def model_factory(): ..."),
    (house.unfinished, "x.py", "x = 1  # TODO: more"),
    (house.unfinished, "x.py", "def f(): raise NotImplementedError"),
    (house.unfinished, "/kernels/x.cpp", "// FIXME"),
    (house.global_state, "x.py", "cache = {}"),
    (house.global_state, "x.py", "seen: set[int] = set()"),
    (house.global_state, "x.py", "rows = [x for x in y]"),
    (house.global_state, "x.py", "def f():\n    global x"),
    (house.global_state, "x.py", "SEEN = {}\ndef f(x): SEEN[x] = 1"),
    (house.global_state, "x.py", "_ALL = []\ndef f(x): _ALL.append(x)"),
    (house.environment, "native.py", "import os\nos.environ['X']"),
    (house.environment, "native.py", "import os\nos.getenv('X')"),
    (house.environment, "native.py", "from os import environ"),
    (house.docstrings, "x.py", "x = 1"),
    (house.docstrings, "x.py", "'''X.'''\ndef f(): ..."),
    (house.docstrings, "x.py", "'''X.'''\nclass X: ..."),
    (house.docstrings, "x.py", "'''X.'''\nclass X(Protocol):\n    '''X.'''\n    def f(self): ..."),
    (house.types, "x.py", "def f(x: int): ..."),
    (house.types, "x.py", "async def f(x) -> int: ..."),
    (house.types, "x.py", "class X:\n    def f(self, *rest) -> None: ..."),
    (house.tables, "text/__init__.py", "def load(): ..."),
    (house.tables, "text/__init__.py", "class X: ..."),
    (house.tables, "text/__init__.py", "for x in y: ..."),
    (house.prints, "llm.py", "print('hello')"),
    (house.running_code, "x.py", "eval('1')"),
    (house.running_code, "x.py", "exec(text)"),
    (house.running_code, "x.py", "from pickle import loads"),
    (house.running_code, "x.py", "import numpy as np\nnp.load(path, allow_pickle=True)"),
    (house.machine_paths, "x.py", "PATH = '/home/me/model'"),
    (house.machine_paths, "/docs/x.md", "Look into /tmp/x."),
    (house.native, "/kernels/x.cpp", "if (bad) exit(1);"),
    (house.native, "/kernels/x.cpp", "std::abort();"),
    (house.native, "/kernels/x.h", "//\n" * 401),
    (house.native, "/kernels/CMakeLists.txt", "set(flags -O3 -march=native)"),
    (house.native, "/kernels/CMakeLists.txt", "set(flags -ffast-math)"),
    (house.web, "server/web/x.js", "element.innerHTML = text;"),
    (house.web, "server/web/x.html", '<p onclick="go()">'),
    (house.web, "server/web/x.html", '<script src="https://example.org/x.js"></script>'),
    (house.web, "server/web/x.html", "<script>go()</script>"),
]
KEEPS: list[tuple[Rule, str, str]] = [
    (
        house.layers,
        "engine/x.py",
        "from bitnet_inference.engine.y import z\nfrom bitnet_inference import errors, native",
    ),
    (house.layers, "model/x.py", "from bitnet_inference.formats.checkpoint import ModelConfig"),
    (house.layers, "model/x.py", "from bitnet_inference.formats import checkpoint"),
    (house.layers, "config.py", "def f():\n    from bitnet_inference import native"),
    (house.layers, "cli/x.py", "from bitnet_inference.errors import X\ndef f():\n    from bitnet_inference import LLM"),
    (house.layers, "llm.py", "from bitnet_inference.stream import Stream"),
    (house.layers, "__init__.py", "from bitnet_inference.cli import main"),
    (house.doors, "native.py", "from bitnet_inference._native import Cache"),
    (house.doors, "text/chat.py", "import json, jinja2, numpy as np"),
    (house.lengths, "x.py", "def f():\n    '''" + "x\n" * 99 + "'''\n" + "    x = 1\n" * 38),
    (house.names, "x.py", "class Database: ...\nclass Basement: ...\nBASE_CHARS = 1\nfield(default_factory=list)"),
    (house.unfinished, "x.py", "class X:\n    def __eq__(self, other): return NotImplemented"),
    (
        house.global_state,
        "x.py",
        "A = {}\n_B = [1]\n__all__ = ['x']\nKind = dict[str, int]\ndef f(): a = []; a.append(A[1])",
    ),
    (house.environment, "config.py", "import os\nos.environ.get('X')"),
    (house.docstrings, "x.py", "'''X.'''\ndef _f(): ...\nclass _X: ...\ndef f():\n    '''X.'''\n    def g(): ..."),
    (house.types, "x.py", "def _f(x): ...\nclass X:\n    def f(self, x: int, *y: int, **z: int) -> None: ..."),
    (house.tables, "x/__init__.py", "'''X.'''\nfrom a import b\n__all__ = ['b']\ndef __getattr__(name): ..."),
    (house.prints, "cli/x.py", "print('hello')"),
    (house.running_code, "x.py", "import re\nre.compile('x')\nnp.load(path, allow_pickle=False)\nmodel.eval()"),
    (house.machine_paths, "x.py", "'/sys/devices' '/proc/meminfo' 'the/home/of' 'https://example.org/root/x'"),
    (house.native, "/kernels/x.cpp", "throw std::runtime_error(why);  // never exit()"),
    (house.web, "server/web/x.js", "element.textContent = text; on = 1;"),
    (house.web, "server/web/x.html", '<script src="/web/VERSION/x.js"></script>'),
]


def example(path: str, text: str) -> Source:
    return Source(path[1:] if path.startswith("/") else house.PACKAGE + path, text)


@pytest.mark.parametrize(("rule", "path", "text"), BREAKS)
def test_the_rule_bites(rule: Rule, path: str, text: str) -> None:
    assert len(list(rule(example(path, text)))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), KEEPS)
def test_the_rule_leaves_alone(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(example(path, text)))


def test_every_rule_has_examples() -> None:
    assert {rule for rule, _, _ in BREAKS} == {rule for rule, _, _ in KEEPS} == set(SCOPES)
