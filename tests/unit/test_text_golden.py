"""Against what Transformers made of the same tokenizer files (tests/golden/words.py)."""

import json
from pathlib import Path

import pytest

from bitnet_inference.text.chat import Chat
from bitnet_inference.text.tokenizer import Tokenizer

FOLDERS = sorted(file.parent for file in (Path(__file__).parents[1] / "golden").glob("*/chat.json"))


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def golden(request):
    tokenizer = Tokenizer.from_folder(request.param)
    return tokenizer, json.loads((request.param / "chat.json").read_text(encoding="utf-8"))


def test_there_are_goldens_of_both_places_for_templates():
    assert {(folder / "chat_template.jinja").exists() for folder in FOLDERS} == {True, False}


def test_texts_encode_as_transformers_does(golden):
    tokenizer, expected = golden
    for text in expected["texts"]:
        assert tokenizer.encode(text["text"]) == text["ids"]
        assert tokenizer.decode(text["ids"]) == text["text"]


def test_conversations_render_and_encode_as_transformers_does(golden):
    tokenizer, expected = golden
    chat, injects = Chat(tokenizer), 0
    for case in expected["chats"]:
        options = {"add_generation_prompt": case["add_generation_prompt"]}
        assert chat.render(case["messages"], **options) == case["text"]
        ids = chat.encode(case["messages"], **options)
        if any("<|" in message["content"] for message in case["messages"]):
            injects += 1
            assert ids.count(tokenizer.special["<|eot_id|>"]) == len(case["messages"])
            assert tokenizer.decode(ids, skip_special_tokens=False).removeprefix(tokenizer.named["bos_token"]) in (
                case["text"].removeprefix(tokenizer.named["bos_token"])
            )
        else:
            bos = [] if case["text"].startswith(tokenizer.named["bos_token"]) else [tokenizer.bos_id]
            assert ids == bos + case["ids"]
    assert injects
