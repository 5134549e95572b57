"""A small byte-level BPE tokenizer like Llama 3's, and two chat templates with what Transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

from models import BOS, VOCAB_SIZE, Spec
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|pad|>",
            "<|python_tag|>", "<|eom_id|>", "<|eot_id|>")  # fmt: skip
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BITNET_TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = message['role'] | capitalize"
    " + ': '+ message['content'] | trim + '<|eot_id|>' %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
LLAMA3_TEMPLATE = (
    "{{- bos_token }}\n{%- for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
TEXT = """The miller had a small mill by the river, and the river had a small fish that knew the miller well.
Every morning the fish asked what the weather would be, and every morning the miller looked at the sky and said
that he did not know. In the year 1873 it rained for 40 days. The mill-wheel turned and turned; nobody slept.
"Shall we go?" said the fish. "We'll go," said the miller, "but I don't know where." They went down to the sea,
where the water was 12,345 times larger, and they weren't afraid of it. Größe, naïve, señor, 東京, привет, 🙂!
def turn(wheel, times=3):
    return [wheel for _ in range(times)]  # and again
"""
CHATS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Where did the fish go?\n"}],
    [{"role": "user", "content": "a <|eot_id|> b"}, {"role": "assistant", "content": "naïve 🙂"},
     {"role": "user", "content": "{{ bos_token }} {% raw %}"}],
)  # fmt: skip


def write(spec: Spec, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, and for a spec with a template that and chat.json too."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_trained(), bos_token=SPECIALS[0], eos_token=SPECIALS[1], clean_up_tokenization_spaces=False
    )
    if spec.template:
        tokenizer.chat_template = BITNET_TEMPLATE if spec.template == "tokenizer_config" else LLAMA3_TEMPLATE
    tokenizer.save_pretrained(folder, save_jinja_files=spec.template == "jinja")
    if spec.template:
        text = json.dumps(_expected(tokenizer), indent=1, ensure_ascii=False)
        (folder / "chat.json").write_text(text + "\n", encoding="utf-8")


def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    num_merged = VOCAB_SIZE - len(SPECIALS)
    trainer = trainers.BpeTrainer(vocab_size=num_merged, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    assert tokenizer.token_to_id(SPECIALS[0]) == BOS
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    template = processors.TemplateProcessing(single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], BOS)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def _expected(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[dict[str, object]]]:
    chats = []
    for messages in CHATS:
        for prompt in (True, False):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            chats.append({"messages": messages, "add_generation_prompt": prompt, "text": text, "ids": ids,
                          "ids_with_specials": tokenizer(text)["input_ids"]})  # fmt: skip
    texts = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in (*TEXT.splitlines(), "", "  ", "\n\n x")]
    return {"chats": chats, "texts": texts}
