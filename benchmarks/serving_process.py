"""`bitnet serve` as a process of its own: started, watched, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import NamedTuple

from serving_client import HOST, Answer, ask, get

from bitnet_inference.errors import Stopped

MODEL = "m"  # the name under which it is served
START_S = 120.0
IN_USE = ("bitnet_requests_running", "bitnet_requests_waiting", "bitnet_cache_blocks_used")


class Cpu(NamedTuple):
    """Seconds of processor time: of the whole process, and of the thread with the event loop."""

    process_s: float
    loop_s: float

    def since(self, earlier: Cpu) -> Cpu:
        """What was used in between."""
        return Cpu(self.process_s - earlier.process_s, self.loop_s - earlier.loop_s)


class Serving:
    """A server on a port of its own, for as long as the `with` block lasts. Raises Stopped where it does not start.

    `log` has its lines, `load_s` is how long it took from the start to the first answer.
    """

    def __init__(self, model: str | Path, threads: int, *options: str, log: Path | None = None) -> None:
        self._folder = TemporaryDirectory()
        self.log = log or Path(self._folder.name, "log")
        self.port = _free_port()
        self._command = [
            *(sys.executable, "-m", "bitnet_inference", "serve", f"{MODEL}={model}"),
            *("--port", str(self.port), "--threads", str(threads), "--log-file", str(self.log), *options),
        ]
        self.load_s = 0.0

    def __enter__(self) -> Serving:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill(signal.SIGKILL if kind else signal.SIGTERM)
        self._folder.cleanup()

    def start(self) -> None:
        """Start it, also again, and wait until it answers."""
        begin = time.perf_counter()
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while not self.is_healthy():
            if self._process.poll() is not None or time.perf_counter() - begin > START_S:
                self.kill()
                raise Stopped(f"the server did not start: {self.told}")
            time.sleep(0.02)
        self.load_s = time.perf_counter() - begin

    def kill(self, sig: int = signal.SIGKILL) -> int:
        """End it; what it returns."""
        if self._process.poll() is None:
            self._process.send_signal(sig)
        told = self._process.communicate(timeout=START_S)[1]
        self.told = told.decode(errors="replace")[-1000:]
        return self._process.returncode

    def is_healthy(self) -> bool:
        """Whether it answers /health, in 10 seconds at most."""
        return self.read("/health").status == 200

    def read(self, path: str, key: str = "") -> Answer:
        """What a path gives."""
        return asyncio.run(ask(self.port, get(path, key), timeout_s=10))

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def cpu(self) -> Cpu:
        """What it has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        process_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        loop_ns = int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0])
        return Cpu(process_s, loop_ns / 1e9)

    def resident_bytes(self) -> int:
        """What it has in memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    def in_use(self, key: str = "") -> dict[str, float]:
        """What its metrics say is in use: requests, and blocks of the cache."""
        told = self.read("/metrics", key).body.decode().splitlines()
        found = {name: [line for line in told if line.startswith(f"{name}{{")] for name in IN_USE}
        return {name: sum(float(line.split()[-1]) for line in lines) for name, lines in found.items()}


def _free_port() -> int:
    with socket.socket() as each:
        each.bind((HOST, 0))
        port: int = each.getsockname()[1]
        return port
