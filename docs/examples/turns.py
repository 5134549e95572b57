"""The session of docs/turns.md: a time limit, a tenant of its own, and one who comes first."""

from bitnet_inference import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=12)
prompt = "Once upon a time there was a fox who lived in the woods behind the mill. " * 2

with LLM.load("default") as llm:
    late = llm.generate(prompt, params, timeout_s=1e-6)
    print(late.finish_reason, repr(late.text))

    for salt in ("alice", "alice", "bob"):
        usage = llm.generate(prompt, params, cache_salt=salt).usage
        print(salt, "finds", usage.num_cached_tokens, "of", usage.num_prompt_tokens, "tokens in the cache")

    crowd = [llm.stream(prompt, params) for _ in range(100)]
    first = llm.stream(prompt, params, priority=1)  # before all who still wait
    texts = {stream.read().text for stream in (first, *crowd)}
    print(len(crowd) + 1, "requests,", len(texts), "text")
