"""The session of docs/telemetry.md: what an engine did, as numbers and as a trace."""

import tempfile
from pathlib import Path

from bitnet_inference import LLM, Counts, SamplingParams, Trace

file = Path(tempfile.mkdtemp(), "trace.json")
counts = Counts()

with Trace(file) as trace:  # written at the end of the block

    def listen(event):  # called in the engine's thread
        counts(event)
        trace(event)

    with LLM.load("default", listener=listen, profile=True) as llm:
        outs = llm.generate(["Once upon a time", "The fox"], SamplingParams(max_tokens=20, seed=1))

numbers = counts.as_json()
assert numbers["total"]["output_tokens"] == sum(out.usage.num_output_tokens for out in outs)
print(numbers["first_token_s"]["count"], "first tokens,", numbers["token_gap_s"]["count"], "gaps")

for row in trace.table():
    print(*row)
