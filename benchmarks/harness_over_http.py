"""lm-evaluation-harness' local-completions against a server of ours, beside what the library says of the same texts.

    bitnet serve story=default --port 8000
    python benchmarks/harness_over_http.py http://127.0.0.1:8000 src/bitnet_inference/default_model

needs lm-eval[api] (0.4.13) and transformers, whose tokenizer it takes from the model's folder. It loads the model there
too, and prints how far both are apart.
"""

from __future__ import annotations

import sys
from typing import Any

from bitnet_inference import LLM, SamplingParams, log_likelihoods

PAIRS = [
    ("Once upon", " a time, there was a little fox."),
    ("Once upon", " a bear."),
    ("The sun was", " shining, and Mia was happy."),
    ("Tom had a red ball. He", " liked to play with it in the park."),
    ("Grüße an", " die Füchse 😀!"),
]
PROMPTS = ["Once upon", "The sun was"]


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """The harness' own objects for these."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def main(url: str, folder: str) -> None:
    """Print both results, and the largest difference."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="story",
        tokenizer_backend="huggingface",
        tokenizer=folder,
        add_bos_token=True,
        batch_size=4,
    )
    found = model.loglikelihood(requests("loglikelihood", PAIRS))
    until = {"until": ["."], "max_gen_toks": 30, "temperature": 0}
    texts = model.generate_until(requests("generate_until", [(each, dict(until)) for each in PROMPTS]))
    with LLM.load(folder) as llm:
        expected = log_likelihoods(llm, PAIRS)
        params = SamplingParams(temperature=0.0, max_tokens=30, stop=["."])
        same = [llm.generate(each, params).text for each in PROMPTS] == texts
    for (context, text), (logprob, is_greedy), one in zip(PAIRS, found, expected, strict=True):
        print(f"{context!r} {text!r}: over HTTP {logprob:.6f} {is_greedy}, here {one.logprob:.6f} {one.is_greedy}")
    worst = max(abs(logprob - one.logprob) for (logprob, _), one in zip(found, expected, strict=True))
    print(f"largest difference {worst:.1e}; texts are {'the same' if same else 'different'}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
