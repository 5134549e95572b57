"""The two files of a batch: what is asked, and what is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self

from bitnet_inference.answer_file import AnswerFile, AnswerForm
from bitnet_inference.config import check_flag
from bitnet_inference.errors import InvalidParams
from bitnet_inference.line_file import Line, LineFile


@dataclass(frozen=True)
class BatchResult:
    """How a file of prompts was answered.

    Of `num_prompts`, `num_before` had been done by earlier runs. `num_errors` lines of the output say that a prompt
    failed. Tokens and `wall_s`, seconds, are of this run.
    """

    num_prompts: int
    num_before: int
    num_errors: int
    num_prompt_tokens: int
    num_output_tokens: int
    wall_s: float


class BatchFiles(Generic[Line]):
    """They are checked before there is a model. Nobody else writes the output until they are closed."""

    def __init__(
        self,
        input_path: str | Path,
        output_path: str | Path,
        read: Callable[[Path, int, bytes], Line],
        form: AnswerForm,
        check: Callable[[Path, Iterator[Line]], None] = lambda path, lines: None,
        *,
        retry_errors: bool = True,
    ) -> None:
        """`read` and `check` as for LineFile. Raises what generate_file raises for files."""
        check_flag("retry_errors", retry_errors)
        source, target = Path(input_path), Path(output_path)
        if source.exists() and target.exists() and source.samefile(target):
            raise InvalidParams(f"{target} is the input: give another output file")
        self._prompts = LineFile(source, read, check)
        self._answers = AnswerFile(target, self._prompts.fingerprints, form, retry_errors=retry_errors)

    @property
    def num_prompts(self) -> int:
        """How many prompts the input has."""
        return self._prompts.num_prompts

    @property
    def num_done(self) -> int:
        """How many of them have a line of the output that counts."""
        return self._answers.num_done

    def close(self) -> None:
        """Let others write the output."""
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
