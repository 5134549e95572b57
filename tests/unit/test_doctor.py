"""The doctor finds what is wrong. Its own checks run every path, so this runs under every BITNET_ISA."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bitnet_inference import cli, doctor, doctor_checks, native
from bitnet_inference.config import EngineConfig
from bitnet_inference.doctor import (
    GOLDEN,
    check_golden,
    diagnose,
    differences,
    logits_differences,
    logits_sum,
    write_golden,
)
from bitnet_inference.errors import BitNetError, Unavailable
from bitnet_inference.model_folder import find_model

MODEL = Path(__file__).parents[1] / "golden" / "bitnet-packed"


@pytest.fixture
def folder(tmp_path):
    """A small model with its golden logits beside it."""
    target = tmp_path / "model"
    shutil.copytree(MODEL, target)
    write_golden(target)
    return target


@pytest.mark.parametrize("name", doctor_checks.CHECKS)
def test_every_check_compares_numbers(name):
    result = doctor_checks.CHECKS[name]("generic")
    numbers = np.frombuffer(result, np.float32)
    assert len(numbers) > 10 and len(np.unique(numbers)) > len(numbers) / 4
    assert doctor_checks.CHECKS[name](native.isas()[0]) == result


def test_a_sound_machine(folder):
    found = diagnose(EngineConfig(threads=2), folder)
    assert found.problems == []
    sets = dict(found.groups["instruction sets"])
    assert sets[native.isas()[0]] == "chosen, the best that this machine has"
    assert all(sets[isa].startswith("not here: ") for isa in sets if isa not in native.isas())
    results = dict(found.groups["results"])
    assert set(results) == {*doctor_checks.CHECKS, "golden logits"}
    assert all("the same bits on" in text for text in results.values())
    assert "GB/s read" in dict(found.groups["machine"])["2 threads"]


def test_a_system_that_does_not_list_features_is_not_told_to_lack_them(monkeypatch):
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor.native, "isas", lambda: ["generic"])
    monkeypatch.setattr(doctor, "_cpu_features", set)
    assert doctor._about("avx512", "auto", "generic") == "not here: this CPU, system or build lacks it"
    monkeypatch.setattr(doctor, "_cpu_features", lambda: {*doctor.FEATURES["avx512amx"]} - {"gfni"})
    assert doctor._about("avx512amx", "auto", "generic") == "not here: this CPU lacks gfni"


def test_an_instruction_set_that_was_asked_for(folder):
    sets = dict(diagnose(EngineConfig(isa="generic", threads=1), folder).groups["instruction sets"])
    assert sets["generic"] == "chosen, asked for by BITNET_ISA"
    assert {sets[isa] for isa in native.isas()[:-1]} <= {"works"}


def test_a_result_that_differs_is_named_with_what_to_do():
    right = {"attention": b"1", "dense product": b"2"}
    assert differences({"avx2": right, "generic": right}) == []
    found = {"avx512": right | {"attention": b"3"}, "avx2": right, "generic": right}
    assert differences(found) == [
        "avx512: attention differs from generic: do not trust this machine or build; set BITNET_ISA=avx2"
    ]
    found = {"avx512": right | {"attention": b"3"}, "avx2": {"attention": b"1"}, "generic": right}
    lines = differences(found)
    assert len(lines) == 2 and all(line.endswith("set BITNET_ISA=generic") for line in lines)
    assert lines[1].startswith("avx2: dense product differs")


def test_logits_that_differ_are_named_with_what_to_do():
    assert logits_differences("a", {"avx2": "a", "generic": "a"}) == []
    (line,) = logits_differences("a", {"avx512": "b", "avx2": "a", "generic": "a"})
    assert line.startswith("avx512: the logits") and line.endswith("set BITNET_ISA=avx2")
    lines = logits_differences("a", {"avx2": "b", "generic": "b"})
    assert [line.split(":")[0] for line in lines] == ["avx2", "generic"]
    assert all("install the package again" in line for line in lines)
    (line,) = logits_differences("a", {"avx2": "b"})  # where the generic path failed
    assert "do not trust" in line


def test_other_numbers_have_other_sums(folder):
    config = EngineConfig(device="cpu", threads=1)
    tokens = json.loads((folder / GOLDEN).read_text())["token_ids"]
    assert logits_sum(folder, tokens, config) != logits_sum(folder, [*tokens[:-1], tokens[-1] ^ 1], config)


def test_golden_logits_that_are_not_reached(folder):
    golden = json.loads((folder / GOLDEN).read_text())
    (folder / GOLDEN).write_text(json.dumps(golden | {"logits_sha256": "0" * 64}))
    said, problems = check_golden(folder, EngineConfig(threads=1))
    assert said == "WRONG" and len(problems) == len(native.isas()) and "not the ones kept" in problems[0]


def test_a_model_that_has_no_golden_logits(folder):
    golden = (folder / GOLDEN).read_text()
    for text in ("{}", "[", "[]"):
        (folder / GOLDEN).write_text(text)
        said, (problem,) = check_golden(folder, EngineConfig(threads=1))
        assert said == "not checked"
        assert "missing or damaged" in problem
    (folder / GOLDEN).write_text(golden.replace('"model_sha256": "', '"model_sha256": "0'))
    _, (problem,) = check_golden(folder, EngineConfig(threads=1))
    assert "the weights are not those" in problem
    (folder / "model.safetensors").unlink()
    said, (problem,) = check_golden(folder, EngineConfig(threads=1))
    assert said == "not checked" and problem.startswith(str(folder / "model.safetensors")) and "install" in problem


def test_a_model_that_cannot_be_read_is_no_fault_of_the_machine(folder):
    for text in ("{", "{}", None):
        (folder / "config.json").write_text(text) if text else (folder / "config.json").unlink()
        said, (problem,) = check_golden(folder, EngineConfig(threads=1))
        assert said == "not checked" and "install the package again" in problem
        assert "config.json" in problem and "do not trust" not in problem


def test_a_wrong_kernel_is_a_line_and_exit_code_1(monkeypatch):
    def differs(isa):
        return isa.encode()

    def fails(isa):
        raise ValueError("it fails")

    monkeypatch.setattr("bitnet_inference.doctor.CHECKS", {"sums": differs, "products": fails})
    result = CliRunner().invoke(cli.app, ["doctor"], prog_name="bitnet")
    if len(native.isas()) > 1:
        assert result.exit_code == 1 and "WRONG on " in result.stdout
        for isa in native.isas()[:-1]:
            for name in ("sums", "products"):
                assert f"bitnet: {isa}: {name} differs from generic: do not trust" in result.stderr
        assert "set BITNET_ISA=generic" in result.stderr


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), RuntimeError(os.strerror(errno.EAGAIN))])
def test_want_of_memory_is_one_line_and_no_fault_of_the_machine(monkeypatch, folder, error):
    def fails(*_):
        raise error

    monkeypatch.setattr("bitnet_inference.doctor.CHECKS", {"sums": lambda isa: b"1", "products": fails})
    monkeypatch.setattr("bitnet_inference.doctor.load_model", fails)
    monkeypatch.setattr("bitnet_inference.doctor.make_limits", fails)
    found = diagnose(EngineConfig(threads=1), folder)
    assert found.problems == ["not checked: memory ran out: free memory"]
    results = dict(found.groups["results"])
    assert results["sums"].startswith("the same bits on")
    assert results["products"] == results["golden logits"] == "not checked"
    assert dict(found.groups["machine"])["speeds"] == found.problems[0]


def test_want_of_threads_is_no_fault_of_the_machine(monkeypatch, folder):
    def fails(*_):
        raise Unavailable("cpu", "no threads")

    monkeypatch.setattr("bitnet_inference.doctor.load_model", fails)
    told = "not checked: backend 'cpu' is not available: no threads"
    assert check_golden(folder, EngineConfig(threads=1)) == ("not checked", [told])


def test_what_is_wrong_is_told_where_memory_ran_out_too():
    found = {"avx512": {"sums": b"1"}, "avx2": {"sums": None}, "generic": {"sums": b"2"}}
    wrong, short = differences(found)
    assert wrong.startswith("avx512: sums differs") and short == "not checked: memory ran out: free memory"


def test_more_threads_than_processors_are_not_probed(monkeypatch, folder):
    monkeypatch.setattr("bitnet_inference.doctor.num_processors", lambda: 1)
    machine = dict(diagnose(EngineConfig(threads=2), folder).groups["machine"])
    assert "GB/s read" in machine["1 threads"] and "scaling" not in machine
    assert machine["2 threads"] == "not probed: more than the 1 processors that this process may use"


def test_an_instruction_set_that_is_not_here_is_refused():
    absent = next(isa for isa in ("neon", "avx2") if isa not in native.isas())
    with pytest.raises(BitNetError, match="is not available"):
        diagnose(EngineConfig(isa=absent))


def test_the_default_model_has_its_golden_logits():
    """After a change of its weights: python training/golden_logits.py src/bitnet_inference/default_model."""
    said, problems = check_golden(find_model("default"), EngineConfig(threads=1).resolve())
    assert not problems, problems[0]
    assert "the same bits on" in said and "generic" in said
