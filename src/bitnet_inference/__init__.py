"""Inference for language models whose weights are -1, 0 and +1.

    from bitnet_inference import LLM, SamplingParams

    with LLM.load("default") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=64)).text)

The names below are the public ones; each is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitnet_inference.batch_files import BatchResult
    from bitnet_inference.choices import Chosen, Likelihood, choose, log_likelihoods
    from bitnet_inference.completions import ChatCompletion, TextCompletion, chat_completion, text_completion
    from bitnet_inference.config import EngineConfig, HubConfig
    from bitnet_inference.conversion.convert import Conversion, convert
    from bitnet_inference.engine.beam import BeamParams
    from bitnet_inference.engine.logprobs import TokenLogprobs
    from bitnet_inference.engine.params import SamplingParams, sampling_noise
    from bitnet_inference.engine.request import Usage
    from bitnet_inference.engine.terms import Terms
    from bitnet_inference.errors import (
        BackendError,
        BitNetError,
        Cancelled,
        DownloadError,
        EngineError,
        Filtered,
        FormatError,
        InvalidParams,
        KernelError,
        ModelError,
        NotFound,
        OutOfMemory,
        PromptTooLong,
        QueueFull,
        RequestError,
        Stopped,
        Unavailable,
        Unsupported,
        VersionError,
    )
    from bitnet_inference.evaluate import Perplexity, perplexity
    from bitnet_inference.grammar.grammar import Grammar
    from bitnet_inference.hub.pull import Pulled, pull
    from bitnet_inference.installed import Installed, installed_models
    from bitnet_inference.llm import LLM
    from bitnet_inference.models import Models, ModelState
    from bitnet_inference.offline import generate_file
    from bitnet_inference.stream import Generation, Piece, Stream
    from bitnet_inference.telemetry import Counts
    from bitnet_inference.text.filter import Filter, OutputFilter, Verdict
    from bitnet_inference.text.word_filter import WordFilter
    from bitnet_inference.trace import Trace

    __version__: str

__all__ = [
    "LLM",
    "BackendError",
    "BatchResult",
    "BeamParams",
    "BitNetError",
    "Cancelled",
    "ChatCompletion",
    "Chosen",
    "Conversion",
    "Counts",
    "DownloadError",
    "EngineConfig",
    "EngineError",
    "Filter",
    "Filtered",
    "FormatError",
    "Generation",
    "Grammar",
    "HubConfig",
    "Installed",
    "InvalidParams",
    "KernelError",
    "Likelihood",
    "ModelError",
    "ModelState",
    "Models",
    "NotFound",
    "OutOfMemory",
    "OutputFilter",
    "Perplexity",
    "Piece",
    "PromptTooLong",
    "Pulled",
    "QueueFull",
    "RequestError",
    "SamplingParams",
    "Stopped",
    "Stream",
    "Terms",
    "TextCompletion",
    "TokenLogprobs",
    "Trace",
    "Unavailable",
    "Unsupported",
    "Usage",
    "Verdict",
    "VersionError",
    "WordFilter",
    "__version__",
    "chat_completion",
    "choose",
    "convert",
    "generate_file",
    "installed_models",
    "log_likelihoods",
    "perplexity",
    "pull",
    "sampling_noise",
    "text_completion",
]

_HOMES = {
    "BeamParams": "engine.beam",
    "sampling_noise": "engine.params",
    "LLM": "llm",
    "EngineConfig": "config",
    "BatchResult": "batch_files",
    "ChatCompletion": "completions",
    "Chosen": "choices",
    "Conversion": "conversion.convert",
    "Counts": "telemetry",
    "Filter": "text.filter",
    "Generation": "stream",
    "Grammar": "grammar.grammar",
    "HubConfig": "config",
    "Installed": "installed",
    "Likelihood": "choices",
    "OutputFilter": "text.filter",
    "ModelState": "models",
    "Models": "models",
    "Perplexity": "evaluate",
    "Piece": "stream",
    "Pulled": "hub.pull",
    "SamplingParams": "engine.params",
    "Stream": "stream",
    "Terms": "engine.terms",
    "TextCompletion": "completions",
    "TokenLogprobs": "engine.logprobs",
    "Trace": "trace",
    "Usage": "engine.request",
    "Verdict": "text.filter",
    "WordFilter": "text.word_filter",
    "chat_completion": "completions",
    "choose": "choices",
    "convert": "conversion.convert",
    "generate_file": "offline",
    "installed_models": "installed",
    "log_likelihoods": "choices",
    "perplexity": "evaluate",
    "pull": "hub.pull",
    "text_completion": "completions",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from bitnet_inference.config import installed_version

        return installed_version()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
