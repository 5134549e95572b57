import copy
import pickle
import re
import subprocess
import sys

import pytest

import bitnet_inference
from bitnet_inference import LLM, Counts, Models, SamplingParams

PUBLIC = [
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


def test_the_public_names_are_these():
    assert bitnet_inference.__all__ == PUBLIC
    assert dir(bitnet_inference) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_there(name):
    value = getattr(bitnet_inference, name)
    assert name == "__version__" or value.__name__ == name


def test_every_error_is_public():
    from bitnet_inference import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind.__name__ for kind in kinds} <= set(PUBLIC)


@pytest.mark.parametrize(
    "error",
    [
        bitnet_inference.PromptTooLong(5, 3),
        bitnet_inference.FormatError("file", "line 1", "is wrong"),
        bitnet_inference.VersionError(3, 2),
        bitnet_inference.Unavailable("cuda", "there is none"),
        bitnet_inference.InvalidParams("no"),
    ],
)
def test_errors_can_be_sent_to_another_process(error):
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_no_other_name():
    with pytest.raises(AttributeError, match="no attribute 'Tokenizer'"):
        _ = bitnet_inference.Tokenizer


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, bitnet_inference; print([m for m in ('numpy', 'tokenizers', 'jinja2') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_what_has_a_state_shows_it():
    counts = Counts()
    with LLM.load(listener=counts) as llm:
        path = llm.tokenizer.path
        shown = repr(llm)
        assert re.fullmatch(rf"<LLM {re.escape(str(path))} on \w+, [\d.]+ [MG]B>", shown)
        assert repr(llm.tokenizer) == f"<Tokenizer {path}, 3072 tokens>"
        stream = llm.stream("Once upon a time", SamplingParams(max_tokens=5, temperature=0))
        assert repr(stream) == "<Stream under way, 0 tokens read>"
        stream.read()
        assert repr(stream) == "<Stream length, 5 tokens read>"
    assert repr(llm) == shown.replace(">", ", closed>")
    assert repr(counts) == "<Counts 1 requests, 1 ended, 5 new tokens>"
    with Models(10**9) as models:
        assert repr(models) == "<Models none, at most 1.00 GB>"
        with models.use("default"):
            assert repr(models) == f"<Models {path}, at most 1.00 GB>"
    assert repr(models) == "<Models none, at most 1.00 GB, closed>"
