"""Every attack that was thought of or found, and some damage at random, within the promised time and memory.

Processes of their own do the work: their memory is bounded, and one that ends is a finding.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is bounded as on Linux")


def _dawdle(root: Path) -> None:
    from judge import MAX_SECONDS

    start = time.process_time()
    while time.process_time() < start + MAX_SECONDS + 0.01:
        pass


def run(script: str, *arguments: str) -> str:
    """What a script here prints; it fails where it has findings."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def test_every_attack_is_refused_and_what_is_sound_opens():
    said = run("attack.py").splitlines()[-1]
    assert said.endswith(" 0 findings")
    assert int(said.split(" ")[0]) > 2000


def test_damage_at_random_is_refused_or_opens():
    assert " 0 findings" in run("campaign.py", "--executions", "100")


def test_a_broken_promise_is_seen(tmp_path):
    from judge import Broken, Watch, judge

    from bitnet_inference.errors import FormatError, ModelError

    def fails(what: str, examine: object, watch: Watch | None = None) -> None:
        with pytest.raises(Broken, match=what):
            judge(tmp_path, examine, watch)  # type: ignore[arg-type]

    def refuse(error: Exception) -> object:
        def examine(root: Path) -> None:
            raise error

        return examine

    assert judge(tmp_path, refuse(FormatError(tmp_path, "here", "is odd: correct it")))  # type: ignore[arg-type]
    assert not judge(tmp_path, lambda root: None)
    fails("ValueError at", refuse(ValueError("x")))
    fails("has no cure", refuse(FormatError(tmp_path, "here", "is odd")))
    fails("does not name the file", refuse(ModelError("something is odd: correct it")))
    fails("is too long", refuse(FormatError(tmp_path, "here", "x" * 3000 + ": correct it")))
    fails("takes more than", _dawdle)
    assert FormatError("a\nb", "\x1b[2J", "c\rd").args == (r"a\nb: \x1b[2J: c\rd",)


WRITES = """
import sys
from pathlib import Path
from judge import Broken, Watch, judge

watch, here = Watch(), Path(sys.argv[1])
for examine in (
    lambda root: (root / "x").write_text("x"),
    lambda root: open(sys.argv[2]),
    lambda root: __import__("os").system("true"),
):
    try:
        judge(here, examine, watch)
        print("not seen")
    except Broken as error:
        print(error)
"""


def test_what_is_done_besides_reading_is_seen(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "other").touch()
    command = [sys.executable, "-c", WRITES, str(tmp_path / "model"), str(tmp_path / "other")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *(path for path in sys.path if path)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    writes, opens, calls = done.stdout.splitlines()
    assert f"writes {tmp_path}" in writes
    assert f"opens {tmp_path}" in opens
    assert "os.system" in calls


def test_the_extension_refuses_what_it_cannot_take():
    assert " 0 findings" in run("border.py", "6000")
