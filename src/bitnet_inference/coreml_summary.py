"""What a Core ML package is, for `bitnet inspect`: sizes, what goes in, and what it computes with."""

from __future__ import annotations

from bitnet_inference.amounts import told_count
from bitnet_inference.formats.coreml import ONE, CoreMLCheckpoint
from bitnet_inference.formats.onnx_graph import plain


def describe_coreml(checkpoint: CoreMLCheckpoint) -> list[tuple[str, str]]:
    """Names and values, a line each."""
    config, program = checkpoint.config, checkpoint.program
    one, operations = program.functions[ONE], program.functions[ONE].operations
    computed = {name: count for name, count in operations.items() if name != "const"}
    ports = [("input", one.inputs), ("state", one.states), ("output", one.outputs)]
    heads = f"{config.num_kv_heads} heads of {config.head_dim} for keys and values, in float16"
    return [
        ("path", str(checkpoint.path)),
        ("family", f"{plain(config.family)} (a program, run by Core ML)"),
        ("parameters", told_count(checkpoint.num_parameters)),
        ("weights", _weights(checkpoint)),
        ("layers", f"{config.num_layers} of hidden size {config.hidden_size}"),
        ("attention", heads),
        ("vocabulary", f"{config.vocab_size} tokens"),
        ("context", f"{config.max_positions} tokens, prompts {checkpoint.chunk_tokens} at a time"),
        *((kind, f"{name} {port}") for kind, found in ports for name, port in found.items()),
        ("operations", f"{sum(computed.values())} of {len(computed)} kinds for a token"),
        *(("note", note) for note in checkpoint.notes()),
    ]


def _weights(checkpoint: CoreMLCheckpoint) -> str:
    weights = checkpoint.program.weights
    parts = [f"{told_count(weights[bits])} of {bits} bits" for bits in sorted(weights)]
    stored = 8 * checkpoint.package.weights.stat().st_size / max(1, checkpoint.num_parameters)
    return f"{', '.join(parts)}; {stored:.2f} bits a weight in the file, with scales and tables"
