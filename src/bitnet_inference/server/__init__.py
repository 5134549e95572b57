"""The HTTP server: OpenAI's and Anthropic's APIs over models that are loaded when they are asked for."""

from bitnet_inference.server.app import make_app
from bitnet_inference.server.front import make_front
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.journal import Journal
from bitnet_inference.server.keys import read_keys
from bitnet_inference.server.options import Listening, ServerOptions
from bitnet_inference.server.run import bind, listen, make_server
from bitnet_inference.server.stats import Watch

__all__ = [
    "Journal",
    "Listening",
    "ServedModels",
    "ServerOptions",
    "Watch",
    "bind",
    "listen",
    "make_app",
    "make_front",
    "make_server",
    "read_keys",
]
