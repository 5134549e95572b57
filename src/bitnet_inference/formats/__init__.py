"""Model files of every kind, opened as one kind of checkpoint."""

from bitnet_inference.formats.kinds import open_checkpoint

__all__ = ["open_checkpoint"]
