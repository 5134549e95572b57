"""The processes of several GPUs: asked together, and ended together whatever happens to one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from bitnet_inference.backends.cuda_ranks import Ranks
from bitnet_inference.errors import BackendError, FormatError, OutOfMemory, Stopped, Unavailable

# What a rank does with a message, as Python: `words` and `arrays` came, `rank` is its own, `wire.send` is how to reply.
PROGRAM = """
import os, socket
from bitnet_inference.backends.cuda_wire import Wire, told
from bitnet_inference.errors import FormatError, KernelError, OutOfMemory, Unavailable
connection, rank, size = map(int, sys.argv[1:4])
wire = Wire(socket.socket(fileno=connection))
while True:
    try:
        words, arrays = wire.receive()
    except EOFError:
        break
    {}
"""
PATIENT_S = 60.0


@contextmanager
def three(what: str, patience_s: float = PATIENT_S) -> Iterator[Ranks]:
    ranks = Ranks(3, patience_s, PROGRAM.format(what.strip().replace("\n", "\n    ")))
    try:
        yield ranks
    finally:
        ranks.close()


def are_gone(process_ids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{each}") for each in process_ids)


def test_all_answer_in_the_order_of_their_ranks() -> None:
    with three("wire.send({'rank': rank, 'size': size, **words}, [array * rank for array in arrays])") as ranks:
        large = np.arange(1 << 20, dtype=np.int32).reshape(1024, -1)  # more than the system holds between two processes
        replies = ranks.ask({"k": 5}, [large, np.empty((0, 3), np.float32)])
        assert [words for words, _ in replies] == [{"rank": rank, "size": 3, "k": 5} for rank in range(3)]
        for rank, (_, (first, second)) in enumerate(replies):
            assert np.array_equal(first, large * rank)
            assert (second.shape, second.dtype) == ((0, 3), np.float32)


def test_what_rank_0_says_on_the_way_is_told() -> None:
    with three("[wire.send({'progress': [done, 3]}) for done in range(3)]; wire.send({})") as ranks:
        told: list[list[int]] = []
        ranks.ask({}, on_progress=told.append)
        assert told == [[0, 3], [1, 3], [2, 3]]


def test_a_process_that_ends_ends_all_with_what_it_said() -> None:
    with three("sys.exit('no card') if rank == 1 else None") as ranks:
        process_ids = ranks.process_ids
        with pytest.raises(BackendError, match=r"the process of GPU 1 ended \(1\), saying 'no card': load the model"):
            ranks.ask({})
        assert are_gone(process_ids)
        with pytest.raises(BackendError, match="the process of GPU 1 ended"):
            ranks.ask({})


def test_a_process_that_is_killed_while_nobody_asks_is_found_by_the_next_question() -> None:
    with three("wire.send({})") as ranks:
        ranks.ask({})
        os.kill(ranks.process_ids[2], signal.SIGKILL)
        with pytest.raises(BackendError, match=r"the process of GPU 2 ended \(-9\): load the model again"):
            ranks.ask({})


def test_a_process_that_does_not_answer_is_waited_for_so_long_and_no_longer() -> None:
    with three("wire.send({}) if rank != 1 else None", patience_s=0.5) as ranks:
        process_ids = ranks.process_ids
        with pytest.raises(BackendError, match=r"the process of GPU \d does not answer for 0\.5 s"):
            ranks.ask({})
        assert are_gone(process_ids)


def test_what_all_refuse_is_raised_and_they_go_on() -> None:
    what = "wire.send(told(OutOfMemory('too many blocks'), 'x') if words['blocks'] > 4 else {})"
    with three(what) as ranks:
        with pytest.raises(OutOfMemory, match="too many blocks"):
            ranks.ask({"blocks": 5})
        assert len(ranks.ask({"blocks": 4})) == 3


def test_what_one_refuses_is_raised_and_the_others_which_wait_for_it_are_ended() -> None:
    with three("wire.send(told(FormatError('m.gguf', 'embed', 'is damaged'), 'x') if rank else {})") as ranks:
        with pytest.raises(FormatError, match=r"m\.gguf: embed: is damaged") as raised:
            ranks.ask({})
        assert (raised.value.where, raised.value.why) == ("embed", "is damaged")
        with pytest.raises(BackendError, match="is damaged"):
            ranks.ask({})


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        ("ValueError('two\\nlines')", BackendError, r"^rank 7 failed: ValueError: two lines$"),
        (
            "Unavailable('cuda', 'no card', 'buy one')",
            Unavailable,
            r"^backend 'cuda' is not available: no card: buy one$",
        ),
    ],
)
def test_a_defect_and_a_missing_card_are_told_in_a_line(error: str, kind: type[Exception], line: str) -> None:
    with three(f"wire.send(told({error}, 'rank 7'))") as ranks, pytest.raises(kind, match=line):
        ranks.ask({})


def test_closing_ends_the_processes_and_leaves_nothing() -> None:
    with three("wire.send({})") as ranks:
        process_ids, folder = ranks.process_ids, ranks._folder.name
        ranks.close()
        assert are_gone(process_ids) and not os.path.exists(folder)
        with pytest.raises(Stopped, match="the model is closed"):
            ranks.ask({})


def test_answers_that_nobody_took_are_not_those_of_the_next_question() -> None:
    def interrupt(done: list[int]) -> None:
        raise KeyboardInterrupt

    with three("wire.send({'progress': [1, 1]}); wire.send(words)") as ranks:
        with pytest.raises(KeyboardInterrupt):
            ranks.ask({}, on_progress=interrupt)
        with pytest.raises(BackendError, match="a step was interrupted: load the model again"):
            ranks.ask({})
