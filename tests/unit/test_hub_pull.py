"""Pulling from a hub on loopback: whole, cut, wrong, hostile, refused; and what was pulled runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from fake_hub import COMMIT, FakeHub, serving
from gguf_samples import write_default
from typer.testing import CliRunner

from bitnet_inference import cli
from bitnet_inference.config import HubConfig
from bitnet_inference.errors import DownloadError, InvalidParams, NotFound, Unsupported
from bitnet_inference.hub.client import Busy, Hub
from bitnet_inference.hub.local import locate, remove
from bitnet_inference.hub.names import parse
from bitnet_inference.hub.pull import pull
from bitnet_inference.hub.tries import insist
from bitnet_inference.installed import installed_models
from bitnet_inference.llm import LLM

FOLDER = Path(__file__).parents[2] / "src" / "bitnet_inference" / "default_model"
MODEL = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.name != "golden.json"}
SMALL = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 400}
WEIGHTS = SMALL["model.safetensors"]
PATIENCE_S = 600  # the machine may be busy with something else


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving(SMALL) as server:
        yield server


@pytest.fixture
def config(hub: FakeHub, tmp_path: Path) -> HubConfig:
    return HubConfig(cache=tmp_path / "cache", endpoint=hub.url, retry_wait_s=0, timeout_s=PATIENCE_S)


def everything(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def cut_at(stop: int, times: int = 1):
    """Breaks the weights off, so many times."""
    left = [times]

    def answer(handler, path: str) -> bool:
        if not path.endswith("model.safetensors") or not left[0]:
            return False
        left[0] -= 1
        handler.send_file(WEIGHTS, stop)
        return True

    return answer


def test_a_pulled_model_runs(tmp_path, hub, config):
    hub.files = {**MODEL, "modeling_evil.py": b"import os", "pytorch_model.bin": b"pickle", "logo.png": b"x"}
    counts: list[tuple[int, int]] = []
    pulled = pull("me/tiny", config=config, progress=lambda done, total: counts.append((done, total)))
    assert pulled.path == config.cache / "models--me--tiny" / "snapshots" / COMMIT
    assert (pulled.repository, pulled.commit, pulled.num_bytes) == ("me/tiny", COMMIT, sum(map(len, MODEL.values())))
    assert everything(pulled.path) == set(MODEL), "no code, no pickles, nothing else"
    assert counts[-1] == (pulled.num_bytes, pulled.num_bytes) and counts == sorted(counts)
    assert (pulled.path.parents[1] / "refs" / "main").read_text() == COMMIT  # other tools find it
    assert locate("me/tiny", config=config) == locate(f"me/tiny@{COMMIT[:8]}", config=config) == pulled.path
    with LLM.load(pulled.path) as llm:
        assert llm.generate("The fox").text
    before = len(hub.requests)
    assert pull("me/tiny", config=config) == pulled
    assert len(hub.requests) == before + 1, "what is there is not fetched again"


def test_the_command_and_a_load_by_name(hub, config, monkeypatch):
    hub.files = MODEL
    variables = {"HF_HUB_CACHE": str(config.cache), "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret"}
    variables["HF_HUB_DOWNLOAD_TIMEOUT"] = str(PATIENCE_S)
    command = [sys.executable, "-m", "bitnet_inference", "pull", "me/tiny"]
    result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert result.returncode == 0 and COMMIT in result.stdout and COMMIT in result.stderr, result.stderr
    assert {token for _, _, token in hub.requests} == {"Bearer hf_secret"}
    assert "secret" not in result.stdout + result.stderr
    offline = variables | {"HF_HUB_OFFLINE": "1"}
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    with LLM.load("me/tiny", drafts="me/tiny") as llm:
        assert llm.generate("The fox").text
    result = CliRunner().invoke(cli.app, ["pull", "me/tiny"], prog_name="bitnet")
    assert result.exit_code == 2 and result.stderr.startswith("bitnet: HF_HUB_OFFLINE is set")
    assert result.stderr.count("\n") == 1


def test_other_tools_find_it(hub, config):
    pulled = pull("me/tiny", config=config)
    options = {"local_files_only": True, "cache_dir": config.cache}
    assert huggingface_hub.snapshot_download("me/tiny", **options) == str(pulled.path)
    (repository,) = huggingface_hub.scan_cache_dir(config.cache).repos
    assert (repository.repo_id, repository.size_on_disk) == ("me/tiny", pulled.num_bytes)


def test_a_cut_goes_on_within_a_pull(hub, config):
    hub.answer = cut_at(70000)
    path = pull("me/tiny", config=config).path
    assert hub.fetched("model.safetensors") == [None, "bytes=70000-"]
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_cut_goes_on_with_the_next_pull(hub, config):
    starts = iter([100, 100, 100, 100, 100, 100])
    hub.answer = lambda handler, path: path.endswith("ors") and bool(handler.send_file(WEIGHTS, next(starts)) or True)
    with pytest.raises(DownloadError, match=r"me/tiny: model.safetensors: .* broke off .*: check your connection"):
        pull("me/tiny", config=config)
    with pytest.raises(NotFound, match="has not been pulled: bitnet pull me/tiny"):
        locate("me/tiny", config=config)
    hub.answer, hub.requests = lambda handler, path: False, []
    path = pull("me/tiny", config=config).path
    assert hub.fetched("model.safetensors") == ["bytes=100-"]
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_what_was_damaged_since_is_fetched_again(hub, config):
    path = pull("me/tiny", config=config).path
    (path / "model.safetensors").resolve().write_bytes(bytes(len(WEIGHTS)))
    counts: list[int] = []
    pull("me/tiny", config=config, progress=lambda done, total: counts.append(done))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS and hub.fetched("model.safetensors") == [None, None]
    assert hub.fetched("config.json") == [None] and counts[-1] == sum(map(len, SMALL.values()))


def test_a_hub_without_ranges(hub, config):
    cut = cut_at(500)

    def answer(handler, path: str) -> bool:
        if handler.headers["Range"]:
            return handler.send(200, WEIGHTS)
        return cut(handler, path)

    hub.answer = answer
    assert (pull("me/tiny", config=config).path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched("model.safetensors") == [None, "bytes=500-"]


def test_a_wrong_hash_is_refused_and_thrown_away(hub, config):
    hub.answer = lambda handler, path: path.endswith("ors") and handler.send(200, WEIGHTS[:-1] + b"!")
    with pytest.raises(DownloadError, match=r"me/tiny: model.safetensors: .*hash differs.* thrown away: pull again"):
        pull("me/tiny", config=config)
    assert not any("snapshots" in name or "incomplete" in name for name in everything(config.cache))
    hub.answer = lambda handler, path: path.endswith("config.json") and handler.send(200, b"[]")
    with pytest.raises(DownloadError, match=r"config.json: .*hash differs"):
        pull("me/tiny", config=config)


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (WEIGHTS * 50, {"Content-Encoding": "identity"}, f"sends more than the {len(WEIGHTS)} bytes that it announced"),
        (WEIGHTS * 50, {}, f"a file of {50 * len(WEIGHTS)} bytes is sent, not of the {len(WEIGHTS)}"),
        (b"<html>Log in", {}, f"a file of 12 bytes is sent, not of the {len(WEIGHTS)} .*check HF_ENDPOINT"),
        (WEIGHTS, {"Content-Length": "9" * 18}, "a file of 9{18} bytes is sent"),
    ],
)
def test_nothing_is_kept_of_another_size_than_announced(hub, config, body, headers, message):
    hub.answer = lambda handler, path: path.endswith("ors") and handler.send(200, body, headers)
    with pytest.raises(DownloadError, match=message):
        pull("me/tiny", config=config)
    assert hub.fetched("model.safetensors") == [None]
    assert sum(path.stat().st_size for path in config.cache.rglob("*") if path.is_file()) < 1000


def test_the_rest_of_another_file(hub, config):
    cut = cut_at(500)

    def answer(handler, path: str) -> bool:
        if handler.headers["Range"]:
            return handler.send(206, WEIGHTS, {"Content-Range": f"bytes 500-{len(WEIGHTS) + 499}/{len(WEIGHTS) + 500}"})
        return cut(handler, path)

    hub.answer = answer
    with pytest.raises(DownloadError, match=f"a file of {len(WEIGHTS) + 500} bytes is sent"):
        pull("me/tiny", config=config)


def test_a_redirect_whose_body_has_no_end(hub, config):
    written = []

    def answer(handler, path: str) -> bool:
        if "/resolve/" not in path:
            return False
        handler.send(302, b"", {"Location": f"{hub.url}/nowhere", "Content-Length": str(1 << 40)})
        with contextlib.suppress(OSError):  # until the client hangs up
            while len(written) < 1000:
                written.append(handler.wfile.write(bytes(1 << 20)))
        handler.close_connection = True
        return True

    hub.answer = answer
    with pytest.raises(NotFound, match="does not have this repository"):
        pull("me/tiny", config=config)
    assert len(written) < 100, "nobody reads it"


def test_redirects_that_do_not_end(hub, config):
    hub.answer = lambda handler, path: handler.send(302, b"", {"Location": f"{hub.url}{path}"})
    with pytest.raises(DownloadError, match=r"cannot be asked for .TooManyRedirects"):
        pull("me/tiny", config=config)
    assert len(hub.requests) == 11


def test_a_redirect_to_a_host_that_cannot_be(hub, config):
    hub.answer = lambda handler, path: handler.send(302, b"", {"Location": f"http://{'a' * 64}/"})
    with pytest.raises(DownloadError, match="cannot be asked for"):
        pull("me/tiny", config=config)


def test_a_redirect_away_from_https(config, monkeypatch):
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.scheme)
        return httpx2.Response(302, headers={"Location": "http://hub/elsewhere"})

    session = httpx2.Client(transport=httpx2.MockTransport(answer))
    monkeypatch.setattr("bitnet_inference.hub.client.get_session", lambda: session)
    with pytest.raises(DownloadError, match="sends us to an address without https"):
        pull("me/tiny", config=dataclasses.replace(config, endpoint="https://hub"))
    assert asked == ["https"]


def test_who_refuses(hub, config):
    with serving(SMALL) as elsewhere:
        hub.answer = lambda handler, path: (
            "/resolve/" in path and handler.send(302, b"", {"Location": f"{elsewhere.url}{path}"})
        )
        elsewhere.answer = lambda handler, path: handler.send(403, b"")
        with pytest.raises(DownloadError, match=rf"{elsewhere.url}, where the hub sends us, answers 403: try again"):
            pull("me/tiny", config=config)
        elsewhere.answer = lambda handler, path: not setattr(handler, "close_connection", True)
        with pytest.raises(DownloadError, match=rf"{elsewhere.url} broke off"):
            pull("me/tiny", config=config)


def test_an_endpoint_in_another_spelling(hub, config):
    odd = dataclasses.replace(config, endpoint=hub.url.replace("http://127.0.0.1", "http://me:word@LOCALHOST"))
    assert pull("me/tiny", config=odd).commit == COMMIT
    hub.answer = lambda handler, path: handler.send(200, b"?")
    with pytest.raises(DownloadError, match="does not answer as the hub does") as caught:
        pull("me/tiny", config=odd)
    assert "word" not in str(caught.value)


def test_a_full_disk(hub, config):
    code = (
        "import resource; from pathlib import Path; from bitnet_inference.config import HubConfig;"
        "from bitnet_inference.hub.pull import pull; resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000));"
        f"pull('me/tiny', config=HubConfig(cache=Path({str(config.cache)!r}), endpoint={hub.url!r}, timeout_s=600))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = result.stderr.splitlines()[-1]
    assert "DownloadError: me/tiny: model.safetensors: cannot be written" in last and "free space" in last
    hub.requests = []
    assert (pull("me/tiny", config=config).path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched("model.safetensors") == ["bytes=50000-"]


def test_room_is_checked_before_anything_is_fetched(hub, config):
    def huge(listing):
        listing["siblings"][1]["lfs"]["size"] = 1 << 40

    hub.change_listing = huge
    with pytest.raises(DownloadError, match=r"1099\.51 GB are to come, .* has room for [\d.]+ GB: free space"):
        pull("me/tiny", config=config)
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    ("status", "headers", "kind", "message"),
    [
        (404, {"X-Error-Code": "RepoNotFound"}, NotFound, "me/tiny@main: the hub does not have this repository"),
        (404, {"X-Error-Code": "RevisionNotFound"}, NotFound, "does not have this revision"),
        (401, {}, DownloadError, r"wants to know who asks \(401\), .*set HF_TOKEN"),
        (403, {"X-Error-Code": "GatedRepo"}, DownloadError, "is gated .*ask its owners for access on http.*HF_TOKEN"),
        (500, {}, DownloadError, "the hub answers 500: try again later, or choose a mirror with HF_ENDPOINT"),
        (418, {}, DownloadError, "the hub answers 418: check HF_ENDPOINT"),
        (302, {"Location": "http://127.0.0.1:1/"}, DownloadError, "cannot be reached .*check your connection"),
        (302, {"Location": "ftp://x/"}, DownloadError, "me/tiny@main: "),
        (200, {}, DownloadError, "does not answer as the hub does"),
    ],
)
def test_refusals(hub, config, status, headers, kind, message):
    hub.answer = lambda handler, path: handler.send(status, b"<html>", headers)
    with pytest.raises(kind, match=message) as caught:
        pull("me/tiny", config=config)
    assert "\n" not in str(caught.value)


def test_a_busy_hub_is_asked_again_from_the_first_request_on(hub, config):
    left = [3]

    def answer(handler, path: str) -> bool:
        if not left[0]:
            return False
        left[0] -= 1
        return handler.send(429 if left[0] else 503, b"")

    hub.answer = answer
    assert pull("me/tiny", config=config).commit == COMMIT
    assert len(hub.requests) == 3 + 1 + len(SMALL)


@pytest.mark.parametrize(("asked", "waits"), [("300", []), ("20", [20, 20, 32, 64]), ("Fri", [8, 16, 32, 64])])
def test_it_is_not_asked_before_it_says(hub, config, asked, waits):
    hub.answer = lambda handler, path: handler.send(429, b"", {"Retry-After": asked})
    listing, patient = partial(Hub(config).listing, parse("me/tiny")), dataclasses.replace(config, retry_wait_s=8)
    waited: list[float] = []
    with pytest.raises(Busy, match=f"answers 429: try again {f'in {asked} s' if asked.isdigit() else 'later'}, or"):
        insist(listing, patient, wait=waited.append)
    assert waited == waits, "nobody waits five minutes unasked"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("ALL_PROXY", "socks9://localhost:1", "Unknown scheme for proxy"),
        ("HTTP_PROXY", "garbage://me:secret@x", "Unknown scheme for proxy"),
        ("HTTPS_PROXY", "proxy:80a", "Invalid port"),
        ("SSL_CERT_FILE", "/nowhere.pem", "No such file"),
    ],
)
def test_an_environment_that_leads_to_no_network(config, monkeypatch, name, value, why):
    monkeypatch.setenv(name, value)
    huggingface_hub.close_session()  # the next one is made by what the environment says
    cure = "check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
    try:
        with pytest.raises(DownloadError, match=rf"the network cannot be set up \(.*{why}.*\): {cure}$") as caught:
            pull("me/tiny", config=config)
    finally:
        huggingface_hub.close_session()
    assert "secret" not in str(caught.value)


def test_a_proxy_that_lacks_a_library(config, monkeypatch):
    def get_session():
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")

    monkeypatch.setattr(huggingface_hub, "get_session", get_session)
    with pytest.raises(DownloadError, match=r"cannot be set up \(Using SOCKS proxy, .*: check HTTP_PROXY"):
        pull("me/tiny", config=config)


@pytest.mark.parametrize("which", ["blobs/*.incomplete", f"blobs/{64 * '?'}"])
def test_what_is_removed_meanwhile(hub, config, which):
    folder, total = config.cache / "models--me--tiny", sum(map(len, SMALL.values()))

    def progress(done: int, whole: int) -> None:
        if done == total:
            for path in folder.glob(which):
                path.unlink()

    with pytest.raises(DownloadError, match=r"me/tiny: [a-z.]+ was removed meanwhile: pull again"):
        pull("me/tiny", config=config, progress=progress)
    assert pull("me/tiny", config=config).commit == COMMIT


def test_another_commit_may_be_removed_meanwhile(hub, config):
    old = pull("me/tiny", config=config)
    hub.commit, hub.files = "f" * 40, {"config.json": b"{}", "model.safetensors": WEIGHTS[1:]}

    def progress(done: int, whole: int) -> None:
        if old.path.exists() and done > 10_000:
            remove(f"me/tiny@{old.commit}", config=config)

    hub.files["config.json"] = b'{"new": 1}'
    new = pull("me/tiny", config=config, progress=progress)
    assert (new.path / "model.safetensors").read_bytes() == WEIGHTS[1:] and not old.path.exists()


def test_a_refused_token_is_not_shown(hub, config):
    hub.answer = lambda handler, path: handler.send(401, b"")
    secret = dataclasses.replace(config, token="hf_secret")
    with pytest.raises(DownloadError, match=r"refuses the token in HF_TOKEN \(401\)") as caught:
        pull("me/tiny", config=secret)
    assert "secret" not in str(caught.value) and "secret" not in repr(secret)


def test_a_hub_that_says_nothing(hub, config, tmp_path):
    hub.answer = lambda handler, path: handler.connection.recv(1) == b"" or True  # until the client hangs up
    with pytest.raises(DownloadError, match=r"said nothing for 0\.05 s"):
        pull("me/tiny", config=HubConfig(cache=tmp_path, endpoint=hub.url, timeout_s=0.05))


def test_the_token_stays_with_the_hub(hub, config):
    with serving(SMALL) as elsewhere:
        hub.answer = lambda handler, path: (
            "/resolve/" in path and handler.send(302, b"", {"Location": f"{elsewhere.url}{path}"})
        )
        secret = dataclasses.replace(config, token="hf_secret")
        assert (pull("me/tiny", config=secret).path / "model.safetensors").read_bytes() == WEIGHTS
        assert [token for *_, token in elsewhere.requests] == [None, None]
        hub.answer = lambda handler, path: handler.send(302, b"", {"Location": f"{elsewhere.url}{path}"})
        with pytest.raises(DownloadError, match="sends us elsewhere"):  # there stand the hashes
            pull("me/tiny", config=secret)


@pytest.mark.parametrize(
    "name",
    ["../model-1.safetensors", "/model-1.safetensors", "model-..\\..\\1.safetensors", "model-\n.safetensors",
     "model-C:.safetensors", "model-.safetensors/../../../x.safetensors", "additional_chat_templates/../../x.jinja"],
)  # fmt: skip
def test_hostile_names_of_files(hub, config, name):
    hub.files = {
        "config.json": b"{}",
        "model-2.safetensors": b"2",
        "model.safetensors.index.json": b'{"weight_map":{}}',
    }
    hub.files[name] = b"hostile"
    try:
        pull("me/tiny", config=config)
    except DownloadError as error:
        assert "leads elsewhere: don't use it" in str(error)
    outside = [path for path in config.cache.parent.rglob("*") if path.is_file() and b"hostile" in path.read_bytes()]
    assert outside == []


@pytest.mark.parametrize(
    "change",
    [
        lambda listing: listing.update(sha="../../x"),
        lambda listing: listing.update(sha=7),
        lambda listing: listing.pop("siblings"),
        lambda listing: listing["siblings"].append(None),
        lambda listing: listing["siblings"][0].update(blobId="../../../x"),
        lambda listing: listing["siblings"][1]["lfs"].update(sha256="../" * 21 + "x"),
        lambda listing: listing["siblings"][1]["lfs"].update(size=-1),
        lambda listing: listing["siblings"][1]["lfs"].update(size="9"),
        lambda listing: listing["siblings"][1].update(rfilename=None),
        lambda listing: listing["siblings"][0].update(size=1 << 50),
        lambda listing: listing["siblings"][1]["lfs"].update(size=1 << 60),
    ],
)
def test_hostile_listings(hub, config, change):
    hub.change_listing = change
    with pytest.raises(DownloadError, match=r"does not answer as the hub does|don't use it"):
        pull("me/tiny", config=config)
    assert not config.cache.exists()


def test_a_listing_without_an_end(hub, config):
    hub.change_listing = lambda listing: listing.update(padding=" " * (17 << 20))
    with pytest.raises(DownloadError, match="has no end"):
        pull("me/tiny", config=config)


def test_revisions(hub, config):
    first = pull("me/tiny@main", config=config)
    hub.commit, hub.files = "f" * 40, {**SMALL, "model.safetensors": b"new"}
    with pytest.raises(DownloadError, match=f"answers with the commit {'f' * 40}"):
        pull(f"me/tiny@{COMMIT}", config=config)
    assert locate("me/tiny", config=config) == first.path, "until it is pulled again"
    refs = first.path.parents[1] / "refs"
    (refs / "main").write_text("f" * 40)  # another tool has seen the new one
    assert locate("me/tiny", config=config) == first.path
    second = pull("me/tiny", config=config)
    assert locate("me/tiny", config=config) == second.path != first.path
    assert locate(f"me/tiny@{COMMIT}", config=config) == first.path
    branch = pull("me/tiny@refs/pr/1", config=config)
    assert branch.path == second.path == locate("me/tiny@refs/pr/1", config=config)


def test_which_files_are_fetched(hub, config):
    hub.files = {"a-q4.gguf": b"4", "a-i2_s.gguf": b"2", "README.md": b"---\nlicense: mit\n---\n", "x.py": b""}
    with pytest.raises(InvalidParams, match=r"several models \(a-i2_s.gguf, a-q4.gguf\): name one, as me/tiny/a-i2_s"):
        pull("me/tiny", config=config)
    pulled = pull("me/tiny/a-i2_s.gguf", config=config)
    assert pulled.path.read_bytes() == b"2" and everything(pulled.path.parent) == {"a-i2_s.gguf", "README.md"}
    assert locate("me/tiny", config=config) == pulled.path  # the only one that is here
    with pytest.raises(NotFound, match=r"in part only: bitnet pull me/tiny/a-q4.gguf"):
        locate("me/tiny/a-q4.gguf", config=config)
    with pytest.raises(Unsupported, match=r"no weights like b.gguf: it has me/tiny/a-i2_s.gguf"):
        pull("me/tiny/b.gguf", config=config)
    hub.files = {**SMALL, "b.gguf": b"b"}
    with pytest.raises(InvalidParams, match=r"me/tiny/model.safetensors is a part of a model: pull me/tiny$"):
        pull("https://huggingface.co/me/tiny/blob/main/model.safetensors", config=config)
    hub.files["packed.safetensors"] = b"p"  # a file that is a model by itself
    assert pull("me/tiny/packed.safetensors", config=config).path.name == "packed.safetensors"
    hub.files.pop("config.json")
    assert pull("me/tiny/model.safetensors", config=config).path.name == "model.safetensors"
    hub.files = {"a.gguf": b"", "b\x1b[2J.gguf": b"", "c.gguf": b""}
    with pytest.raises(InvalidParams, match=r"\(a.gguf, c.gguf\)"):
        pull("me/tiny", config=config)
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b""}
    with pytest.raises(Unsupported, match="its weights are pickles"):
        pull("me/tiny", config=config)
    hub.commit = "f" * 40
    hub.files = {"params.json": b"{}", "consolidated.00.pth": b"PK", "tokenizer.model": b"", "x.pth": b""}
    assert everything(pull("me/tiny@meta", config=config).path) >= {
        "params.json",
        "consolidated.00.pth",
        "tokenizer.model",
    }


def test_a_model_in_parts_is_one_model(hub, config):
    write_default(config.cache.parent / "x.gguf", "TQ2_0", per_file=40)
    parts = {path.name: path.read_bytes() for path in config.cache.parent.glob("x-*.gguf")}
    hub.files = {"README.md": b"", **parts}
    pulled = pull("me/tiny", config=config)
    assert len(parts) == 2 and everything(pulled.path.parent) == {"README.md", *parts}
    (found,) = installed_models(config=config)
    assert (found.name, found.path, found.problem) == ("me/tiny", pulled.path, "")
    (found,) = installed_models([pulled.path.parent], config=dataclasses.replace(config, cache=config.cache / "none"))
    assert found.name == "x-00001-of-00002.gguf"
    (pulled.path.parent / "x-00002-of-00002.gguf").unlink()
    for name in ("me/tiny", "me/tiny/x-00001-of-00002.gguf"):
        with pytest.raises(NotFound, match="in part only"):
            locate(name, config=config)
    hub.files["other.gguf"] = b""
    with pytest.raises(InvalidParams, match=r"several models \(other.gguf, x-00001-of-00002.gguf\)"):
        pull("me/tiny", config=config)
    pulled = pull("me/tiny/x-00002-of-00002.gguf", config=config)
    assert everything(pulled.path.parent) == {"README.md", *parts}


def test_all_that_the_reader_of_a_folder_reads_is_fetched(hub, config):
    texts = {"added_tokens.json": b"{}", "modules.json": b"[]", "2_Pooling/config.json": b"{}"}
    hub.files = {**SMALL, **texts, "2_Dense/model.safetensors": b"", "vocab.json": b""}
    assert everything(pull("me/tiny", config=config).path) == {*SMALL, *texts}
