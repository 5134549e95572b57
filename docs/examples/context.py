"""The session of docs/context.md: what gives way when a text is longer than the context."""

from bitnet_inference import LLM, PromptTooLong, SamplingParams

talk = [{"role": "system", "content": "You tell stories."}]
for animal in ("fox", "owl", "bear") * 40:
    talk.append({"role": "user", "content": f"Who did the {animal} meet?"})
    talk.append({"role": "assistant", "content": f"The {animal} met a mole."})
talk.append({"role": "user", "content": "Tell me a story about a fox"})

with LLM.load("default") as llm:
    try:
        llm.chat(talk, SamplingParams(temperature=0, max_tokens=60))
    except PromptTooLong as error:
        print(error)

    kept = SamplingParams(temperature=0, max_tokens=60, overflow="keep_system")
    usage = llm.chat(talk, kept).usage
    print(usage.num_prompt_tokens, "tokens kept,", usage.num_dropped_tokens, "left out")

    prompt = llm.tokenizer.encode("The fox met an owl. " * 300)
    cut = SamplingParams(temperature=0, max_tokens=60, overflow="truncate_left")
    usage = llm.generate(prompt, cut).usage
    print(usage.num_prompt_tokens, "tokens kept,", usage.num_dropped_tokens, "left out")

    endless = SamplingParams(seed=1, max_tokens=1600, ignore_eos=True, overflow="sliding")
    usage = llm.generate("Once upon a time", endless).usage
    print(usage.num_output_tokens, "tokens in a context of", usage.max_context, "which slid", usage.num_slides, "times")
