"""Steps that were launched once are launched again as CUDA graphs: one call, however many kernels they have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
import torch

from bitnet_inference.backends.cuda_device import CAPTURING, Gpu, shown
from bitnet_inference.backends.cuda_inputs import Inputs, Shape
from bitnet_inference.model.contract import Batch

MAX_SHAPES = 128  # that are kept; the one that was used longest ago gives way
Result = TypeVar("Result")


class Graphs(Generic[Result]):
    """The steps of a model, one for each shape that occurs.

    The first batch of a shape is launched kernel by kernel, which compiles them; for the second the launches are
    captured, and where that fails the shape goes on as it began. Graphs take their scratch memory from one pool, for no
    two run at a time.
    """

    def __init__(self, gpu: Gpu, launch: Callable[[Inputs], Result], captures: bool) -> None:
        """`launch` queues the work of a step whose inputs are on the device; what it returns stays where it is.

        Without `captures`, every step is launched kernel by kernel.
        """
        self._gpu, self._launch = gpu, launch
        self._pool = torch.cuda.graph_pool_handle() if gpu.is_real and captures else None
        self._steps: dict[Shape, GraphStep[Result]] = {}

    def step(self, shape: Shape) -> GraphStep[Result]:
        """The step of a shape."""
        step = self._steps.pop(shape, None)
        self._steps[shape] = step or GraphStep(Inputs(shape, self._gpu), self._launch, self._pool)  # now the last
        if len(self._steps) > MAX_SHAPES:
            self._gpu.wait()
            del self._steps[next(iter(self._steps))]
        return self._steps[shape]

    def prepare(self, shapes: Iterable[Shape]) -> None:
        """Compile and capture these, with batches of nothing: the cache stays as it is."""
        for shape in shapes:
            step = self.step(shape)
            step.inputs.send(NOTHING)
            step.run()
            step.run()

    def clear(self) -> None:
        """Forget all: what they read or write moves elsewhere."""
        self._gpu.wait()
        self._steps.clear()
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()  # PyTorch refuses one that it is about to free


class GraphStep(Generic[Result]):
    """The step of one shape, and its inputs, which are sent before it runs."""

    def __init__(self, inputs: Inputs, launch: Callable[[Inputs], Result], pool: object) -> None:
        """`pool`: where a graph's scratch memory comes from; None where there are no graphs."""
        self.inputs, self._launch, self._pool = inputs, launch, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None
        self._was_run = False

    def run(self) -> Result:
        """Queue it; what `launch` returned."""
        if self._graph is None and self._was_run and self._pool is not None:
            self._capture()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._result, self._was_run = self._launch(self.inputs), True
        return self._result  # type: ignore[return-value]  # there is one since the first run

    def _capture(self) -> None:
        # Only what this thread does counts: other models may go on in theirs.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        capture = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        try:
            with CAPTURING, capture:
                self._result = self._launch(self.inputs)
        except RuntimeError as error:  # what is wrong beside, the launches that follow will tell
            self._pool = None
            what = "no CUDA graph of %s: its steps are launched kernel by kernel, and take longer: %s"
            logging.getLogger(__name__).warning(what, self.inputs.shape, shown(error))
        else:
            self._graph = graph


def _nothing() -> Batch:
    empty = np.zeros(0, np.int32)
    return Batch(empty, empty, empty, np.zeros(1, np.int32), np.zeros((0, 0), np.int32))


NOTHING = _nothing()
