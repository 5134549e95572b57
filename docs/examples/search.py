"""The session of docs/choices.md: the best of many choices, and a beam search."""

from bitnet_inference import LLM, BeamParams, SamplingParams

prompt = "Once upon a time there was a"

with LLM.load("default") as llm:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
    for text in llm.choices(prompt, 2, params, best_of=8):  # 8 are generated, the prompt is computed once
        print("choice:", text.text)

    for text in llm.beam_search(prompt, BeamParams(num_beams=4, num_choices=2, max_tokens=12)):
        print(f"{text.score:.4f}:", text.text)
