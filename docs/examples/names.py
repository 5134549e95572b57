"""The example of docs/models.md: names that are not here."""

from bitnet_inference import LLM, NotFound

for name in ("falcom3-1b", "nobody/nothing"):
    try:
        LLM.load(name)
    except NotFound as error:
        print(error)
