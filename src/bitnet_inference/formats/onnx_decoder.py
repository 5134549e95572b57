"""What an ONNX graph must take and give to be run as a decoder with a cache: names, types and sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.json_files import Fields, shown
from bitnet_inference.formats.onnx_graph import Graph, Port
from bitnet_inference.formats.onnx_tensors import BOOL, DTYPE_NAMES, FLOAT, FLOAT16, INT32, INT64
from bitnet_inference.formats.sizes import MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, MAX_VOCAB

_EXPECTED = "expected are input_ids, attention_mask, position_ids, past_key_values.N.key and .value"
_CURE = "export it as text-generation-with-past"


@dataclass(frozen=True, kw_only=True)
class Names:
    """How a decoder's inputs and outputs are called; "%d" stands for the layer."""

    input_ids: str = "input_ids"
    attention_mask: str = "attention_mask"
    position_ids: str = "position_ids"
    past_key: str = "past_key_values.%d.key"
    past_value: str = "past_key_values.%d.value"
    logits: str = "logits"
    hidden_states: tuple[str, ...] = ("last_hidden_state", "hidden_states")
    present_key: str = "present.%d.key"
    present_value: str = "present.%d.value"
    use_cache: str = "use_cache_branch"
    logits_kept: str = "num_logits_to_keep"


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What to feed and what to fetch. Names are None where a graph has no such input or output.

    `logits_kept` takes for how many positions logits are wanted, 0 for all. `pasts` and `presents` are the keys of
    layer 0, its values, the keys of layer 1, and so on; their shapes are [1, num_kv_heads, tokens, head_dim] of
    `cache_dtype`. `integers` are the dtypes of inputs of whole numbers. `vocab_size` and `hidden_size` are None where
    the graph does not say.
    """

    input_ids: str
    attention_mask: str | None
    position_ids: str | None
    use_cache: str | None
    logits_kept: str | None
    pasts: tuple[str, ...]
    presents: tuple[str, ...]
    logits: str
    logits_dtype: str
    hidden: str | None
    hidden_dtype: str
    integers: dict[str, str]
    num_kv_heads: int
    head_dim: int
    cache_dtype: str
    vocab_size: int | None
    hidden_size: int | None

    @property
    def num_layers(self) -> int:
        """Layers with a cache."""
        return len(self.pasts) // 2


def names_of(decoder: Fields | None) -> Names:
    """The names in the section model.decoder of genai_config.json; raises FormatError for those that cannot be."""
    if decoder is None:
        return Names()
    inputs, outputs = (decoder.section(key) or Fields(decoder.path, {}, key) for key in ("inputs", "outputs"))
    plain = Names()
    return Names(
        input_ids=inputs.text("input_ids", plain.input_ids),
        attention_mask=inputs.text("attention_mask", plain.attention_mask),
        position_ids=inputs.text("position_ids", plain.position_ids),
        past_key=_pattern(inputs, "past_key_names", plain.past_key),
        past_value=_pattern(inputs, "past_value_names", plain.past_value),
        logits=outputs.text("logits", plain.logits),
        hidden_states=(outputs.text("hidden_states", "hidden_states"), "last_hidden_state"),
        present_key=_pattern(outputs, "present_key_names", plain.present_key),
        present_value=_pattern(outputs, "present_value_names", plain.present_value),
    )


def read_decoder(graph: Graph, names: Names, heads_said: tuple[int | None, int | None] = (None, None)) -> Decoder:
    """`heads_said`: heads of keys and values, and their features, for graphs that give names to these sizes.

    Raises Unsupported, naming the input or output, for a graph that is run otherwise.
    """
    pasts = tuple(_past_names(graph, names))
    presents = tuple(_of_layers(names.present_key, names.present_value, len(pasts) // 2))
    plain = (names.input_ids, names.attention_mask, names.position_ids)
    if unknown := graph.inputs.keys() - {*plain, names.use_cache, names.logits_kept, *pasts}:
        raise Unsupported(f"{graph.path}: the input {shown(min(unknown))} is not known: {_EXPECTED}: {_CURE}")
    for name in (names.logits, *presents):
        if name not in graph.outputs:
            raise Unsupported(f"{graph.path}: the output {shown(name)} is missing: {_CURE}")
    hidden = next((graph.outputs[name] for name in names.hidden_states if name in graph.outputs), None)
    _check_distinct(graph, (*plain, *pasts, names.logits, *presents, *([hidden.name] if hidden else [])))
    _check_ids(graph, names)
    shapes = [graph.inputs[name] for name in pasts]
    num_kv_heads, head_dim = _heads(graph, shapes, heads_said)
    for name in presents:
        _check(graph, graph.outputs[name], (1, num_kv_heads, None, head_dim), (shapes[0].dtype,))
    logits = graph.outputs[names.logits]
    vocab_size = _width(graph, logits, MAX_VOCAB)
    hidden_size = _width(graph, hidden, MAX_HIDDEN) if hidden else None
    return Decoder(
        input_ids=names.input_ids,
        attention_mask=names.attention_mask if names.attention_mask in graph.inputs else None,
        position_ids=names.position_ids if names.position_ids in graph.inputs else None,
        use_cache=names.use_cache if names.use_cache in graph.inputs else None,
        logits_kept=names.logits_kept if names.logits_kept in graph.inputs else None,
        pasts=pasts,
        presents=presents,
        logits=names.logits,
        logits_dtype=DTYPE_NAMES[logits.dtype],
        hidden=hidden.name if hidden else None,
        hidden_dtype=DTYPE_NAMES[hidden.dtype] if hidden else "float32",
        integers={name: DTYPE_NAMES[graph.inputs[name].dtype] for name in plain if name in graph.inputs},
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        cache_dtype=DTYPE_NAMES[shapes[0].dtype],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
    )


def _pattern(fields: Fields, key: str, default: str) -> str:
    pattern = fields.text(key, default)
    if pattern.count("%") != 1 or "%d" not in pattern:
        raise fields.wrong(key, "is not a name with one %d for the layer: correct it")
    return pattern


def _of_layers(key: str, value: str, num_layers: int) -> Iterator[str]:
    for layer in range(num_layers):
        yield key.replace("%d", str(layer))
        yield value.replace("%d", str(layer))


def _past_names(graph: Graph, names: Names) -> list[str]:
    found: list[str] = []
    for name in _of_layers(names.past_key, names.past_value, MAX_LAYERS + 1):
        if name not in graph.inputs:
            break
        found.append(name)
    if not found or len(found) % 2:
        raise Unsupported(f"{graph.path}: the input {shown(name)} is missing, so there is no cache: {_CURE}")
    if len(found) > 2 * MAX_LAYERS:
        raise FormatError(graph.path, "graph", f"more than {MAX_LAYERS} layers: export it again")
    return found


def _check_distinct(graph: Graph, names: tuple[str, ...]) -> None:
    """Of outputs of one name the runtime writes one, and none that is an input: the others would hold anything."""
    for name, count in Counter(names).items():
        if count > 1 or (name in graph.inputs and name in graph.outputs):
            raise Unsupported(f"{graph.path}: {shown(name)} stands for two things: correct genai_config.json")


def _check_ids(graph: Graph, names: Names) -> None:
    if names.input_ids not in graph.inputs:
        raise Unsupported(f"{graph.path}: the input {shown(names.input_ids)} is missing: {_CURE}")
    for name in (names.input_ids, names.attention_mask, names.position_ids):
        if name in graph.inputs:
            _check(graph, graph.inputs[name], (1, None), (INT64, INT32))
    if names.use_cache in graph.inputs:
        _check(graph, graph.inputs[names.use_cache], (1,), (BOOL,))
    if names.logits_kept in graph.inputs:
        _check(graph, graph.inputs[names.logits_kept], (), (INT64,))


def _heads(graph: Graph, ports: list[Port], said: tuple[int | None, int | None]) -> tuple[int, int]:
    """Heads of keys and values, and their features: the same in all layers."""
    shape, name = ports[0].shape or ("?",) * 4, shown(ports[0].name)
    found = (shape[1], shape[3]) if len(shape) == 4 else ()
    sizes = [size if isinstance(size, int) else other for size, other in zip(found, said, strict=False)]
    if len(sizes) != 2 or None in sizes:
        why = "not [batch, heads, past, features] with numbers of heads and features, which config.json does not say"
        raise Unsupported(f"{graph.path}: the input {name} is {ports[0]}, {why}: copy that beside it, or {_CURE}")
    num_heads, head_dim = (size or 0 for size in sizes)
    if not 1 <= num_heads <= MAX_HEADS or not 1 <= head_dim <= MAX_HEAD_DIM:
        why = f"at most {MAX_HEADS} heads of {MAX_HEAD_DIM} features are known: export it again"
        raise FormatError(graph.path, name, f"{num_heads} heads of {head_dim} features: {why}")
    for port in ports:
        _check(graph, port, (1, num_heads, None, head_dim), (FLOAT, FLOAT16))
        if port.dtype != ports[0].dtype:
            raise Unsupported(f"{graph.path}: the input {shown(port.name)} differs in type from the first: {_CURE}")
    return num_heads, head_dim


def _check(graph: Graph, port: Port, sizes: tuple[int | None, ...], dtypes: tuple[int, ...]) -> None:
    """Sizes that vary may stand for any; None must vary, for it is the number of tokens."""
    found = port.shape
    fits = found is None or (len(found) == len(sizes) and all(map(_fits, found, sizes)))
    if not fits or port.dtype not in dtypes:
        kind = DTYPE_NAMES.get(port.dtype, str(port.dtype))
        wanted = f"{' or '.join(DTYPE_NAMES[dtype] for dtype in dtypes)} {_shape_text(sizes)}"
        raise Unsupported(f"{graph.path}: {shown(port.name)} is {kind} {port}, not {wanted}: {_CURE}")


def _fits(found: int | str, wanted: int | None) -> bool:
    return isinstance(found, str) or found == wanted


def _shape_text(sizes: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in sizes)}]"


def _width(graph: Graph, port: Port, most: int) -> int | None:
    """The last size of [batch, tokens, width], where the graph says it."""
    _check(graph, port, (1, None, *(port.shape or (0,))[-1:]), (FLOAT, FLOAT16))  # type: ignore[arg-type]
    width = (port.shape or ("?",))[-1]
    if isinstance(width, str):
        return None
    if not 1 <= width <= most:
        raise FormatError(
            graph.path, shown(port.name), f"has {width} columns, at most {most} are known: export it again"
        )
    return width
