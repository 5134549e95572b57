"""Which device a model runs on, and why."""

from bitnet_inference import LLM

with LLM.load("default") as llm:  # device="auto"
    print(f"on {llm.device}: {llm.why_there}")
