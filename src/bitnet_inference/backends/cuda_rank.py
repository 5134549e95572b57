"""The process of one GPU of several: it loads its part of a model, and does what it is asked until nobody asks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends.cuda import CudaModel, CudaOutput
from bitnet_inference.backends.cuda_group import Group, require_gpus
from bitnet_inference.backends.cuda_wire import Arrays, Wire, Words, told
from bitnet_inference.config import EngineConfig
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.ternarized import quantized
from bitnet_inference.model.contract import Batch
from bitnet_inference.model.shards import rows

Message = tuple[Words, list[NDArray[Any]]]
Reply = tuple[Words, Arrays]
Ints = NDArray[np.int32]


class RankServer:
    """Does what comes over a wire, one after the other, with a rank's part of a model."""

    def __init__(self, wire: Wire, group: Group) -> None:
        self._wire, self._group = wire, group
        self._model: CudaModel | None = None
        self._output: CudaOutput | None = None
        self._num_tokens = 0  # of its part of the vocabulary

    def answer(self, words: Words, arrays: list[NDArray[Any]]) -> Reply:
        """What to reply; an error is a reply too."""
        verbs: dict[str, Callable[..., Reply]] = {
            "load": self._load,
            "reserve": self._reserve,
            "forward": self._forward,
            "copy_blocks": self._copy_blocks,
            "top": self._top,
            "full": self._full,
            "hidden": self._hidden,
        }
        try:
            return verbs[words.pop("verb")](*arrays, **words)
        except Exception as error:  # a defect too must not leave who asks waiting
            return told(error, f"the process of GPU {self._group.rank}"), ()

    def _load(self, path: str, arm: bool, config: Words) -> Reply:
        require_gpus(self._group.size)
        given = EngineConfig(**{**config, "device": f"cuda:{self._group.rank}", "gpus": 1, "threads": 1})
        checkpoint = quantized(open_checkpoint(path, arm_i2_s=arm), given.quantize)
        self._model = model = CudaModel(checkpoint, given, self._tell, group=self._group)
        first, last = rows(checkpoint.config, "head", self._group.size)[self._group.rank]
        self._num_tokens = last - first
        able = {name: value for name, value in asdict(model.capabilities).items() if name != "threads"}
        return {"capabilities": able, "notes": model.notes, "num_bytes": model.num_bytes, "first_token": first}, ()

    def _tell(self, done: int, total: int) -> None:
        self._wire.send({"progress": [done, total]})

    def _reserve(self, num_blocks: int) -> Reply:
        self._opened().reserve(num_blocks)
        return {}, ()

    def _forward(self, ids: Ints, positions: Ints, slots: Ints, starts: Ints, tables: Ints) -> Reply:
        batch = Batch(ids, positions, slots, starts, tables)  # not has_next: no rank knows the best of all
        self._output = self._opened().forward(batch)
        return {}, ()

    def _copy_blocks(self, pairs: Ints) -> Reply:
        self._opened().copy_blocks([(source, target) for source, target in pairs.tolist()])
        return {}, ()

    def _top(self, chosen: Ints, k: int) -> Reply:
        return {}, self._last().top(chosen.tolist(), min(k, self._num_tokens))

    def _full(self, chosen: Ints) -> Reply:
        return {}, [self._last().full(chosen.tolist())]

    def _hidden(self, chosen: Ints) -> Reply:
        return {}, [self._last().hidden(chosen.tolist())] if self._group.rank == 0 else []

    def _opened(self) -> CudaModel:
        assert self._model is not None, "a model is loaded first"
        return self._model

    def _last(self) -> CudaOutput:
        assert self._output is not None, "there is an output after a step"
        return self._output


def main() -> None:
    """Serve over the connection that the arguments name, until the other end closes it or is gone."""
    connection, rank, size = map(int, sys.argv[1:4])
    wire, messages = Wire(socket.socket(fileno=connection)), SimpleQueue[Message]()
    server = RankServer(wire, Group(rank, size, Path(sys.argv[4])))
    Thread(target=_receive, args=(wire, messages), daemon=True).start()
    while True:
        wire.send(*server.answer(*messages.get()))


def _receive(wire: Wire, messages: SimpleQueue[Message]) -> None:
    """In a thread of its own: who waits for another GPU shall end too, when the model does."""
    while True:
        try:
            messages.put(wire.receive())
        except (EOFError, OSError):
            os._exit(0)
