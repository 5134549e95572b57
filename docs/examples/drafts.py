"""The session of docs/speculation.md: the same text with and without drafts."""

from bitnet_inference import LLM, SamplingParams

prompt = "Repeat: the fox met the owl, and the owl met the mole. The fox met the owl,"
params = SamplingParams(temperature=0.8, seed=7, max_tokens=40)

texts = []
for drafts in ("none", "lookup", "default"):  # nobody, the text itself, a model (here the same one)
    with LLM.load("default", drafts=drafts) as llm:
        texts.append(llm.generate(prompt, params).text)

assert texts[0] == texts[1] == texts[2]
print(texts[0])
