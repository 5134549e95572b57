"""Names of models, what is in caches and folders, and how it is listed, shown and removed. Nothing is fetched."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import serving
from gguf_samples import write_default
from onnx_samples import make_decoder
from onnx_samples import write_model as write_onnx_model
from typer.testing import CliRunner

from bitnet_inference import Models, cli
from bitnet_inference.config import HubConfig
from bitnet_inference.errors import InvalidParams, NotFound
from bitnet_inference.hub.local import locate, remove
from bitnet_inference.hub.names import is_inside, is_repository, parse, registry
from bitnet_inference.installed import installed_models

MODEL = Path(__file__).parents[2] / "src" / "bitnet_inference" / "default_model"
OLD, NEW = "a" * 40, "b" * 40
PINNED = parse("bitnet-2b").revision


def cached(cache: Path, repository: str, commit: str, files: dict[str, bytes], *, ref: str = "main") -> Path:
    """A commit in the layout of Hugging Face's tools."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    for name, data in files.items():
        blob = folder / "blobs" / f"{hash(data):x}".strip("-")
        path = folder / "snapshots" / commit / name
        for each in (blob, path):
            each.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        path.symlink_to(os.path.relpath(blob, path.parent))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    return folder / "snapshots" / commit


def model_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in MODEL.iterdir() if path.name != "golden.json"}


def bitnet(cache: Path, *args: str) -> tuple[int, str, str]:
    environment = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    result = CliRunner().invoke(cli.app, args, prog_name="bitnet", env=environment)
    return result.exit_code, result.stdout, result.stderr


class TestNames:
    def test_the_registry_is_sound(self):
        names = [each for entry in registry().values() for each in (entry.name, *entry.aliases)]
        assert len(set(names)) == len(names) and names == [name.lower() for name in names]
        for entry in registry().values():
            assert is_repository(entry.repository) and entry.what and parse(entry.name).repository == entry.repository
            assert parse(entry.repository).files == entry.files == parse(entry.name).files

    def test_what_a_name_stands_for(self):
        wanted = parse("BitNet@v1.0")
        assert (wanted.repository, wanted.revision) == ("microsoft/bitnet-b1.58-2B-4T", "v1.0")
        assert parse("falcon3-1b").revision == parse("microsoft/bitnet-b1.58-2B-4T").revision == "main"
        assert re.fullmatch("[0-9a-f]{40}", parse("bitnet").revision)
        wanted = parse("me/you/q/x[1].gguf@refs/pr/3")
        assert (wanted.repository, wanted.revision, wanted.files) == ("me/you", "refs/pr/3", ("q/x[[]1].gguf",))

    @pytest.mark.parametrize(
        "address, name",
        [
            ("https://huggingface.co/me/tiny", "me/tiny"),
            ("hf.co/me/tiny/", "me/tiny"),
            ("https://huggingface.co/me/tiny/tree/v1", "me/tiny@v1"),
            ("https://huggingface.co/me/tiny/resolve/main/q/x.gguf?download=true", "me/tiny/q/x.gguf@main"),
        ],
    )
    def test_addresses(self, address, name):
        assert parse(address) == parse(name)

    def test_a_mistyped_path_is_no_name(self):
        with pytest.raises(InvalidParams, match="is no name of a model"):
            parse("models/x.gguf")

    def test_typos(self):
        with pytest.raises(NotFound, match=r"no model is called falcom3-1b: did you mean falcon3-1b"):
            parse("falcom3-1b")
        with pytest.raises(NotFound, match="bitnet show lists the names"):
            parse("zzzz")

    @pytest.mark.parametrize(
        "name",
        ["../x/y", "a/..", "a/b/", "a/b/../c.gguf", "a/b//etc", "a/b/c:d", "a/b@", "a/b@../x", "a/b@/x", "a/b@x/..",
         "a/b@x y", "a--b/c", "a/b.git", "a/b/c\\d", "é/b", "a/-b", "a" * 97 + "/b", "a/b@x.lock", "a/b\n", "/a/b"],
    )  # fmt: skip
    def test_what_is_no_name(self, name):
        with pytest.raises((InvalidParams, NotFound)):
            parse(name)

    @pytest.mark.parametrize(
        "file", ["..", "../x", "/x", "a/../b", "a//b", "x/", "C:x", "a\\b", "a\0b", "x\n", ". ./x"]
    )
    def test_what_leads_out(self, file):
        assert not is_inside(file) and is_inside("a/b.c") and is_inside(".gitattributes")


