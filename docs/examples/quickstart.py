"""The session of the README."""

from bitnet_inference import LLM, SamplingParams

llm = LLM.load("default")  # or a folder: LLM.load("models/bitnet-b1.58-2B-4T")

out = llm.chat([{"role": "user", "content": "Tell me a story about a shy owl called Nora"}])
print(out.text, out.finish_reason, out.usage.num_output_tokens)

params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=40)
for piece in llm.stream("Once upon a time", params):
    print(piece.text, end="", flush=True)

outs = llm.generate(["The fox", "The bear", "The mole"], params)  # one batch; each text is as if it were alone
logits = llm.logits(llm.tokenizer.encode("Once upon a time"))  # float32 [tokens, vocabulary]
