"""The second session of docs/offline.md: several models within a budget of memory."""

from bitnet_inference import Models, SamplingParams

with Models(max_bytes=4_000_000_000, max_cache_tokens=2048) as models:
    models.preload("default")  # or a folder
    with models.use("default") as llm:  # loaded already
        print(llm.generate("The owl", SamplingParams(temperature=0, max_tokens=12)).text)
    for state in models.loaded():
        print(state.path.name, f"{state.num_bytes / 1e6:.1f} MB, {state.num_users} users")
