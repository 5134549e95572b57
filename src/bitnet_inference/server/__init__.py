"""The HTTP server: OpenAI's API over models that are loaded when they are asked for."""

from bitnet_inference.server.app import make_app
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.run import serve

__all__ = ["ServedModels", "make_app", "serve"]
