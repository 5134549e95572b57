"""Tokens and their log-probabilities as OpenAI's two APIs show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.text.detokenize import Detokenizer
from bitnet_inference.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no -infinity; OpenAI's value


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], found: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """`content` of a chat choice's logprobs: a token's own bytes, and its text, U+FFFD for what is no UTF-8 alone."""
    entries = []
    for token_id, entry in zip(ids, found, strict=True):
        top = [_entry(tokenizer, each, logprob) for each, logprob in entry.top]
        entries.append(_entry(tokenizer, token_id, entry.logprob) | {"top_logprobs": top})
    return entries


def written(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a token, special ones too; none for an id that is no token."""
    piece = tokenizer.piece(token_id, skip_special_tokens=False)
    return piece.encode() if isinstance(piece, str) else piece or b""


def spelt(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a token; "bytes:\\xe2\\x82" for what is no UTF-8 alone, as in OpenAI's text completions.

    Of a model without a tokenizer the id, as in vLLM.
    """
    if not tokenizer.has_words:
        return f"token_id:{token_id}"
    token = written(tokenizer, token_id)
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class TextLogprobs:
    """The `logprobs` of one text completion, part by part: each token's offset is where its text begins in the whole.

    A token within a character begins where that character does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._offset = tokenizer, 0
        self._text = Detokenizer(tokenizer, opening=False)

    def of_prompt(self, ids: Sequence[int], num_hidden: int, found: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Those of an echoed prompt, in front of all others; the text of its first `num_hidden` tokens is not shown."""
        shown, tokens = Detokenizer(self._tokenizer, skip_special_tokens=False, opening=True), self._spelt(ids)
        texts = [text if index >= num_hidden else "" for index, text in enumerate(map(shown.push, ids))]
        offsets = list(map(self._place, tokens, texts))
        self._offset += len(shown.finish())
        return self._shape(ids[: len(found)], tokens[: len(found)], found, offsets[: len(found)])

    def next(self, ids: Sequence[int], found: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Those of the next tokens of the answer."""
        tokens = self._spelt(ids)
        return self._shape(ids, tokens, found, list(map(self._place, tokens, map(self._text.push, ids))))

    def _spelt(self, ids: Sequence[int]) -> list[str]:
        return [spelt(self._tokenizer, each) for each in ids]

    def _place(self, own: str, text: str) -> int:
        """Where a token begins with which this text comes: behind the beginning of a character that was none."""
        begin = self._offset
        self._offset += len(text)
        return self._offset - len(own) if text.endswith(own) else begin

    def _shape(
        self, ids: Sequence[int], tokens: list[str], found: Sequence[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else max(entry.logprob, LEAST) for entry in found],
            "top_logprobs": [self._top(token_id, entry) for token_id, entry in zip(ids, found, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, chosen: int, entry: TokenLogprobs | None) -> dict[str, float] | None:
        """The best ones, and the chosen one, as OpenAI has it; of several that look alike, the likeliest."""
        if entry is None:
            return None
        best: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (chosen, entry.logprob)):
            best.setdefault(spelt(self._tokenizer, token_id), max(logprob, LEAST))
        return best


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = written(tokenizer, token_id)
    return {"token": token.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(token)}
