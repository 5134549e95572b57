"""Trains the story-teller with quantisation in the forward pass; writes a checkpoint every few minutes.

Muon moves the ternary projections, AdamW the embedding and the norms. The learning rate warms up and falls in two
stages: slowly to the middle, where weight decay ends too, and then from half its peak to nearly zero. The run is
planned in seconds, because a small machine's speed varies: progress is the share of the time or of the tokens used,
whichever is further.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
import torch.nn.functional as functional
from data import IGNORED, Corpus
from model import Config, StoryTeller
from muon import Muon
from tokenizers import Tokenizer
from torch import Tensor

HELD_OUT_SEED = 999_983


def rate(progress: float, warm_up: float = 0.02) -> float:
    """The factor on the learning rate at a share of the run: warm-up, then 1 to 0.6, a step to 0.5, then down to 0."""
    if progress < warm_up:
        return progress / warm_up
    if progress < 0.5:
        return 1.0 - 0.4 * (progress - warm_up) / (0.5 - warm_up)
    return max(0.02, 0.5 * (1.0 - progress) / 0.5)


def optimizers(model: StoryTeller, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices in the layers, AdamW for everything else."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": [model.embed_tokens.weight], "lr": lr}, {"params": norms, "lr": lr}]
    built = [Muon(matrices, lr=lr), torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    for optimizer in built:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return built


def loss_of(model: StoryTeller, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the targets, a scalar."""
    return functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def held_out_loss(model: StoryTeller, tokenizer: Tokenizer, rows: int = 24, length: int = 512) -> float:
    """Mean loss on documents of another seed, in nats a token."""
    ids, labels = next(Corpus(tokenizer, HELD_OUT_SEED).batches(rows, length))
    losses = [loss_of(model, ids[i : i + 8], labels[i : i + 8]) for i in range(0, rows, 8)]
    return torch.stack(losses).mean().item()


def save(model: StoryTeller, path: Path, progress: float, tokens: int) -> None:
    """Write the master weights; a temporary file first, so that a cut-off leaves the last checkpoint whole."""
    partial = path.with_suffix(".partial")
    state = {"config": model.config.as_dict(), "weights": model.state_dict(), "progress": progress, "tokens": tokens}
    torch.save(state, partial)
    partial.replace(path)


def average(model: StoryTeller, numbers: list[float]) -> list[float]:
    """Average the gradients, and a few numbers, over all processes; returns the numbers."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([*(grad.flatten() for grad in grads), torch.tensor(numbers)])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads] + [len(numbers)])[:-1], strict=True):
        grad.copy_(part.view_as(grad))
    return flat[-len(numbers) :].tolist()


class Run:
    """One process's part of a training run: a thread and a stream of documents of its own, the same weights."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank = options, rank
        self.tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
        torch.manual_seed(options.seed)
        config = Config(vocab_size=self.tokenizer.get_vocab_size())
        self.model = StoryTeller(config, torch.bfloat16)
        if options.start:
            self.model.load_state_dict(torch.load(options.start, weights_only=True)["weights"])
        self.loss = torch.compile(loss_of, dynamic=False)
        self.optimizers = optimizers(self.model, options.lr)
        corpus = Corpus(self.tokenizer, options.seed * 1000 + rank)
        self.short = corpus.batches(16 // options.processes, 320)
        self.long = corpus.batches(8 // options.processes, 768)
        self.tokens, self.started, self.progress = 0, time.monotonic(), 0.0

    def measure(self) -> float:
        """The share of the run that is over, 0 to 1, by this process's clock."""
        seconds = (time.monotonic() - self.started) / self.options.seconds
        return max(seconds, self.tokens / self.options.max_tokens)

    def set_rates(self) -> None:
        """Learning rates and weight decay for the progress made."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate(self.progress)
                if group.get("decay_first_half"):
                    group["weight_decay"] = group["decay_first_half"] if self.progress < 0.5 else 0.0

    def step(self) -> float:
        """One update: first rows of about one document, so that names come from the right story; then long rows."""
        ids, labels = next(self.long if self.progress > 0.6 else self.short)
        self.set_rates()
        loss = self.loss(self.model, ids, labels)
        loss.backward()
        # All processes go on with the mean of their clocks, so that they change rates and rows together.
        mean, self.progress = average(self.model, [loss.item(), self.measure()])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.tokens += ids.numel() * self.options.processes
        return mean

    def train(self) -> None:
        """Step until the time or the tokens are used up; log and save on the way."""
        saved, number, mean = time.monotonic(), 0, 0.0
        while self.progress < 1.0:
            loss = self.step()
            mean = loss if number == 0 else 0.95 * mean + 0.05 * loss
            number += 1
            if self.rank == 0 and number % 20 == 0:
                speed = self.tokens / (time.monotonic() - self.started)
                print(
                    f"{number:5d} {self.progress:6.1%} loss {mean:.4f} {self.tokens / 1e6:.2f}M {speed:.0f} tokens/s",
                    flush=True,
                )
            if self.rank == 0 and time.monotonic() - saved > 120:
                saved = time.monotonic()
                save(self.model, self.options.checkpoint, self.progress, self.tokens)
        if self.rank == 0:
            save(self.model, self.options.checkpoint, 1.0, self.tokens)
            print(f"held-out loss {held_out_loss(self.model, self.tokenizer):.4f}", flush=True)


def work(rank: int, options: argparse.Namespace, meeting_place: str) -> None:
    """One process: one thread, so that a busy core delays a whole step and not each operator."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{meeting_place}", rank=rank, world_size=options.processes)
    Run(options, rank).train()
    distributed.destroy_process_group()


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds tokenizer.json")
    parser.add_argument("checkpoint", type=Path, help="where the master weights go")
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--seconds", type=float, default=2400)
    parser.add_argument("--max-tokens", type=float, default=30e6)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2, help="1, 2, 4 or 8: they share each batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (options, f"{folder}/meeting"), nprocs=options.processes)


if __name__ == "__main__":
    main()
