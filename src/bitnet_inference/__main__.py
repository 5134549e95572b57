"""The command `bitnet`, and `python -m bitnet_inference`."""

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """The entry point. Ctrl-C ends it without a traceback from its first moments on, in which it is imported."""
    try:
        from bitnet_inference.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
