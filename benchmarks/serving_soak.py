"""Everything that clients do, for long: good requests, bad ones, clients that leave. Nothing may be lost or left."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from engine_streams import Numbers, Rows
from serving_client import Answer, ask, post
from serving_load import Wrong
from serving_process import Serving
from serving_traffic import CHOICE, TEXT, Question, faults, stories, talk, texts

from bitnet_inference.llm import LLM

CACHE_TOKENS = 1024  # one context: requests wait for each other, some are preempted, and no block can be missing
POOL = 24  # questions of a kind
CALM_S = 10.0  # so long, at most, until those that left are let go
WARM = 0.25  # of the time, after which memory shall not grow any more
CALLERS = {name: f"key-of-{name}" for name in ("anna", "bert", "carla")}
MALFORMED = (b'{"prompt": "Once', b"[1, 2]", b'{"prompt": "Once", "max_tokens": "many"}', b"\xff\xfe{}", b"")
SHARES = {"right": 0.8, "left": 0.1, "malformed": 0.05, "oversized": 0.05}


@dataclass(frozen=True)
class Known:
    """A question, and the library's answer to it."""

    question: Question
    truth: Sequence[str]


@dataclass
class Tally:
    """What came of the requests: how many of each kind, what was wrong, what is under way."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)


def known(model: str, threads: int, num_tokens: int) -> tuple[list[Known], Known]:
    """Questions of all kinds; and one that needs all of the cache."""
    asked = [
        *stories(POOL, num_tokens),
        *stories(POOL, num_tokens, stream=False, first_seed=POOL),
        *(talk(seed, num_tokens, stream=True) for seed in range(POOL)),
        *(talk(seed, num_tokens, n=3, stream=seed % 2 == 0) for seed in range(POOL)),
        *(talk(seed, num_tokens, response_format=CHOICE, stream=seed % 2 == 0) for seed in range(POOL)),
    ]
    with LLM.load(model, threads=threads, max_cache_tokens=CACHE_TOKENS) as llm:
        prompt = stories(1, 1)[0].body["prompt"]
        room = llm.max_context - len(llm.tokenizer.encode(prompt))
        *pool, whole = [Known(each, each.truth(llm)) for each in (*asked, *stories(1, room))]
    return pool, whole


class Traffic:
    """Sends requests of all kinds, and judges the answers."""

    def __init__(self, port: int, pool: Sequence[Known], num_too_many: int) -> None:
        """`num_too_many` tokens are more than the context holds."""
        self.tally = Tally()
        self._port, self._pool, self._num_too_many = port, pool, num_too_many
        self._random, self._numbers = np.random.default_rng(0), count()

    async def go_on(self, rate: float, seconds: float) -> None:
        """So many requests a second on average, whatever becomes of those before; until all have been answered."""
        due, end = time.perf_counter(), time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            while due < end:
                due += self._random.exponential(1 / rate)
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self._send())

    async def _send(self) -> None:
        kind = str(self._random.choice(list(SHARES), p=list(SHARES.values())))
        self.tally.kinds[kind] += 1
        tell: Callable[[], Awaitable[str]] = getattr(self, f"_{kind}")
        if found := await tell():
            self.tally.wrong.append(f"{kind}: {found}")

    def _headers(self) -> Mapping[str, str]:
        request_id, caller = f"soak-{next(self._numbers)}", str(self._random.choice(list(CALLERS)))
        self.tally.sent.add(request_id)
        return {"X-Request-Id": request_id, "Authorization": f"Bearer {CALLERS[caller]}"}

    def _any(self) -> Known:
        return self._pool[int(self._random.integers(len(self._pool)))]

    async def one(self, known: Known) -> None:
        """Send this one."""
        self.tally.kinds["right"] += 1
        self.tally.wrong += self._faults(await self._ask(known), known)

    async def _ask(self, known: Known, leave_after: int | None = None) -> Answer:
        return await ask(self._port, known.question.request(self._headers()), leave_after=leave_after)

    def _faults(self, answer: Answer, known: Known) -> list[str]:
        if answer.status == 429 and "retry-after" in answer.headers:
            self.tally.kinds["busy"] += 1  # as when the generator was held up, and sends all that is due
            return []
        return faults(answer, known.truth)

    async def _right(self) -> str:
        one = self._any()
        return "; ".join(self._faults(await self._ask(one), one))

    async def _left(self) -> str:
        """The client leaves at once, or after some events, whose text is the beginning of the right one."""
        one = self._any()
        after = int(self._random.choice([0, 1, 5]))
        answer = await self._ask(one, after)
        if answer.error != "left":
            return "; ".join(self._faults(answer, one))  # it came whole before
        said = texts(answer)
        is_right = all(whole.startswith(part) for part, whole in zip(said, one.truth, strict=False))
        return "" if is_right else f"{said!r} does not begin {one.truth!r}"

    async def _malformed(self) -> str:
        body = MALFORMED[int(self._random.integers(len(MALFORMED)))]
        return _refused(await ask(self._port, post(TEXT, body, self._headers())))

    async def _oversized(self) -> str:
        body = {"prompt": [5] * self._num_too_many, "max_tokens": 1}
        answer = await ask(self._port, post(TEXT, body, self._headers()))
        return _refused(answer) or ("" if answer.json["error"]["code"] == "context_length_exceeded" else "another code")


def _refused(answer: Answer) -> str:
    """What is wrong with an answer that shall refuse in OpenAI's shape; "" for nothing."""
    if answer.error or answer.status != 400:
        return answer.error or f"status {answer.status}, not 400: {answer.body[:200]!r}"
    return "" if answer.json["error"]["message"] else "an error without a message"


