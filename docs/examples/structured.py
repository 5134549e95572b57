"""The session of docs/structured_output.md: texts that have a form."""

import json

from bitnet_inference import LLM, Grammar, SamplingParams

animal = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "kind": {"enum": ["fox", "owl", "bear"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}

with LLM.load("default") as llm:
    params = [SamplingParams(seed=seed, grammar=Grammar(json_schema=animal)) for seed in range(3)]
    for out in llm.generate(["Once upon a time there was"] * 3, params):
        print(json.loads(out.text)["kind"], out.finish_reason)

    yes_or_no = SamplingParams(temperature=0, grammar=Grammar(choice=["yes", "no"]))
    assert llm.chat([{"role": "user", "content": "Is a fox red?"}], yes_or_no).text in ("yes", "no")

    date = SamplingParams(seed=1, grammar=Grammar(regex="[0-9]{4}-[01][0-9]-[0-3][0-9]"))
    assert len(llm.generate("On the day", date).text) == 10

    sums = Grammar(lark='start: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[0-9]{1,2}/')
    assert "+" in llm.generate("2 and 2 is", SamplingParams(seed=1, grammar=sums)).text
