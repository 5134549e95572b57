"""Several streams of one request, read side by side."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet_inference.mailbox import MANY_LETTERS
from bitnet_inference.server.schema import StreamOptions
from bitnet_inference.stream import Generation, Piece, Stream

_FINISH = {"stop": "stop", "length": "length", "timeout": "length", "filtered": "content_filter"}


@dataclass(frozen=True)
class Part:
    """A piece of choice `index`, or its end."""

    index: int
    piece: Piece | None


async def parts(streams: Sequence[Stream], num_letters: int = 1) -> AsyncIterator[Part]:
    """The pieces of all streams as they come, as Stream.in_bulk, and the end of each. Leaving early cancels them."""
    if len(streams) == 1:
        async for piece in streams[0].in_bulk(num_letters):
            yield Part(0, piece)
        yield Part(0, None)
        return
    arrived: asyncio.Queue[Part | BaseException] = asyncio.Queue(maxsize=2 * len(streams))
    readers = [asyncio.create_task(_read(index, stream, num_letters, arrived)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            part = await arrived.get()
            if isinstance(part, BaseException):
                raise part
            num_open -= part.piece is None
            yield part
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(index: int, stream: Stream, num_letters: int, arrived: asyncio.Queue[Part | BaseException]) -> None:
    try:
        async for piece in stream.in_bulk(num_letters):
            await arrived.put(Part(index, piece))
        await arrived.put(Part(index, None))
    except Exception as error:
        await arrived.put(error)


async def finished(streams: Sequence[Stream]) -> None:
    """Wait until all have ended. Raises the error of one that fails; the others are cancelled."""
    async for _ in parts(streams, MANY_LETTERS):
        pass


def output_of(stream: Stream) -> Generation:
    """What a stream that has been read to its end has given."""
    assert stream.output is not None, "a generation without an output has an error"
    return stream.output


def finish_reason(output: Generation) -> str:
    """In OpenAI's words."""
    return _FINISH.get(output.finish_reason, "stop")


class RunningCosts:
    """What stands in a stream's chunks under "usage", besides its own event at the end, if that is asked for."""

    def __init__(self, streams: Sequence[Stream], options: StreamOptions | None) -> None:
        self._streams, self._num_written = streams, [0] * len(streams)
        self.are_wanted = options is not None and options.include_usage
        self.are_shown = options is not None and options.continuous_usage_stats

    def note(self, part: Part) -> None:
        """Count the tokens of a piece; at the end the one that ended the text, too."""
        if part.piece:
            self._num_written[part.index] += len(part.piece.token_ids)
        else:
            self._num_written[part.index] = output_of(self._streams[part.index]).usage.num_output_tokens

    def field(self, index: int) -> dict[str, Any]:
        """For a chunk of this choice."""
        if not self.are_shown:
            return {"usage": None} if self.are_wanted else {}
        prompt, written = len(self._streams[index].request.prompt), self._num_written[index]
        return {"usage": _counts(prompt, written)}


def usage(found: Sequence[Generation]) -> dict[str, Any]:
    """What a request has cost, of all its choices, which share their prompt."""
    first, completion = found[0].usage, sum(each.usage.num_output_tokens for each in found)
    details = {"cached_tokens": first.num_cached_tokens}
    if first.num_dropped_tokens:
        details["dropped_tokens"] = first.num_dropped_tokens
    return _counts(first.num_prompt_tokens, completion) | {"prompt_tokens_details": details}


def usage_of_all(groups: Sequence[Sequence[Generation]]) -> dict[str, Any]:
    """What the choices of several prompts have cost together."""
    each = [usage(group) for group in groups]
    details = sum((Counter(one["prompt_tokens_details"]) for one in each), Counter())
    prompt, completion = (sum(one[name] for one in each) for name in ("prompt_tokens", "completion_tokens"))
    return _counts(prompt, completion) | {"prompt_tokens_details": {"cached_tokens": 0} | details}


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