def soak(model: str, threads: int, minutes: float = 20, rate: float = 25, num_tokens: int = 24) -> Rows:
    """Mixed traffic, `rate` requests a second. Raises Wrong for answers that are, and for what is left at the end.

    "busy" were told to come again later, as they may be: 429 with Retry-After.
    "growth %": the server's memory at the end, median of the last tenth, by that after the first quarter of the time.
    """
    pool, whole = known(model, threads, num_tokens)
    with TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        keys.write_text("".join(f"{name} {key}\n" for name, key in CALLERS.items()))
        options = ("--max-cache-tokens", str(CACHE_TOKENS), "--api-key-file", str(keys))
        with Serving(model, threads, *options) as server:
            traffic = Traffic(server.port, pool, CACHE_TOKENS + 1)
            sizes = asyncio.run(_watched(server, traffic, rate, 60 * minutes))
            asyncio.run(traffic.one(whole))
            left = _left(server)
            lines = list(_lines(server.log, traffic.tally.sent))
    return {"soak": _judged(traffic.tally, lines, left, sizes)}


async def _watched(server: Serving, traffic: Traffic, rate: float, seconds: float) -> list[int]:
    """The server's memory, about each second, while the traffic goes on."""
    sizes, going = [], asyncio.create_task(traffic.go_on(rate, seconds))
    while not going.done():
        sizes.append(server.resident_bytes())
        await asyncio.wait([going], timeout=min(1.0, seconds / 20))
    going.result()
    return sizes


def _left(server: Serving) -> dict[str, float]:
    """What is still in use, some seconds after the last answer."""
    key, end = next(iter(CALLERS.values())), time.monotonic() + CALM_S
    while (left := server.in_use(key)) and any(left.values()) and time.monotonic() < end:
        time.sleep(0.05)
    return {name: value for name, value in left.items() if value}


def _lines(log: Path, sent: set[str]) -> Iterator[str]:
    """What is wrong with the server's lines, of which each request shall have one."""
    ends = Counter(json.loads(line)["request_id"] for line in log.read_text().splitlines())
    missing, twice = sent - set(ends), [name for name in sent if ends[name] > 1]
    if missing or twice:
        yield f"{len(missing)} requests have no line, {len(twice)} several: {sorted(missing)[:5]}"


def _judged(tally: Tally, lines: Sequence[str], left: Mapping[str, float], sizes: Sequence[int]) -> Numbers:
    wrong = [*tally.wrong, *lines, *([f"left behind: {left}"] if left else [])]
    if wrong:
        raise Wrong(f"{len(wrong)} wrong of {len(tally.sent)}: {wrong[0]}")
    warm = sizes[int(WARM * len(sizes)) :]
    tenth = max(1, len(warm) // 10)
    begin, end = statistics.median(warm[:tenth]), statistics.median(warm[-tenth:])
    return {
        "requests": sum(tally.kinds[kind] for kind in SHARES),
        **{kind: tally.kinds[kind] for kind in (*SHARES, "busy")},
        "wrong": 0,
        "MB": end / 1e6,
        "growth %": 100 * (end / begin - 1),
    }
