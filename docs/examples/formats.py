"""A model as a GGUF file."""

from pathlib import Path
from tempfile import TemporaryDirectory

from bitnet_inference import LLM, SamplingParams, convert

with TemporaryDirectory() as folder:
    result = convert("default", Path(folder, "story.gguf"), "i2_s")
    print(result.num_bytes, "bytes,", len(result.tensors), "tensors, worst error", max(t.error for t in result.tensors))
    print(*result.notes, sep="\n")
    with LLM.load(result.path) as llm:
        print(llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=12)).text)
