"""The session of docs/filters.md: a word list, and a classifier that is asked at the end of every sentence."""

from bitnet_inference import LLM, Filtered, SamplingParams, Verdict, WordFilter


def classify(text: str) -> str | None:
    """Stands for another model, or for a service: the label of what is wrong with a text, if anything is."""
    return "shouting" if text.count("!") > 1 else None


class SentenceFilter:
    """Asks `classify` about prompts, and about an answer at the end of every sentence."""

    def check_prompt(self, text: str) -> str | None:
        return classify(text)

    def start(self) -> "Sentences":
        return Sentences()


class Sentences:
    def __init__(self) -> None:
        self.text, self.num_clear = "", 0

    def push(self, text: str, is_last: bool) -> Verdict:
        self.text += text
        if is_last or text.rstrip().endswith((".", "!", "?")) or len(self.text) > self.num_clear + 200:
            label = classify(self.text)
            if label is not None:
                return Verdict(self.num_clear, label)  # what it has cleared before stays, the rest is never shown
            self.num_clear = len(self.text)
        return Verdict(self.num_clear)


params = SamplingParams(temperature=0, max_tokens=100)
words = WordFilter(words=["snow", "secret plan"], patterns=[r"\b[0-9]{4}\b"], window=6, label="our list")

with LLM.load("default", filters=[words, SentenceFilter()]) as llm:
    out = llm.generate("Once upon a time there was a fox", params)
    print(out.text)
    print(out.finish_reason, out.stopped_by)
    try:
        llm.generate("It was in 1984", params)
    except Filtered as error:
        print(error)
