"""What each rank of a group of devices holds of a model: whole rows of every matrix, whole heads of attention.

Every product is split by the rows of its matrix, so that each number is computed by one rank from a whole row, in the
order of one device: nothing is summed over ranks but zeros, and any number of ranks gives the same bits. What a rank
lacks of a row, it gets from the others before the row is normed, quantised or multiplied (shard_plans.py).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from bitnet_inference.errors import InvalidParams
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.ternary import GROUP_ROWS

Rows = tuple[int, int]  # from, to


class Heads(NamedTuple):
    """The heads of attention that a rank computes, and the heads of keys and values that these read."""

    queries: Rows
    keys: Rows


def require_shards(config: ModelConfig, num_ranks: int) -> None:
    """Raises InvalidParams where there is not a head for every rank."""
    most = min(config.num_heads, config.hidden_size, config.intermediate_size, config.vocab_size)
    if num_ranks > most:
        raise InvalidParams(f"gpus is {num_ranks}, but a model of {config.num_heads} heads runs on {most} at most")


def heads(config: ModelConfig, num_ranks: int) -> tuple[Heads, ...]:
    """Of every rank: a run of key heads with their queries.

    Where there are more ranks than key heads, several ranks have the same one and share its queries.
    """
    share = config.num_heads // config.num_kv_heads
    if num_ranks <= config.num_kv_heads:
        runs = even(config.num_kv_heads, num_ranks)
        return tuple(Heads((begin * share, end * share), (begin, end)) for begin, end in runs)
    owners = even(num_ranks, config.num_kv_heads)  # the ranks of each key head
    return tuple(
        Heads((head * share + begin, head * share + end), (head, head + 1))
        for head, (first, last) in enumerate(owners)
        for begin, end in even(share, last - first)
    )


def rows(config: ModelConfig, name: str, num_ranks: int) -> tuple[Rows, ...]:
    """The rows of the matrix under a canonical name that each rank holds; those of k and v may be held by several.

    Of a bias, the numbers for these rows.
    """
    kind, width = name.removesuffix(".bias").rpartition(".")[2], config.head_dim
    if kind in ("q", "k", "v"):
        parts = (rank.queries if kind == "q" else rank.keys for rank in heads(config, num_ranks))
        return tuple((begin * width, end * width) for begin, end in parts)
    total = {"gate": config.intermediate_size, "up": config.intermediate_size, "embed": config.vocab_size,
             "head": config.vocab_size}.get(kind, config.hidden_size)  # fmt: skip
    if total < num_ranks * GROUP_ROWS:
        return even(total, num_ranks)
    groups = even(-(-total // GROUP_ROWS), num_ranks)  # of the packed layouts: whole ones are cut out as they are
    return tuple((begin * GROUP_ROWS, min(end * GROUP_ROWS, total)) for begin, end in groups)


def even(total: int, parts: int) -> tuple[Rows, ...]:
    """0 to total in so many runs, the first of which are longer by one where it does not divide."""
    lengths = (total // parts + (part < total % parts) for part in range(parts))
    return tuple(pairwise(accumulate(lengths, initial=0)))


def rank_config(config: ModelConfig, rank: int, num_ranks: int) -> ModelConfig:
    """The model as a rank sees it, with its heads and its part of the vocabulary; all else is the whole model's."""
    queries, keys = heads(config, num_ranks)[rank]
    vocabulary = rows(config, "head", num_ranks)[rank]
    return replace(config, num_heads=_count(queries), num_kv_heads=_count(keys), vocab_size=_count(vocabulary))


def _count(part: Rows) -> int:
    return part[1] - part[0]
