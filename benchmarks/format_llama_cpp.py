"""llama.cpp on a file beside this engine: logits and tokens."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from llama_cpp_peer import LlamaCpp

from bitnet_inference.llm import LLM

TEXTS = (
    "Hello, world! don't WE'LL I'm 'Sam' snake_case CamelCase http://a.b/c?d=e",
    "1 12 123 1234 12345678 3.14 1,000 \u0663\u0664 \u00bd 0x1F",
    "  two   spaces  \n\n a\r\n\tb \n  \n", " ", "\n", "   ", "a", " a", "\t\t\tx", "x" * 100, " " * 70 + "y",
    "x=y+1; f(a,b) -> {c: [d]} // $e #f @g `h` ~i ^j |k <l> ...!!! --- ___ \u2026 \u2014 \u201cq\u201d",
    "na\u00efve caf\u00e9 e\u0301 \u00df \u0130 \u0414\u0430 \u0645\u0631\u062d \u05e9\u05dc \u0939\u093f\u0928\u094d",
    "\u72d0\u72f8\u3068\ud55c\uad6d\uc5b4 \U0001f98a\U0001f468\u200d\U0001f469 \u2603\ufe0f",
    "a\u00a0b\u2003c\u3000d\u200be \x01\x7f\ufeff\ufffd \u2581 <0x41>",
    "it'\u017f THEY'VE you'd We\u2019re",
    "a<|eot_id|><|end_of_text|> <|no_token|> <|eot_id", "The miller and the fish. The mill-wheel turned.",
)  # fmt: skip


class Peer:
    """Compares files in a process of its own: torch and llama.cpp bring two libraries for threads to the same one."""

    def __enter__(self) -> Peer:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown()

    def _start(self) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"))

    def compare(self, path: Path) -> str:
        """The relative RMS of llama.cpp's logits from ours on a text, and "=" where all texts have the same tokens."""
        try:
            return self._process.submit(_compare, path).result()
        except OSError:
            return "does not load"
        except BrokenProcessPool:
            self._start()
            return "crashes"


def _compare(path: Path) -> str:
    peer = LlamaCpp(path, threads=1, max_context=256, max_batch=1, num_batch_steps=1, reorders=False)
    with LLM.load(path, cache_dtype="float32", threads=1, device="cpu") as llm:
        same = [peer.encode(text, special) == llm.tokenizer.encode(text, parse_special=special)
                for text in TEXTS for special in (False, True)]  # fmt: skip
        ids = llm.tokenizer.encode(TEXTS[-1])
        ours, theirs = llm.logits(ids), peer.logits_of(ids)
    peer.close()
    error = np.sqrt(np.square(ours - theirs).mean() / np.square(ours).mean())
    return f"{error:.1e} {'=' if all(same) else f'{same.count(False)} of {len(same)} texts'}"
