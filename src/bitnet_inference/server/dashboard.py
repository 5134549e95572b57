"""GET /stats: what the models do now, in JSON, for the dashboard."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from bitnet_inference.config import installed_version
from bitnet_inference.models import ModelState
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.sse import json_response
from bitnet_inference.server.stats import Watch


def add_stats(app: FastAPI, served: ServedModels, watch: Watch) -> None:
    """Answer /stats."""

    @app.get("/stats", include_in_schema=False)
    async def stats() -> Response:
        return json_response(await served.in_thread(stats_of, served, watch))


def stats_of(served: ServedModels, watch: Watch) -> dict[str, Any]:
    """The served models, one entry for each path with all `names` it has, and the last failures, the newest first.

    "state" is "loaded", "loading" or "unloaded"; "counts" are Counts.as_json(), None before the first load. Times are
    seconds since the epoch.
    """
    states = {state.path: state for state in served.models.loaded()}
    counts, names = watch.counts(), served.names_by_path()
    models = [
        {"names": each, "counts": counts[path].as_json() if path in counts else None, **_state(states.get(path))}
        for path, each in names.items()
    ]
    failures = [
        {"time": each.time, "model": names[each.path][0], "message": each.message}
        for each in watch.failures()
        if each.path in names
    ]
    used_bytes = sum(state.num_bytes for state in states.values())
    return {
        "version": installed_version(),
        "time": time.time(),
        "started": watch.started,
        "memory": {"max_bytes": served.models.max_bytes, "used_bytes": used_bytes},
        "models": models,
        "failures": failures,
    }


def _state(state: ModelState | None) -> dict[str, Any]:
    if state is None:
        return {"state": "unloaded", "num_bytes": 0, "num_users": 0, "idle_s": None, "max_model_len": None}
    return {
        "state": "loading" if state.is_loading else "loaded",
        "num_bytes": state.num_bytes,
        "num_users": state.num_users,
        "idle_s": state.idle_s,
        "max_model_len": state.max_context,
    }
