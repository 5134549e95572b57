"""Writing a packed file, in docs/packed_format.md."""

from pathlib import Path
from tempfile import TemporaryDirectory

from bitnet_inference import LLM, SamplingParams, convert

with TemporaryDirectory() as folder:
    file = Path(folder, "default.safetensors")
    convert("default", file)  # or the path of any model; compressed=True makes it smaller
    with LLM.load(file) as llm:
        print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=24)).text)
