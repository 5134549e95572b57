"""Every format of every family, written and read by others too: `formats.py` prints how far logits are from theirs.

A row is a format, a column a family. A cell is the largest difference of a logit, by the root of the mean square of the
reference's logits; `=` where a greedy text goes on with the same tokens, `~` where the first other token was as good
but for rounding, `!` where it was not. All references compute in float32:

- Hugging Face folders: Transformers, from the same folder;
- Meta's .pth files: Transformers, from whose model torch.save wrote them;
- GGUF: Transformers' model with the weights that PyPI's `gguf` reads from the file, or that were packed by hand for
  types that it does not know (I2_S, Q1_0, Q2_0); with matrices of ternary types, activations are rounded to int8;
- what `bitnet convert` writes: the same, and for I2_S, ONNX and packed files Transformers from the folder that they
  were made of.

Ternary matrices are compared to the bit as well: a file that is read as others is "wrong codes". The second table is
llama.cpp on the same files: the relative RMS of its logits from ours, and whether its tokenizer gives the same tokens.

`--open PATH...` prints instead how long whole models take to open, in a process each, and the memory that this takes.

Needs the extra "peers".
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from format_opening import print_openings


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="only these, such as llama-bitlinear")
    parser.add_argument("--open", nargs="+", type=Path, metavar="PATH", help="whole models, to be timed")
    parser.add_argument("--threads", type=int, metavar="N", help="with --open")
    args = parser.parse_args()
    if args.open:
        print_openings(args.open, args.threads)
    else:
        sys.exit(_print_tables(tuple(args.families)))


def _print_tables(names: tuple[str, ...]) -> str | None:
    from format_cases import cases, llama_cpp_knows, run
    from format_llama_cpp import Peer
    from format_models import families

    ours: dict[str, dict[str, Any]] = {}
    theirs: dict[str, dict[str, Any]] = {}
    notes: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder, Peer() as peer:
        for family in families(Path(folder), names):
            room = Path(folder, f"{family.spec.name}-files")
            room.mkdir()
            for case in cases(family):
                cell, path = run(family, case, room)
                ours.setdefault(case.format, {})[family.spec.name] = cell
                if cell.why:
                    notes[f"{family.spec.name}, {case.format}: {cell.why}"] = None
                if path and path.suffix == ".gguf" and llama_cpp_knows(family) and "i2_s" not in path.name.lower():
                    theirs.setdefault(case.format, {})[family.spec.name] = peer.compare(path)
            print(family.spec.name, "done", file=sys.stderr, flush=True)
    _print(ours)
    _print(theirs)
    print(*notes, sep="\n")
    wrong = [cell for row in ours.values() for cell in row.values() if not cell.is_right]
    return f"{len(wrong)} are wrong" if wrong else None


def _print(rows: dict[str, dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    print("|", " | ".join(["format", *columns]), "|")
    print("|", " | ".join(["---"] * (len(columns) + 1)), "|")
    for name, row in rows.items():
        print("|", " | ".join([name, *(str(row.get(column, "")) for column in columns)]), "|")
    print()


if __name__ == "__main__":
    main()
