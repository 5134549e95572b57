"""The package as it is installed: nothing that it needs stayed behind, and its names are what it says they are."""

from __future__ import annotations

import ast
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import bitnet_inference
from bitnet_inference import errors, native

INSTALLED = Path(native.__file__).parent
WEB = INSTALLED / "server" / "web"
IS_INSTALLED = any(metadata.Distribution.discover(name="bitnet-inference"))
installed = pytest.mark.skipif(not IS_INSTALLED, reason="the package is on the path, and not installed")


def test_the_names_of_models_are_there() -> None:
    assert (INSTALLED / "hub" / "models.toml").is_file()


def test_the_default_model_is_there() -> None:
    names = {path.name for path in (INSTALLED / "default_model").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names


def test_the_pages_are_there() -> None:
    assert {"index.html", "dashboard.html", "chat.js", "look.css"} <= {each.name for each in WEB.iterdir()}


@installed
def test_the_command_and_the_version() -> None:
    commands = {entry.name: entry.value for entry in metadata.distribution("bitnet-inference").entry_points}
    assert commands == {"bitnet": "bitnet_inference.__main__:main"}
    assert bitnet_inference.__version__ == metadata.version("bitnet-inference")


def test_no_typer_is_let_in_that_hands_files_over_as_text() -> None:
    """Before 0.29 `--grammar FILE` ended with a traceback, and 0.15.0 beside today's click at every `--help`."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = (line for line in project["dependencies"] if line.startswith("typer"))
    assert tuple(map(int, wanted.removeprefix("typer>=").split("."))) >= (0, 29)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((INSTALLED / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert shown | {"__version__"} == set(bitnet_inference.__all__)


def test_every_error_is_drawn_in_the_tree() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, errors.BitNetError) and kind.__name__ in str(errors.__doc__) for kind in kinds)
