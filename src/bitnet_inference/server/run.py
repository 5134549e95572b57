"""Runs the application until it is told to stop."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI


def serve(app: FastAPI, *, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)
