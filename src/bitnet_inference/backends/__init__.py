"""The table of backends."""

from bitnet_inference.backends.automatic import Choice
from bitnet_inference.backends.choose import decided, load_fallback, load_model, resolved

__all__ = ["Choice", "decided", "load_fallback", "load_model", "resolved"]