class TestCache:
    def test_models_of_other_tools_are_found(self, tmp_path):
        config = HubConfig(cache=tmp_path)
        old = cached(tmp_path, "me/tiny", OLD, model_files())
        assert locate("me/tiny", config=config) == old
        cached(tmp_path, "me/tiny", NEW, {"config.json": b"{}"})  # a tool has looked at the new one
        with pytest.raises(NotFound, match="me/tiny is here in part only: bitnet pull me/tiny"):
            locate("me/tiny", config=config)
        assert locate(f"me/tiny@{OLD[:7]}", config=config) == old
        parts = {
            "model-1.safetensors": b"1",
            "model.safetensors.index.json": b'{"weight_map": {"x": "model-2.safetensors"}}',
        }
        cached(tmp_path, "me/parts", OLD, {"config.json": b"{}", **parts})
        with pytest.raises(NotFound, match="in part only"):
            locate("me/parts", config=config)

    def test_files_of_torch_save_are_weights_too(self, tmp_path):
        """Which are never pulled, but other tools fetch them."""
        config, files = HubConfig(cache=tmp_path), {"config.json": b"{}", "pytorch_model.bin": b"PK"}
        folder = cached(tmp_path, "me/one", OLD, files)
        assert locate("me/one", config=config) == folder
        parts = {"pytorch_model.bin.index.json": b'{"weight_map": {"x": "a.bin"}}', "config.json": b"{}"}
        folder = cached(tmp_path, "me/all", OLD, parts | {"a.bin": b"PK"})
        assert locate("me/all", config=config) == folder
        cached(tmp_path, "me/parts", OLD, parts)
        with pytest.raises(NotFound, match="in part only"):
            locate("me/parts", config=config)

    def test_broken_refs_are_none(self, tmp_path):
        cached(tmp_path, "me/tiny", OLD, model_files())
        for text in ("../../../x", "A" * 40, "", "\xff"):
            (tmp_path / "models--me--tiny" / "refs" / "main").write_text(text, encoding="latin-1")
            with pytest.raises(NotFound, match="has not been pulled"):
                locate("me/tiny", config=HubConfig(cache=tmp_path))

    def test_a_link_in_the_shared_store_is_followed(self, tmp_path):
        folder = cached(tmp_path, "me/tiny", OLD, model_files())
        blob = (folder / "model.safetensors").resolve()
        shared = tmp_path / "blobs" / "ab" / "abcd"
        shared.parent.mkdir(parents=True)
        blob.rename(shared)
        blob.symlink_to(os.path.relpath(shared, blob.parent))
        (found,) = installed_models(config=HubConfig(cache=tmp_path))
        assert (found.name, found.problem) == ("me/tiny", "")

    @pytest.mark.parametrize("below", ["", "onnx/"])
    def test_onnx_files_that_another_tool_has_fetched(self, tmp_path, below):
        write_onnx_model(tmp_path / "model.onnx", make_decoder())
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        files[f"{below}model.onnx"] = files.pop("model.onnx")
        folder = cached(tmp_path / "hub", "a/b", OLD, files)
        config = HubConfig(cache=tmp_path / "hub")
        (found,) = installed_models(config=config)
        assert (found.name, found.format, found.problem) == ("a/b", "ONNX", "")
        assert locate("a/b", config=config) == found.path == folder

    def test_one_folder_is_no_list_of_folders(self, tmp_path):
        for given in (str(tmp_path), tmp_path):
            with pytest.raises(InvalidParams, match="give a list of folders"):
                installed_models(given, config=HubConfig(cache=tmp_path))

    def test_models_by_name_are_shared(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        cached(tmp_path, "me/tiny", OLD, model_files())
        with (
            Models(1 << 30, max_cache_tokens=256) as models,
            models.use("me/tiny") as one,
            models.use("me/tiny") as other,
        ):
            models.preload(f"me/tiny@{OLD}")
            assert one is other and len(models.loaded()) == 1

    def test_the_environment(self, tmp_path, monkeypatch):
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "HF_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        config = HubConfig.from_env()
        assert config.cache == tmp_path / "huggingface" / "hub"
        assert (config.endpoint, config.token) == ("https://huggingface.co", None)
        (tmp_path / "token").write_text("hf_file\n")
        for name, value in {
            "HF_HOME": str(tmp_path),
            "HF_ENDPOINT": " http://mirror/ ",
            "HF_HUB_OFFLINE": "yes",
        }.items():
            monkeypatch.setenv(name, value)
        config = HubConfig.from_env()
        assert (config.cache, config.endpoint) == (tmp_path / "hub", "http://mirror")
        assert (config.token, config.offline) == ("hf_file", True)
        for nothing in ("/dev/zero", "/" + 5000 * "x"):
            monkeypatch.setenv("HF_TOKEN_PATH", nothing)
            assert HubConfig.from_env().token is None
        wrong = [("HF_TOKEN", "hf_\u00e9"), ("HF_HUB_DOWNLOAD_TIMEOUT", "0"), ("HF_HUB_ETAG_TIMEOUT", "1.5")]
        wrong += [(name, "~nobody_at_all/there") for name in ("HF_HUB_CACHE", "HF_TOKEN_PATH")]
        wrong += [("HF_ENDPOINT", address) for address in ("file:///etc", "https://", "http://[::1")]
        for name, value in wrong:
            with monkeypatch.context() as patch, pytest.raises(InvalidParams, match=name) as caught:
                patch.setenv(name, value)
                HubConfig.from_env()
            assert "hf_" not in str(caught.value)


class TestRemove:
    def test_a_repository(self, tmp_path):
        cached(tmp_path, "me/tiny", OLD, {"config.json": b"{}"})
        other = cached(tmp_path, "me/other", OLD, {"config.json": b"{}"})
        assert remove("me/tiny", config=HubConfig(cache=tmp_path)) > 0
        assert [path.name for path in tmp_path.iterdir()] == ["models--me--other"] and other.is_dir()
        with pytest.raises(NotFound, match="me/tiny is not in"):
            remove("me/tiny", config=HubConfig(cache=tmp_path))

    def test_a_commit_and_what_no_other_has(self, tmp_path):
        config = HubConfig(cache=tmp_path)
        cached(tmp_path, "me/tiny", OLD, {"config.json": b"{}", "x.gguf": b"old"}, ref="v1")
        new = cached(tmp_path, "me/tiny", NEW, {"config.json": b"{}", "x.gguf": b"newer"})
        assert remove("me/tiny@v1", config=config) == 3 + 40
        assert (new / "config.json").read_bytes() == b"{}" and (new / "x.gguf").read_bytes() == b"newer"
        folder = new.parents[1]
        assert len(list((folder / "blobs").iterdir())) == 2
        assert [path.name for path in (folder / "refs").iterdir()] == ["main"]
        assert [path.name for path in (folder / "snapshots").iterdir()] == [NEW]
        with pytest.raises(NotFound):
            remove("me/tiny@v1", config=config)
        remove("me/tiny@main", config=config)
        assert not folder.exists()

    def test_a_commit_leaves_what_is_fetched_of_another(self, tmp_path):
        config = HubConfig(cache=tmp_path)
        blobs = cached(tmp_path, "me/tiny", OLD, {"config.json": b"{}", "x.gguf": b"old"}).parents[1] / "blobs"
        on_the_way = {blobs / "half.incomplete": b"half", blobs / "whole": b"of a commit that has no links yet"}
        for blob, data in on_the_way.items():
            blob.write_bytes(data)
        assert remove(f"me/tiny@{OLD}", config=config) == 2 + 3 + 40
        assert {path: path.read_bytes() for path in blobs.iterdir()} == on_the_way
        with pytest.raises(NotFound, match="has not been pulled"):
            locate("me/tiny", config=config)
        remove("me/tiny", config=config)
        assert not blobs.parent.exists()

    @pytest.mark.parametrize("address", ["https://huggingface.co/me/tiny", "hf.co/me/tiny", "hf.co/me/tiny/tree/main"])
    def test_by_its_address(self, tmp_path, address):
        cached(tmp_path, "me/tiny", OLD, {"config.json": b"{}"})
        remove(address, config=HubConfig(cache=tmp_path))
        assert not any(tmp_path.iterdir())
        with pytest.raises(InvalidParams, match="is one file of a repository: remove me/tiny"):
            remove("https://huggingface.co/me/tiny/blob/main/x.gguf", config=HubConfig(cache=tmp_path))

    def test_nothing_outside_the_cache(self, tmp_path):
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "precious").write_text("x")
        cache = tmp_path / "cache"
        config = HubConfig(cache=cache)
        folder = cached(cache, "me/tiny", OLD, {"config.json": b"{}"})
        (folder / "link").symlink_to(outside)
        (folder.parents[1] / "blobs" / "link").symlink_to(outside)
        (cache / "models--me--linked").symlink_to(outside)
        with pytest.raises(InvalidParams, match="no folder of the cache"):
            remove("me/linked", config=config)
        remove("me/tiny", config=config)
        for name in (str(outside), "../outside", "me/tiny/x.gguf", "x/.."):
            with pytest.raises((InvalidParams, NotFound)):
                remove(name, config=config)
        assert (outside / "precious").read_text() == "x"


