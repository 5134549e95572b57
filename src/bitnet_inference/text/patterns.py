"""How byte-level tokenizers cut a text into words: patterns, by the name that llama.cpp has for them.

The patterns are those of the models' own tokenizer.json, where llama.cpp has others that come near.
"""

from __future__ import annotations

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = rf"{_WORDS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"(?i:{_WORDS})|{_QWEN2_WORDS}"
LLAMA3_PATTERN = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_QWEN35 = (
    rf"(?i:{_WORDS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# Mistral's and GPT-4o's: a word begins with capital letters and goes on with small ones.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS}|{_SPACES}"
_GPT4O = rf"{_CASED[0]}(?i:{_WORDS})?|{_CASED[1]}(?i:{_WORDS})?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_SEED_CODER = rf"(?i:{_WORDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
THREE_DIGITS = "[0-9][0-9][0-9]"
DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
_BREAK = "[\r\n]"
_HAN, _HAN_AND_KANA = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# DeepSeek's: the letters that have a case, of an older Unicode.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# One pattern after the other cuts what those before it left.
PATTERNS = {
    "llama-bpe": (LLAMA3_PATTERN,),
    "smaug-bpe": (LLAMA3_PATTERN,),  # the same without ignore_merges
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),  # the same for texts as they are; Qwen's own tokenizers compose accents first
    "qwen35": (_QWEN35,),
    "ufakzeka": (_QWEN2_WORDS,),
    "gpt-2": (GPT2,),
    "smollm": (DIGIT, GPT2),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
    "seed-coder": (_SEED_CODER,),
    "minicpm5": (_DIGITS, LLAMA3_PATTERN.replace(_DIGITS, r"\p{N}+")),
    "deepseek-llm": (
        _BREAK, rf"\s?[{_CASED_LETTERS}]+", rf"\s?[{_DEEPSEEK_SIGNS}]+", r"\s+$", _HAN, DIGIT,
    ),
    "deepseek-coder": (_BREAK, r"\s?\p{L}+", r"\s?\p{P}+", _HAN, DIGIT),
    "deepseek-v3": (_DIGITS, _HAN_AND_KANA, _DEEPSEEK3),
    "poro-chat": (_BLOOM,),
    "viking": (_BLOOM, DIGIT),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, THREE_DIGITS),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", THREE_DIGITS),
}  # fmt: skip
WHOLE_WORDS = ("llama-bpe", "tekken", "minicpm5")  # a word that is a token is not merged
BEGUN = ("llama-bpe", "tekken")  # where a file does not say it, a BOS stands in front
COMPOSED = ("qwen2",)  # accents are composed first
ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "falcon_e": "llama-bpe",
    "falcon-h1": "llama-bpe", "pixtral": "llama-bpe", "lfm2": "llama-bpe", "midm-2.0": "llama-bpe",
    "dbrx": "smaug-bpe", "chatglm-bpe": "smaug-bpe", "gpt2": "gpt-2", "mpt": "gpt-2", "olmo": "gpt-2", "jais": "gpt-2",
    "phi-2": "gpt-2", "exaone4": "gpt-2", "gigachat": "gpt-2", "a.x-4.0": "gpt-2", "mellum": "gpt-2",
    "trillion": "gpt-2", "granite-docling": "gpt-2", "megrez": "qwen2", "f2llmv2": "qwen2",
    "kormo": "deepseek-r1-qwen", "hunyuan": "deepseek-r1-qwen", "solar-open": "deepseek-r1-qwen",
    "grok-2": "deepseek-r1-qwen", "stablelm2": "deepseek-r1-qwen", "starcoder": "smollm", "refact": "smollm",
    "command-r": "smollm", "exaone": "smollm", "codeshell": "smollm", "minerva-7b": "smollm", "mellum2": "smollm",
    "llama4": "gpt-4o", "kanana2": "gpt-4o", "talkie": "gpt-4o", "minimax-m2": "gpt-4o",
    "hunyuan-dense": "deepseek-v3", "joyai-llm": "deepseek-v3", "bloom": "poro-chat", "gpt3-finnish": "poro-chat",
}  # fmt: skip
