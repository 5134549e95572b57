"""What the dashboard shows: the counts of every model, and what went wrong."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import httpx

from bitnet_inference.engine.events import Finished
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Finish, Usage
from bitnet_inference.errors import OutOfMemory
from bitnet_inference.models import Models
from bitnet_inference.server import ServedModels, Watch
from bitnet_inference.server.dashboard import stats_of

BASE_MODEL = Path(__file__).parents[1] / "golden" / "llama-f16"
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


def models_of(watch: Watch, **options: int) -> Models:
    return Models(threads=1, max_cache_tokens=256, listener=watch.listener, **options)


def test_every_model_is_counted_under_its_names() -> None:
    watch = Watch()
    paths = {"story": "default", "tale": "default", "base": BASE_MODEL, "gone": BASE_MODEL / "gone"}
    with closing(ServedModels(models_of(watch), paths)) as served:
        assert [each["state"] for each in stats_of(served, watch)["models"]] == ["unloaded"] * 2
        assert served.state("gone") is None
        with served.models.use() as llm:
            llm.generate("Once", PARAMS)
            story, base = stats_of(served, watch)["models"]
        assert story["names"] == ["story", "tale"] and story["max_model_len"] == llm.max_context
        assert story["state"] == "loaded" and story["num_users"] == 1
        assert story["counts"]["total"]["output_tokens"] == 5
        assert stats_of(served, watch)["memory"]["used_bytes"] == story["num_bytes"] == llm.num_bytes
        assert base["counts"] is None and base["num_bytes"] == 0


def test_a_model_that_is_loaded_again_goes_on_with_its_counts() -> None:
    watch = Watch()
    for _ in range(2):
        with models_of(watch) as models, models.use() as llm:
            llm.generate("Once", PARAMS)
    (counts,) = watch.counts().values()
    assert counts.as_json()["total"]["output_tokens"] == 10


def test_failures_are_told_as_clients_hear_of_them() -> None:
    watch = Watch()
    with closing(ServedModels(Models(max_bytes=1 << 30, listener=watch.listener), {"base": BASE_MODEL})) as served:
        hear = watch.listener(BASE_MODEL.resolve())
        for number, error in enumerate((OutOfMemory("no room: close something"), ValueError("a secret"))):
            hear(Finished(number, 0.0, Finish("error", error=error), usage()))
        hear(Finished(3, 0.0, Finish("stop"), usage()))
        messages = [each["message"] for each in stats_of(served, watch)["failures"]]
    assert messages == ["the server has a defect: its log says more", "no room: close something"]


def usage() -> Usage:
    with Models(threads=1, max_cache_tokens=64) as models, models.use(BASE_MODEL) as llm:
        return llm.generate("a", SamplingParams(max_tokens=1)).usage


def test_the_list_of_models_tells_what_is_loaded(running: object) -> None:
    data = httpx.get(f"{running.url}/v1/models").json()["data"]  # type: ignore[attr-defined]
    with running.served.models.use() as llm:  # type: ignore[attr-defined]
        loaded = httpx.get(f"{running.url}/v1/models/story").json()  # type: ignore[attr-defined]
    assert loaded["max_model_len"] == llm.max_context and loaded["can_chat"] is True
    assert [each["id"] for each in data] == ["story"]
    assert httpx.get(f"{running.url}/v1/models/").json()["data"][0]["id"] == "story"  # type: ignore[attr-defined]