class TestCommands:
    @pytest.fixture
    def cache(self, tmp_path):
        files = {**model_files(), "README.md": b"---\nlicense: mit\n---\n# Hi"}
        cached(tmp_path / "cache", "microsoft/bitnet-b1.58-2B-4T", PINNED, files)
        cached(
            tmp_path / "cache",
            "google/bert",
            OLD,
            {"config.json": b'{"architectures": ["BertModel"]}', "model.safetensors": b""},
        )
        return tmp_path / "cache"

    def test_list(self, tmp_path, cache):
        code, out, _ = bitnet(cache, "list")
        assert code == 0 and "bert" not in out
        assert out.splitlines()[1].split()[:2] == ["bitnet-2b", "Hugging"] and f"main {PINNED[:12]}" in out
        code, out, err = bitnet(cache, "list", "--all")
        assert "google/bert" in out and "google/bert: " in err
        assert bitnet(tmp_path / "none", "list")[1] == ""

    def test_list_of_other_tools(self, tmp_path, cache):
        digest = "c" * 64
        for name in ("studio/me/tiny/x.gguf", f"ollama/models/blobs/sha256-{digest}"):
            path = tmp_path / name
            path.parent.mkdir(parents=True)
            write_default(path)
        library = tmp_path / "ollama/models/manifests/registry.ollama.ai/library/tiny"
        library.mkdir(parents=True)
        layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}]
        (library / "latest").write_text(json.dumps({"layers": layers}))
        (tmp_path / "ollama/models/blobs/sha256-x").mkdir()
        layers[0]["digest"] = "sha256:x/../../../../studio/me/tiny/x.gguf"
        (library / "evil").write_text(json.dumps({"layers": layers}))
        (library / "broken").write_text("[")
        folders = ["--gguf-folder", str(tmp_path / "studio"), "--gguf-folder", str(tmp_path / "ollama")]
        code, out, _ = bitnet(cache, "list", "--json", *folders)
        found = {each["name"]: each for each in json.loads(out)}
        assert code == 0 and set(found) == {"bitnet-2b", "me/tiny/x.gguf", "tiny:latest"}
        assert found["tiny:latest"]["format"] == "GGUF" and found["tiny:latest"]["num_bytes"] > 0
        code, same, err = bitnet(cache, "list", "--json", "--gguf-folder", str(tmp_path / "gone"), *folders)
        assert (code, same) == (0, out) and err == f"[{tmp_path / 'gone'}: there is no such folder]\n"
        code, _, err = bitnet(cache, "list", "--gguf-folder", str(tmp_path / "nowhere"))
        assert code == 2 and "there is no such folder" in err

    def test_show(self, cache):
        code, out, _ = bitnet(cache, "show", "bitnet")
        assert code == 0
        told = ("bitnet-2b, bitnet, ", "microsoft/bitnet-b1.58-2B-4T", PINNED, "mit", "model.safetensors", "default")
        assert [part for part in told if part not in out] == []
        code, out, _ = bitnet(cache, "show", "falcon3-1b")
        assert code == 0 and "no: bitnet pull falcon3-1b" in out
        code, out, _ = bitnet(cache, "show")
        assert code == 0 and len(out.splitlines()) == len(registry()) + 1
        code, _, err = bitnet(cache, "show", "falcom3-1b")
        assert code == 2 and "did you mean falcon3-1b" in err and err.count("\n") == 1

    def test_names_in_other_commands(self, cache):
        code, out, _ = bitnet(cache, "inspect", "bitnet-2b")
        assert code == 0 and PINNED in out
        code, _, err = bitnet(cache, "run", "x", "-m", "falcon3-1b")
        assert code == 2 and "falcon3-1b has not been pulled: bitnet pull falcon3-1b" in err and err.count("\n") == 1
        code, _, err = bitnet(cache, "run", "x", "--drafts", "bitnett")
        assert code == 2 and "did you mean bitnet" in err

    def test_what_is_somebody_elses(self, cache, monkeypatch):
        locked, look, access = cache / "models--microsoft--bitnet-b1.58-2B-4T", Path.rglob, os.access

        def rglob(path, pattern):
            if path.is_relative_to(locked):
                raise PermissionError(errno.EACCES, "Permission denied")
            return look(path, pattern)

        monkeypatch.setattr(Path, "rglob", rglob)
        monkeypatch.setattr(os, "access", lambda path, mode: path != locked and access(path, mode))
        code, _, err = bitnet(cache, "list", "--all")
        assert code == 0 and "google/bert" in err and f"{locked}: cannot be read: check its permissions" in err
        code, _, err = bitnet(cache, "run", "x", "-m", "bitnet-2b")
        said = f"{locked} cannot be used (Permission denied): check its permissions\n"
        assert code == 2 and err.endswith(said) and err.count("\n") == 1
        assert bitnet(cache, "rm", "bitnet-2b", "--yes") == (2, "", f"bitnet: {said}")

    @pytest.mark.parametrize("which", [".", "models--microsoft--bitnet-b1.58-2B-4T/snapshots"])
    def test_what_may_not_be_read_is_not_empty(self, cache, monkeypatch, which):
        locked, look = cache / which, os.scandir  # the bits of a folder hold nobody who is root

        def scandir(path):
            if Path(path).is_relative_to(locked):
                raise PermissionError(errno.EACCES, "Permission denied")
            return look(path)

        monkeypatch.setattr(os, "scandir", scandir)
        for command in (("inspect", "bitnet-2b"), ("rm", "bitnet-2b", "--yes"), ("show", "bitnet-2b")):
            code, _, err = bitnet(cache, *command)
            assert code == 2 and err.endswith("cannot be used (Permission denied): check its permissions\n")
        code, _, err = bitnet(cache, "list")
        assert code == (2 if which == "." else 0) and ("Permission denied" in err) == (which == ".")

    def test_names_of_files_do_not_write_on_the_terminal(self, cache, tmp_path):
        write_default(tmp_path / "red\x1b[31m.gguf")
        (tmp_path / "broken\x1b[2J.gguf").write_bytes(b"x")
        code, out, err = bitnet(cache, "list", "--all", "--gguf-folder", str(tmp_path))
        assert code == 0 and "\x1b" not in out + err
        assert "red\\x1b[31m.gguf" in out and "broken\\x1b[2J.gguf: " in err

    def test_rm(self, cache):
        code, _, err = bitnet(cache, "rm", "bitnet-2b")
        assert code == 2 and "add --yes" in err
        code, _, err = bitnet(cache, "rm", "nobody/nothing")  # and nothing is asked
        assert code == 2 and "nobody/nothing is not in" in err
        assert bitnet(cache, "rm", "bitnet-2b", "--yes")[0] == 0
        assert [path.name for path in cache.iterdir()] == ["models--google--bert"]


def test_run_offers_to_pull_on_a_terminal(tmp_path):
    import pty

    with serving(model_files()) as hub:
        ours, theirs = pty.openpty()
        environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": hub.url, "TERM": "dumb"}
        environment["HF_HUB_DOWNLOAD_TIMEOUT"] = "600"  # the machine may be busy with something else
        command = [sys.executable, "-m", "bitnet_inference", "run", "The fox", "-n", "5", "-m", "me/tiny"]
        os.write(ours, b"y\n")
        streams = {"stdin": theirs, "stderr": theirs, "stdout": subprocess.PIPE}
        result = subprocess.run(command, env=environment, text=True, **streams)
        shown = b""
        while b"Pull it" not in shown:
            shown += os.read(ours, 10_000)
        os.close(ours), os.close(theirs)
    assert result.returncode == 0 and b"me/tiny is not here. Pull it" in shown, shown
    assert len(result.stdout.split()) >= 3
    shutil.rmtree(tmp_path)
