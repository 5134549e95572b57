"""What the ranks of a model on several GPUs do together: NCCL between GPUs, Gloo where kernels are interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.distributed as distributed
import triton
from torch import Tensor

from bitnet_inference.errors import Unavailable

_STORE = "store"
_PATIENCE = timedelta(minutes=15)  # longer than who asks for a step has


def require_gpus(count: int) -> None:
    """Raises Unavailable where there are fewer; that there is none at all is told when one is opened."""
    found = torch.cuda.device_count()
    if 0 < found < count and not triton.knobs.runtime.interpret:
        raise Unavailable(
            "cuda", f"gpus is {count}, but this process sees {found}", "see nvidia-smi and CUDA_VISIBLE_DEVICES"
        )


class Group:
    """This process as one of the ranks of a group; a process is in one group, for as long as it lives."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        """The ranks find each other in `folder`."""
        self.rank, self.size, self._folder = rank, size, folder

    def join(self, device: torch.device) -> None:
        """Wait for the others; raises RuntimeError where that fails."""
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=distributed.FileStore(str(self._folder / _STORE), self.size),  # no port that others could reach
            rank=self.rank,
            world_size=self.size,
            timeout=_PATIENCE,
            device_id=device if on_gpu else None,
        )

    def gather(self, columns: Tensor, widths: Sequence[int], out: Tensor) -> None:
        """Whole rows [T, sum of widths] of the columns [T, widths[rank]] of all ranks; `out` is in one piece."""
        count, widest = len(columns), max(widths)
        sent = columns if columns.shape[1] == widest and columns.is_contiguous() else _padded(columns, widest)
        is_even = min(widths) == widest
        in_place = is_even and count == 1
        received = out.view(self.size, 1, widest) if in_place else sent.new_empty(self.size, count, widest)
        distributed.all_gather_into_tensor(received.view(self.size * count, widest), sent)
        if in_place:
            return
        if is_even:
            out.view(count, self.size, widest).copy_(received.transpose(0, 1))
            return
        for part, (begin, end) in zip(received, pairwise(accumulate(widths, initial=0)), strict=True):
            out[:, begin:end].copy_(part[:, : end - begin])

    def sum(self, rows: Tensor) -> None:
        """Add, in place, rows of float32 that are 0 on every rank but one; as integers, so that no bit is lost."""
        distributed.all_reduce(rows.view(torch.int32))


def _padded(columns: Tensor, width: int) -> Tensor:
    padded = columns.new_zeros(len(columns), width)
    padded[:, : columns.shape[1]].copy_(columns)
    return padded
