"""The rules of the house (CONTRIBUTING.md), checked by reading the sources: nothing of the package is imported.

A rule is a function from a source to the places that break it, each with its cure. test_house.py runs them all.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

PACKAGE = "src/bitnet_inference/"

# Imports go down, never up and never sideways between rooms; within layer 0 and within a room they are free, but never
# in a circle.
LAYERS = {
    "_native": 0, "amounts": 0, "cgroup": 0, "config": 0, "errors": 0, "in_threads": 0, "json_objects": 0,
    "native": 0, "output_files": 0, "own_files": 0, "ternary": 0,
    "formats": 1, "grammar": 1, "hub": 1, "probe": 1, "text": 1,
    "model": 2,
    "backends": 3, "engine": 3,
    "llm": 4,
    "bench": 5, "completions": 5, "conversion": 5, "doctor": 5, "evaluate": 5, "installed": 5, "models": 5,
    "offline": 5, "replicas": 5, "summary": 5, "telemetry": 5, "top": 5,
    "server": 6,
    "cli": 7,
    "__init__": 8, "__main__": 8,
}  # fmt: skip
# Files at the root that are part of a room.
PARTS = {
    "stream": "llm",
    "mailbox": "llm",
    "named": "llm",
    "prompts": "llm",
    "ranked": "llm",
    "model_folder": "llm",
    "drafts": "llm",
    "embedding": "llm",
    "prompt_numbers": "llm",
    "choices": "evaluate",
    "harness": "evaluate",
    "held": "llm",
    "in_flight": "llm",
    "bench_engine": "bench",
    "bare_batch": "bench",
    "overflow": "llm",
    "doctor_checks": "doctor",
    "tools": "completions",
    "written_calls": "completions",
    "trace": "telemetry",
    "onnx_summary": "summary",
    "coreml_summary": "summary",
    "exposition": "top",
    "batch_files": "offline",
    "line_file": "offline",
    "prompt_file": "offline",
    "answer_file": "offline",
}
# Below a room, and still not its business.
BLIND = {"model": ("hub", "text"), "engine": ("formats", "hub", "text"), "backends": ("hub", "text")}
# What a room may know of another, where that is not all of it.
ONLY = {("model", "formats"): "formats.checkpoint", ("engine", "grammar"): "grammar.grammar"}
# What `bitnet --help` loads: the rest is imported by the functions that need it.
LIGHT = ("amounts", "errors", "config")
# One door a third-party library: the file, or the folder, that may import it.
DOORS = {
    "_native": "native.py",
    "coremltools": "backends/coreml_library.py",
    "fastapi": "server/",
    "orjson": "server/",
    "pydantic": "server/",
    "starlette": "server/",
    "uvicorn": "server/run.py",
    "httptools": "server/run.py",
    "httpx2": "hub/client.py",
    "huggingface_hub": "hub/client.py",
    "jinja2": "text/chat.py",
    "llguidance": "grammar/matcher.py",
    "mlx": "backends/mlx",
    "numpy": "",
    "onnxruntime": "backends/onnx",
    "opentelemetry": "server/traces.py",
    "prometheus_client": "server/metrics.py",
    "prompt_toolkit": "cli/",
    "rich": "cli/",
    "tokenizers": "text/tokenizer.py",
    "torch": "backends/cuda",
    "triton": "backends/cuda",
    "typer": "cli/",
    "zstandard": "formats/compressed.py",
}
UNSEEN = ("uvloop",)  # uvicorn takes it where it is
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 40
# "path" or "path:function" -> why it is longer. Better split it by meaning.
LONGER: dict[str, str] = {}

BANNED_CLASSES = re.compile(r"^_*Base(?![a-z])|Base$|Manager|Factory|Helper|Utils?(?![a-z])")
BANNED_WORDS = {"base", "common", "factory", "helper", "helpers", "manager", "misc", "util", "utils"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
MACHINE_PATH = re.compile(r"(?<![\w.\-/}])/(home|root|tmp|work|Users|mnt)/")
CONSTANT = re.compile(r"^_*[A-Z][A-Z0-9_]*$|^__all__$")
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
MUTATORS = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft",
            "remove", "setdefault", "sort", "update"}  # fmt: skip
RUNS_CODE = {"eval", "exec", "__import__"}
UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NATIVE_BANNED = re.compile(
    r"\b(?:exit|_Exit|quick_exit|abort|getenv)\s*\(|-march=native|-mcpu=native|-ffast-math|-Ofast"
)
WEB_BANNED = re.compile(
    r"\b(?:inner|outer)HTML\b|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|<script>|<style|"
    r"\s(?:on[a-z]+|style)=[\"']|@import|(?:src|href)=[\"'](?:https?:)?//"
)

Found = Iterator[tuple[int, str]]  # line, and what is wrong with the cure
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A file: its path from the root of the repository, and its text."""

    path: str
    text: str

    @property
    def inside(self) -> str:
        """The path within the package."""
        return self.path.removeprefix(PACKAGE)

    @property
    def room(self) -> str:
        """The room of the house that the file belongs to."""
        name = self.inside.split("/")[0].removesuffix(".py")
        return PARTS.get(name, name)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()


