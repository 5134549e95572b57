"""Models that several ask for at a time."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from asgi import HeldLoad

from bitnet_inference.llm import LLM
from bitnet_inference.model_folder import find_model
from bitnet_inference.models import Models
from bitnet_inference.server import ServedModels, hosts
from bitnet_inference.server.failures import Failure


class Noting(Models):
    """Notes how long each is ready to wait for room."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.waits_s: list[float] = []

    def use(self, model: str | Path = "default", *, wait_s: float = 0.0) -> AbstractContextManager[LLM]:
        self.waits_s.append(wait_s)
        return super().use(model, wait_s=wait_s)


def test_who_waits_for_room_behind_others_waits_no_longer_than_they(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "MAX_WAIT_S", 0.5)
    shutil.copytree(find_model("default"), tmp_path / "other")
    models = Noting(max_cache_tokens=256, threads=1)

    async def status() -> int:
        try:
            async with served.use("other"):
                return 200
        except Failure as failure:
            return failure.status

    async def several() -> list[int]:
        async with served.use("story") as llm:
            models.max_bytes = llm.num_bytes
            models.waits_s.clear()
            return await asyncio.gather(*[status() for _ in range(3)])

    with closing(ServedModels(models, {"story": "default", "other": tmp_path / "other"})) as served:
        assert asyncio.run(several()) == [503] * 3
    assert len(models.waits_s) == 3 and max(models.waits_s[1:]) < 0.25


def test_who_gives_up_waiting_for_a_load_uses_the_model_no_more() -> None:
    load = HeldLoad()

    async def wait(served: ServedModels) -> None:
        async with served.use("story"):
            raise AssertionError("the load has not ended")

    async def give_up(served: ServedModels) -> int:
        waiting = asyncio.create_task(wait(served))
        await asyncio.to_thread(load.has_begun.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError) as _kept:  # with all of its frames
            await waiting
        load.may_go_on.set()
        async with served.use("story"):  # by the same door
            return models.loaded()[0].num_users

    models = Models(max_cache_tokens=256, threads=1, progress=load)
    with closing(ServedModels(models, {"story": "default"})) as served:
        assert asyncio.run(give_up(served)) == 1
