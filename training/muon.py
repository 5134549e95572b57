"""Muon: momentum whose update is made orthogonal by a Newton-Schulz iteration (Jordan et al., 2024).

The update is scaled by 0.2 * sqrt(longer side), which gives its elements the size of an AdamW update (Liu et al.,
2025), so that both optimizers share a learning rate.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrices to [..., rows, columns], roughly, by the quintic iteration in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay that the caller may end with "decay_first_half"."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "decay_first_half": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix; those of one shape go through the iteration together, which is faster."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for param in group["params"]:
                shapes.setdefault(param.shape, []).append(param)
            for params in shapes.values():
                self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, float]) -> None:
        directions = []
        for param in params:
            buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
            buffer.lerp_(param.grad, 1 - group["momentum"])
            directions.append(param.grad.lerp(buffer, group["momentum"]))
        updates = orthogonalize(torch.stack(directions)).float()
        for param, update in zip(params, updates, strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(update, alpha=-group["lr"] * 0.2 * max(param.shape) ** 0.5)
