"""The first session of docs/offline.md: many prompts, from a generator and from a file."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from bitnet_inference import LLM, SamplingParams, generate_file

params = SamplingParams(temperature=0.8, seed=7, max_tokens=12)


def show(done, total):
    print(f"{done} of {total or '?'}")


with LLM.load("default") as llm, TemporaryDirectory() as folder:
    outs = llm.generate((f"There were {count} owls" for count in range(2, 5)), params, progress=show)
    print([out.text for out in outs])  # in the order of the prompts

    prompts, answers = Path(folder, "prompts.jsonl"), Path(folder, "answers.jsonl")
    with prompts.open("w") as file:
        for animal in ("fox", "owl", "bear"):
            file.write(json.dumps({"id": animal, "prompt": f"Once upon a time a {animal}"}) + "\n")
        talk = [{"role": "user", "content": "Tell me a story about a mole"}]
        file.write(json.dumps({"id": "mole", "messages": talk, "params": {"max_tokens": 20}}) + "\n")
    result = generate_file(llm, prompts, answers, params, progress=show)
    print(result.num_prompts, "prompts,", result.num_errors, "failed")
    for line in answers.read_text().splitlines():
        answer = json.loads(line)
        print(answer["line"], answer["id"], answer["text"])