class Import(NamedTuple):
    """An import of `name`, spelt out from the root; lazy in a function and under TYPE_CHECKING."""

    line: int
    name: str
    is_lazy: bool


def imports(source: Source) -> Iterator[Import]:
    """All imports, import_module of a literal too; a computed name is "?"."""
    waiting: list[tuple[ast.AST, bool]] = [(source.tree, False)]
    while waiting:
        node, is_lazy = waiting.pop()
        for name in _imported(node, ("bitnet_inference", *source.inside.split("/")[:-1])):
            yield Import(node.lineno, name, is_lazy)
        is_lazy = is_lazy or isinstance(node, Function) or (isinstance(node, ast.If) and _is_typing_only(node))
        waiting += [(child, is_lazy) for child in ast.iter_child_nodes(node)]


def _imported(node: ast.AST, package: tuple[str, ...]) -> Iterable[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        start = package[: len(package) - node.level + 1] if node.level else ()
        module = [*start, *(node.module or "").split(".")] if node.module else [*start]
        return [".".join([*module, alias.name]) for alias in node.names]
    if isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
        literal = node.args[0] if node.args else None
        return [literal.value if isinstance(literal, ast.Constant) else "?"]
    return []


def _is_typing_only(node: ast.If) -> bool:
    return _last_name(node.test) == "TYPE_CHECKING"


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _own(name: str) -> str | None:
    """Which room of the package an imported name belongs to; None for other libraries."""
    first, _, rest = name.partition(".")
    if first != "bitnet_inference":
        return None
    name = rest.split(".")[0]
    room = PARTS.get(name, name)
    return room if room in LAYERS else "__init__"  # the root's public list


def layers(source: Source) -> Found:
    """Imports go down."""
    here = source.room
    if here not in LAYERS:
        yield 1, f"the room {here!r} has no layer: give it one in LAYERS and in docs/architecture.md"
        return
    for line, name, is_lazy in imports(source):
        there = _own(name)
        if there is None or there == here or (here == "cli" and is_lazy):
            continue
        goes_down = LAYERS[there] < LAYERS[here] or LAYERS[there] == LAYERS[here] == 0
        if not goes_down:
            yield line, f"{here} (layer {LAYERS[here]}) imports {there} ({LAYERS[there]}): imports go down only"
        elif there in BLIND.get(here, ()):
            yield line, f"{here} is blind to {there}: pass what it needs as an argument"
        elif (here, there) in ONLY and not f"{name}.".startswith(f"bitnet_inference.{ONLY[here, there]}."):
            yield line, f"{here} may import {ONLY[here, there]} alone of {there}"
        elif here == "cli" and there not in LIGHT:
            yield line, f"cli imports {there} when it is loaded: import it in the function that needs it"


def doors(source: Source) -> Found:
    """One third-party library has one door."""
    for line, name, _ in imports(source):
        if name == "?" and not source.path.endswith("__init__.py"):
            yield line, "the name of an import is computed: import it by its literal name"
        library = "_native" if name.startswith("bitnet_inference._native") else name.split(".")[0]
        if library in ("?", "bitnet_inference") or library in sys.stdlib_module_names:
            continue
        if library not in DOORS:
            yield line, f"{library} has no door: use what is there, or give it one in DOORS and in pyproject.toml"
        elif not source.inside.startswith(DOORS[library]):
            yield line, f"{library} is imported by {DOORS[library]} alone: add what you need there"


def lengths(source: Source) -> Found:
    """Files and functions of bearable length; a function's docstring does not count."""
    if len(source.lines) > MAX_FILE_LINES and source.inside not in LONGER:
        yield 1, f"{len(source.lines)} lines, at most {MAX_FILE_LINES}: split the file by meaning"
    for function in (node for node in source.nodes if isinstance(node, Function)):
        text = ast.get_docstring(function, clean=False)
        length = function.end_lineno - function.lineno + 1 - (len(text.splitlines()) if text else 0)
        if length > MAX_FUNCTION_LINES and f"{source.inside}:{function.name}" not in LONGER:
            yield (
                function.lineno,
                f"{function.name} has {length} lines, at most {MAX_FUNCTION_LINES}: split it by meaning",
            )


def names(source: Source) -> Found:
    """No name that says nothing."""
    if banned := BANNED_WORDS.intersection(re.split(r"[/_.]", source.inside.removesuffix(".py"))):
        yield 1, f"a file called {min(banned)!r} gathers anything: name it after what is in it"
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and BANNED_CLASSES.search(node.name):
            yield node.lineno, f"the name {node.name} says nothing: name the class after what it does"
        if isinstance(node, Function) and BANNED_WORDS.difference({"base"}).intersection(node.name.split("_")):
            yield node.lineno, f"the name {node.name} says nothing: name the function after what it does"


def unfinished(source: Source) -> Found:
    """Nothing is left for later."""
    for number, line in enumerate(source.lines, 1):
        if match := UNFINISHED.search(line):
            yield number, f"{match[0]}: finish it, or refuse it with Unsupported"


def global_state(source: Source) -> Found:
    """No module changes while the program runs."""
    names = set()
    for node in source.tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            names.add(name)
            if _is_mutable(node.value) and not CONSTANT.match(name):
                yield node.lineno, f"{name} can change: make it a CONSTANT that nobody changes, or a part of an object"
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield node.lineno, "`global`: keep the state in an object that is passed on"
        if (name := _changed(node)) in names and CONSTANT.match(name):
            yield node.lineno, f"{name} is changed: keep the state in an object that is passed on"


def _is_mutable(value: ast.AST | None) -> bool:
    literals = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    return isinstance(value, literals) or (isinstance(value, ast.Call) and _last_name(value.func) in MUTABLE_CALLS)


def _changed(node: ast.AST) -> str:
    """The name of what a statement or a call changes in place."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return _last_name(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    return ""


def environment(source: Source) -> Found:
    """The environment is read in one place."""
    reads = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in source.nodes:
        named = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else [_last_name(node)]
        if source.inside != "config.py" and reads.intersection(named):
            yield node.lineno, "the environment is read in config.py only: add a field there"


def _public(source: Source) -> Iterator[ast.ClassDef | Function]:
    """Public classes, functions and methods, in the order of the file."""
    waiting: list[ast.AST] = [source.tree]
    while waiting:
        inner = [node for node in waiting.pop(0).body if isinstance(node, (ast.ClassDef, *Function.__args__))]
        shown = [node for node in inner if not node.name.startswith("_")]
        yield from shown
        waiting += [node for node in shown if isinstance(node, ast.ClassDef)]


def docstrings(source: Source) -> Found:
    """What others may use says what it does."""
    if not ast.get_docstring(source.tree):
        yield 1, "the module has no docstring: say in a sentence what it is for"
    for node in _public(source):
        repeats = {"overload", "setter", "deleter"} & {_last_name(decorator) for decorator in node.decorator_list}
        if not ast.get_docstring(node) and not repeats:
            yield node.lineno, f"{node.name} has no docstring: say in a sentence what it does, or call it _{node.name}"


def types(source: Source) -> Found:
    """What others may use says what it takes and gives."""
    for function in (node for node in _public(source) if isinstance(node, Function)):
        every = function.args
        given = [*every.posonlyargs, *every.args, every.vararg, *every.kwonlyargs, every.kwarg]
        bare = [each.arg for each in given if each and not each.annotation and each.arg not in ("self", "cls")]
        if bare or not function.returns:
            yield function.lineno, f"{function.name}: no type for {', '.join(bare) or 'the result'}: annotate it"


def tables(source: Source) -> Found:
    """An __init__ file is a table or a list of names."""
    if not source.path.endswith("__init__.py"):
        return
    for node in source.tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_lazy_loader = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        is_typing = isinstance(node, ast.If) and _is_typing_only(node)
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign) and not (
            is_text or is_lazy_loader or is_typing
        ):
            yield node.lineno, "an __init__ file holds names only: move this to a file that is named after it"


def prints(source: Source) -> Found:
    """A library is silent."""
    if source.room == "cli":
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "pprint"):
            yield node.lineno, "print outside cli: return the text, or log it"


def running_code(source: Source) -> Found:
    """Nothing from a file or a request is ever run."""
    for line, name, _ in imports(source):
        if name.split(".")[0] in UNPICKLERS:
            yield line, f"{name.split('.')[0]} runs what it reads: read the bytes with a reader of our own"
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id in RUNS_CODE:
            yield node.lineno, f"{node.id} runs code: parse the input instead"
        is_switch = isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code")
        if is_switch and not (isinstance(node.value, ast.Constant) and node.value.value is False):
            yield node.value.lineno, f"{node.arg} runs what it reads: leave it off"


def machine_paths(source: Source) -> Found:
    """No file knows the machine on which it was written."""
    for number, line in enumerate(source.lines, 1):
        if match := MACHINE_PATH.search(line):
            yield number, f"a path of one machine ({match[0]}...): make it relative, or an argument"


def native(source: Source) -> Found:
    """The extension is a library: it never ends the process, and runs on every machine of an architecture."""
    if len(source.lines) > MAX_FILE_LINES:
        yield 1, f"{len(source.lines)} lines, at most {MAX_FILE_LINES}: split the file by meaning"
    for number, line in enumerate(source.lines, 1):
        code = re.sub(r"//.*" if source.path.endswith((".cpp", ".h", ".cu")) else r"#.*", "", line)
        if match := NATIVE_BANNED.search(code):
            yield number, f"{match[0]}: throw an exception, read settings in config.py, keep flags portable and exact"


def web(source: Source) -> Found:
    """The pages build elements, never HTML, have nothing inline, and load nothing from elsewhere."""
    if len(source.lines) > MAX_FILE_LINES:
        yield 1, f"{len(source.lines)} lines, at most {MAX_FILE_LINES}: split the file by meaning"
    for number, line in enumerate(source.lines, 1):
        if match := WEB_BANNED.search(line):
            yield (
                number,
                f"{match[0].strip()}: build elements with h() of dom.js, and put styles and scripts into files",
            )
