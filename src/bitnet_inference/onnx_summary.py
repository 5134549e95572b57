"""What an ONNX file is, for `bitnet inspect`: sizes, what goes in, and what it computes with."""

from __future__ import annotations

from collections.abc import Mapping

from bitnet_inference.amounts import told_count
from bitnet_inference.formats.onnx import OnnxCheckpoint
from bitnet_inference.formats.onnx_graph import Graph, Port, plain
from bitnet_inference.formats.onnx_tensors import DTYPE_NAMES

_QUANTISED = ("MatMulNBits", "MatMulBnb4", "MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat",
              "DynamicQuantizeLinear", "QLinearMatMul", "DequantizeLinear", "QuantizeLinear",
              "GatherBlockQuantized", "QMoE")  # fmt: skip


def describe_onnx(checkpoint: OnnxCheckpoint) -> list[tuple[str, str]]:
    """Names and values, a line each."""
    graph, config, decoder = checkpoint.graph, checkpoint.config, checkpoint.decoder
    heads = f"{config.num_kv_heads} heads of {config.head_dim} for keys and values"
    lines = [
        ("path", str(checkpoint.path)),
        ("family", f"{plain(config.family)} (a graph, run by ONNX Runtime)"),
        ("parameters", told_count(checkpoint.num_parameters)),
        ("layers", f"{config.num_layers} with a cache"),
        ("attention", f"{heads}, in {decoder.cache_dtype}"),
        ("vocabulary", f"{config.vocab_size} tokens, logits in {decoder.logits_dtype}"),
        ("context", f"{config.max_positions} tokens"),
        *(("input", line) for line in _ports(graph.inputs, decoder.pasts)),
        *(("output", line) for line in _ports(graph.outputs, decoder.presents)),
        (
            "opsets",
            ", ".join(f"{plain(domain or 'ai.onnx')} {version}" for domain, version in graph.opsets.items())[:200],
        ),
        ("operators", f"{sum(graph.operators.values())} of {len(graph.operators)} kinds"),
        ("quantised", _quantised(graph)),
    ]
    return [*lines, *(("note", note) for note in checkpoint.notes())]


def _ports(ports: Mapping[str, Port], cached: tuple[str, ...]) -> list[str]:
    """One line each, but one for all layers of the cache."""
    others = [port for name, port in ports.items() if name not in cached]
    lines = [f"{plain(port.name)} {_kind(port)}" for port in others[:20]]
    return [*lines, f"{plain(cached[0])} and {len(cached) - 1} more, {_kind(ports[cached[0]])}"]


def _kind(port: Port) -> str:
    return f"{DTYPE_NAMES.get(port.dtype, '?')} {port}"


def _quantised(graph: Graph) -> str:
    found = {name: graph.operators[f"{domain}{name}"] for name in _QUANTISED for domain in ("", "com.microsoft.")
             if graph.operators[f"{domain}{name}"]}  # fmt: skip
    bits = f" ({', '.join(map(str, sorted(graph.bits)))} bits)" if graph.bits else ""
    texts = [f"{count} {name}{bits if name == 'MatMulNBits' else ''}" for name, count in found.items()]
    return ", ".join(texts) or "no operator"
