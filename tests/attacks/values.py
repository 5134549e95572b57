"""Numbers and texts that readers stumble over, to stand in place of those of a file."""

from __future__ import annotations

NUMBERS = (
    0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 63, 64, 127, 128, 255, 256, 257, 512, 1000, 1024, 4096, 65535, 65536, 1 << 20,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 53) + 1, 1 << 60, 1 << 62, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, (1 << 64) - 8, -1, -2, -8, -128, -(1 << 31), -(1 << 63),
)  # fmt: skip
FLOATS = (0.0, -0.0, 1e-45, 1e-38, 0.5, -1.0, 1e37, 3.4e38, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", " ", "\0", "\n", "a\nb", "\ud800", "\u202e", "é", "..", "../x", "/etc/passwd", "a\\b", "x" * 300, "default",
    "type",
    "bitnet", "llama", "silu", "linear", "llama3", "F32", "BF16", "U8", "I8", "F64", "true", "null", "0", "-1", "1e400",
    "{{", "{% for i in range(10**9) %}x{% endfor %}", "(a+)+$", "(?:", "\\", "[", "<0x41>", "<s>", "\u2581", "Ġ",
    "model.safetensors", "model-1.safetensors", "config.json", "lm_head", "model.layers.0.self_attn.q_proj", ".*.*",
)  # fmt: skip
