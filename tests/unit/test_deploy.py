"""The files of deploy/ are read, as far as that goes without Docker: what they name is there, and nobody is root."""

from __future__ import annotations

import json
import re
import shlex
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from bitnet_inference.cli import app
from bitnet_inference.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: word and rest, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def final_stage() -> list[tuple[str, str]]:
    found = instructions()
    return found[max(index for index, (word, _) in enumerate(found) if word == "FROM") :]


def in_context(name: str) -> bool:
    """Whether .dockerignore, whose first rule leaves out all, lets a file of the root in."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert next(line for line in lines if line and not line.startswith("#")) == "*"
    return f"!{name}" in lines


def test_what_the_image_copies_is_there_and_in_its_context() -> None:
    copies = [shlex.split(rest) for word, rest in instructions() if word == "COPY"]
    for source in (each for copy in copies if not copy[0].startswith("--from") for each in copy[:-1]):
        assert (ROOT / source).exists() and in_context(source), source
    project = (ROOT / "pyproject.toml").read_text()
    for needed in re.findall(
        r'(?:readme = |license-files = \[|cmake.source-dir = |wheel.packages = \[)"([\w./]+)"', project
    ):
        assert in_context(needed.split("/")[0]), f"{needed} is needed to build, and is not in the context"


def test_the_image_runs_as_nobody_without_compilers_and_can_tell_how_it_is() -> None:
    last = final_stage()
    users = [rest for word, rest in last if word == "USER"]
    assert users and re.fullmatch(r"[1-9]\d+:[1-9]\d+", users[-1])
    assert not [rest for word, rest in last if word == "RUN" and re.search(r"apt|pip|g\+\+", rest)]
    assert ("STOPSIGNAL", "SIGTERM") in last
    check = next(rest for word, rest in last if word == "HEALTHCHECK")
    command = json.loads(check[check.index("CMD ") + 4 :])
    compile(command[-1], "HEALTHCHECK", "exec")
    assert "/ready" in command[-1]
    assert json.loads(next(rest for word, rest in last if word == "ENTRYPOINT")) == ["bitnet"]


def test_the_services_name_files_that_there_are_and_pinned_images() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"bitnet", "prometheus", "grafana"}
    for service in services.values():
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
        for secret in service.get("secrets", ()):
            assert secret in COMPOSE["secrets"]
        assert set(service.get("depends_on", ())) <= set(services)
    build = services["bitnet"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")


def test_prometheus_asks_the_server_and_grafana_asks_prometheus() -> None:
    settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["bitnet:8000"] and job.get("metrics_path", "/metrics") == "/metrics"
    assert job["authorization"]["credentials_file"] == "/run/secrets/api-key"
    assert all((DEPLOY / name).is_file() for name in settings["rule_files"])
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/bitnet.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]


def test_panels_have_numbers_and_places_of_their_own() -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/bitnet.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


@pytest.fixture
def serve() -> Any:
    return typer.main.get_group(app).commands["serve"]


def variable(option: Any) -> str:
    """What docs/serving.md promises: BITNET_ and the name."""
    name: str = max(option.opts, key=len).lstrip("-").upper().replace("-", "_")
    return f"BITNET_{name}"


def test_variables_are_options_of_the_command(serve: Any) -> None:
    known = {"BITNET_MODELS", *map(variable, serve.params)}
    used = set(COMPOSE["services"]["bitnet"]["environment"])
    for file in ("Dockerfile", "bitnet.service"):
        used |= set(re.findall(r"\bBITNET_[A-Z_]+(?==[^.])", (DEPLOY / file).read_text()))
    assert used <= known, used - known


def test_every_option_can_stand_in_the_environment(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    context = serve.make_context("serve", [])
    for option in serve.params:
        monkeypatch.setenv(variable(option), "1")
        assert option.resolve_envvar_value(context) == "1", variable(option)


def test_who_stops_the_server_waits_for_its_requests() -> None:
    unit = RawConfigParser(strict=False, delimiters="=")
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "bitnet.service")
    assert unit["Service"]["DynamicUser"] == "yes" and unit["Service"]["ProtectSystem"] == "strict"
    assert float(unit["Service"]["TimeoutStopSec"]) >= ServerOptions().drain_timeout_s + 10
    service = COMPOSE["services"]["bitnet"]
    given = service["environment"]
    needed = float(given["BITNET_DRAIN_TIMEOUT"]) + float(given["BITNET_SHUTDOWN_DELAY"])
    assert float(service["stop_grace_period"].removesuffix("s")) >= needed + 10
