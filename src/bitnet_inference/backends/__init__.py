"""The table of backends."""

from bitnet_inference.backends.choose import load_model, resolved

__all__ = ["load_model", "resolved"]
