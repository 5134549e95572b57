"""The session of docs/reproducibility.md: one request by itself, among others, on another number of threads."""

from hashlib import sha256

from bitnet_inference import LLM, SamplingParams

prompt = "Once upon a time there was a fox"
params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=40, logprobs=2)

with LLM.load("default", threads=1) as llm:
    alone = llm.generate(prompt, params)
    among_others = llm.generate(["The owl", prompt, "The bear and the mole"], params)[1]

with LLM.load("default", threads=2) as llm:
    on_two_threads = llm.generate(prompt, params)
    logits = llm.logits(llm.tokenizer.encode(prompt))  # float32 [tokens, vocabulary]

assert alone.text == among_others.text == on_two_threads.text
assert alone.logprobs == among_others.logprobs == on_two_threads.logprobs  # floats, equal to the last bit

print(alone.text)
print(sha256(logits.tobytes()).hexdigest())
