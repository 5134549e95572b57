"""Writes golden.json beside a model: the sum of its logits, which `bitnet doctor` compares on every machine.

Run it after export.py, with bitnet_inference installed: `golden_logits.py FOLDER`.
"""

import argparse
from pathlib import Path

from bitnet_inference.doctor import write_golden


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the model")
    write_golden(parser.parse_args().folder)


if __name__ == "__main__":
    main()
