"""The session of docs/scoring.md: vectors, log-probabilities, perplexity and choices."""

from bitnet_inference import LLM, SamplingParams, choose, perplexity

story = (
    "Once upon a time there was a fox called Mia. She lived under an old oak near the river. "
    "One day the big fair was coming, and Mia wanted to go there with her friend."
)

with LLM.load("default") as llm:
    vectors = llm.embed(["The fox ran home.", "The fox went home.", "Seven sisters snored."])  # float32 [3, hidden]
    near, far = (vectors[0] @ vectors[1:].T).tolist()  # vectors have length 1, so these are cosines
    print(f"{near:.3f} {far:.3f}")

    texts = ["The fox ran home.", "Home ran fox the."]
    print([round(sum(scores), 2) for scores in llm.score(texts)])  # natural log-probabilities, a float for each token

    out = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1))
    print(out.prompt_logprobs[0], [round(each.logprob, 3) for each in out.prompt_logprobs[1:]])

    result = perplexity(llm, story, window=64, stride=32)
    print(f"{result.perplexity:.3f}, {result.bits_per_byte:.3f} bits a byte, {result.num_tokens} tokens")

    best = choose(llm, "Once upon a time there was a", [" fox", " quickly"])
    print(best.index, [round(score, 2) for score in best.scores])
