"""config.json: what is read from it, and that what cannot be or is not done is refused in one line."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_folders import OFFLINE, folder

from bitnet_inference.errors import FormatError, ModelError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import RopeScaling
from bitnet_inference.formats.hf_config import read_config
from bitnet_inference.formats.hf_quantization import read_quantization
from bitnet_inference.formats.json_files import Fields
from bitnet_inference.model.rope import inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
ABSENT = object()


def read(tmp_path, family="llama", **changes):
    config = folder(family, OFFLINE if family == "bitnet" else None).config | changes
    fields = Fields(tmp_path / "config.json", {key: value for key, value in config.items() if value is not ABSENT})
    return read_config(fields, read_quantization(fields))


@pytest.mark.parametrize(
    ("family", "activation", "eps", "theta", "sub_norms"),
    [("bitnet", "relu2", 1e-5, 500000.0, True), ("llama", "silu", 1e-6, 10000.0, False)],
)
def test_defaults_are_those_of_the_configuration_class(tmp_path, family, activation, eps, theta, sub_norms):
    config = read(tmp_path, family, tie_word_embeddings=ABSENT)
    assert (config.activation, config.norm_eps, config.rope_theta) == (activation, eps, theta)
    assert (config.sub_norms, config.tie_embeddings, config.max_positions) == (sub_norms, False, 2048)


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def test_qwen2_has_biases_whatever_a_key_of_other_families_says(tmp_path):
    config = read(tmp_path, **QWEN2, tie_word_embeddings=ABSENT)
    assert (config.family, config.qkv_bias, config.activation, config.norm_eps) == ("qwen2", True, "silu", 1e-6)
    assert (config.rope_theta, config.max_positions, config.tie_embeddings) == (10000.0, 32768, False)
    assert (config.head_norms, config.local, config.bos_id, config.eos_ids) == (False, None, None, ())
    for said in (True, False, None):
        assert read(tmp_path, **QWEN2, attention_bias=said).qkv_bias
    assert read(tmp_path, architectures=None, model_type="qwen2").qkv_bias
    assert not read(tmp_path, attention_bias=False).qkv_bias


@pytest.mark.parametrize(
    "changes", [{"use_sliding_window": True, "sliding_window": 4}, {"layer_types": ["sliding_attention"]}]
)
def test_windows_of_qwen2_are_refused(tmp_path, changes):
    with pytest.raises(Unsupported, match=f"{next(iter(changes))}: windows of this family are not supported"):
        read(tmp_path, **QWEN2, **changes)
    assert read(tmp_path, **QWEN2, sliding_window=4, max_window_layers=1, use_sliding_window=False).local is None


def test_values_of_the_file_come_first(tmp_path):
    config = read(tmp_path, rms_norm_eps=1e-3, rope_theta=7.0, max_position_embeddings=99, hidden_act="relu2")
    assert (config.norm_eps, config.rope_theta, config.max_positions) == (1e-3, 7.0, 99)
    assert config.activation == "relu2"


def test_absent_key_value_heads_are_as_many_as_heads(tmp_path):
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 2


@pytest.mark.parametrize(("head_dim", "expected"), [(ABSENT, 4), (None, 4), (6, 6)])
def test_head_dim(tmp_path, head_dim, expected):
    assert read(tmp_path, head_dim=head_dim).head_dim == expected


def test_head_dim_allows_a_hidden_size_that_heads_do_not_divide(tmp_path):
    assert read(tmp_path, hidden_size=9, head_dim=4).head_dim == 4


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.mark.parametrize(("said", "seen"), [(None, 0), (ABSENT, 4096), (1 << 20, 0), (7, 7)])
def test_all_layers_of_mistral_see_a_window(tmp_path, said, seen):
    config = read(tmp_path, **MISTRAL, sliding_window=said)
    assert (config.family, config.max_positions) == ("llama", 131072)
    assert config.window_of(0) == seen and (config.local is None or config.local.rope_theta == config.rope_theta)


def test_windows_beside_scaled_rotations_are_refused(tmp_path):
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert read(tmp_path, **MISTRAL, sliding_window=None, rope_scaling=scaling).rope_scaling.factor == 2
    with pytest.raises(Unsupported, match="sliding_window: not with scaled rotations: use another model"):
        read(tmp_path, **MISTRAL, sliding_window=7, rope_scaling=scaling)


def test_a_missing_architecture_is_taken_from_the_model_type(tmp_path):
    assert read(tmp_path, architectures=None).family == "llama"


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_scaling": None}, 10000.0, None),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 5.0}}, 5.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 6.0}, 5.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 10000.0, RopeScaling(kind="linear", factor=2.0)),
        (
            {"rope_scaling": LLAMA3, "rope_theta": 6.0},
            6.0,
            RopeScaling(
                kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
            ),
        ),
        (  # outside of rope_parameters it wins
            {"rope_parameters": LLAMA3, "original_max_position_embeddings": 512},
            10000.0,
            RopeScaling(
                kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=512
            ),
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5.0, "original_max_position_embeddings": None}},
            5.0,
            RopeScaling(
                kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=2048
            ),
        ),
    ],
)
def test_rotary_embeddings(tmp_path, changes, theta, scaling):
    config = read(tmp_path, **changes)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


# Frequencies 1 to 6 and the factor of cosine and sine by ROPE_INIT_FUNCTIONS["yarn"] of Transformers 5.23, heads of 32.
YARN = [
    (
        {"factor": 4.0, "original_max_position_embeddings": 64},
        [0.477990121, 0.221359432, 0.097805366, 0.039999999, 0.014058532, 0.007905695],
        1.138629436111989,
    ),
    (
        {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.0},
        [0.477990121, 0.221359432, 0.097805366, 0.039999999, 0.014058532, 0.007905695],
        1.138629436111989,
    ),
    (
        {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7,
         "mscale_all_dim": 1.0},
        [0.316316992, 0.03952847, 0.022228492, 0.0125, 0.007029266, 0.003952847],
        0.9483558523503399,
    ),
    (
        {"factor": 2.5, "original_max_position_embeddings": 100, "truncate": False, "attention_factor": 1.3},
        [0.492155105, 0.237290561, 0.111243457, 0.050075725, 0.022493653, 0.012649111],
        1.3,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "frequencies", "sharpness"), YARN)
def test_yarn_is_that_of_transformers(tmp_path, scaling, frequencies, sharpness):
    config = read(tmp_path, head_dim=32, rope_scaling={"rope_type": "yarn", "rope_theta": 10000.0} | scaling)
    assert inverse_frequencies(config)[1:7].tolist() == pytest.approx(frequencies, rel=1e-6)
    assert config.score_scale == pytest.approx(sharpness**2 / 32**0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("eos", "bos", "expected"),
    [
        (3, 1, ((3,), 1)),
        ([3, 4, 3], 1, ((3, 4), 1)),
        (ABSENT, ABSENT, ((2,), 1)),
        (None, None, ((), None)),
        (-1, -1, ((), None)),
        (99, 99, ((), None)),
    ],
)
def test_token_ids(tmp_path, eos, bos, expected):
    config = read(tmp_path, eos_token_id=eos, bos_token_id=bos)
    assert (config.eos_ids, config.bos_id) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        {"use_sliding_window": True},
        {"is_causal": False},
        {"use_bidirectional_attention": True},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": None, "model_type": "gemma2"},
        {"architectures": None, "model_type": None},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"quantization_config": {}},
    ],
)
def test_what_is_not_done(tmp_path, changes):
    with pytest.raises(Unsupported) as caught:
        read(tmp_path, **changes)
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


def test_quantised_folders_say_what_to_use(tmp_path):
    with pytest.raises(Unsupported, match=r"'gptq'.*: use the unquantised repository, or a GGUF file in Q8_0"):
        read(tmp_path, quantization_config={"quant_method": "gptq"})


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, -1, 1 << 40, 10**4000, True, 8.0, "8", [8]], ids=range(8))
def test_impossible_sizes(tmp_path, key, value):
    with pytest.raises(FormatError) as caught:
        read(tmp_path, **{key: value})
    assert key in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("key", SIZES)
def test_missing_sizes(tmp_path, key):
    with pytest.raises(FormatError, match=f"{key}: is missing: add it"):
        read(tmp_path, **{key: ABSENT})


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("num_key_value_heads", {"num_attention_heads": 4, "num_key_value_heads": 3}),
        ("hidden_size", {"hidden_size": 9}),
        ("head_dim", {"head_dim": 5}),
        ("hidden_size", {"hidden_size": 6, "num_attention_heads": 2}),
        ("hidden_size", {"hidden_size": 4096, "num_attention_heads": 2}),
        ("head_dim", {"head_dim": 0}),
        ("hidden_size", {"hidden_size": 2, "num_attention_heads": 4}),
        ("rms_norm_eps", {"rms_norm_eps": 0}),
        ("rms_norm_eps", {"rms_norm_eps": -1e-5}),
        ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
        ("rms_norm_eps", {"rms_norm_eps": True}),
        ("rms_norm_eps", {"rms_norm_eps": 1e300}),
        ("rope_theta", {"rope_theta": 1e-300}),
        ("rope_theta", {"rope_theta": 0}),
        ("rope_theta", {"rope_theta": float("inf")}),
        ("rope_theta", {"rope_theta": 10**400}),
        ("rope_theta", {"rope_theta": "10000"}),
        ("max_position_embeddings", {"max_position_embeddings": 1 << 40}),
        ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
        ("hidden_act", {"hidden_act": 3}),
        ("model_type", {"model_type": "mistral"}),
        ("architectures", {"architectures": "LlamaForCausalLM"}),
        ("eos_token_id", {"eos_token_id": [1, "2"]}),
        ("bos_token_id", {"bos_token_id": True}),
        ("rope_scaling", {"rope_scaling": "llama3"}),
        ("rope_scaling.factor", {"rope_scaling": {"type": "linear"}}),
        ("rope_scaling.factor", {"rope_scaling": {"type": "linear", "factor": 0}}),
        ("rope_scaling.high_freq_factor", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}),
        ("rope_scaling.low_freq_factor", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        ("quantization_config", {"quantization_config": []}),
        ("linear_class", {"quantization_config": {**OFFLINE, "linear_class": "linear"}}),
        ("quantization_mode", {"quantization_config": {**OFFLINE, "quantization_mode": "both"}}),
        ("quantization_config.rms_norm_eps", {"quantization_config": {**OFFLINE, "rms_norm_eps": 0}}),
        ("modules_to_not_convert", {"quantization_config": {**OFFLINE, "modules_to_not_convert": "lm_head"}}),
        ("modules_to_not_convert", {"quantization_config": {**OFFLINE, "modules_to_not_convert": [""]}}),
        ("modules_to_not_convert", {"quantization_config": {**OFFLINE, "modules_to_not_convert": ["(a+)+$"]}}),
        ("modules_to_not_convert", {"quantization_config": {**OFFLINE, "modules_to_not_convert": ["*.mlp"]}}),
        ("modules_to_not_convert", {"quantization_config": {**OFFLINE, "modules_to_not_convert": ["a.*b.*c.*"]}}),
        ("modules_to_not_convert", {"quantization_config": {**OFFLINE, "modules_to_not_convert": ["x"] * 1000}}),
    ],
)
def test_contradictions_name_the_key(tmp_path, key, changes):
    with pytest.raises(FormatError) as caught:
        read(tmp_path, **changes)
    assert f"{key}: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bitlinear_has_no_online_mode(tmp_path):
    """transformers looks at quantization_mode for autobitlinear only."""
    fields = Fields(tmp_path, {"quantization_config": {"quant_method": "bitnet", "quantization_mode": "online"}})
    quantization = read_quantization(fields)
    assert quantization.divides
    assert not quantization.online


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
MORE_KEYS = ("head_dim",
             "rope_scaling", "rope_parameters", "rope_theta", "rms_norm_eps", "hidden_act", "attention_bias",
             "eos_token_id", "bos_token_id", "max_position_embeddings")  # fmt: skip
KEYS = sorted({*folder().config, *MORE_KEYS})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), JSON | st.fixed_dictionaries({"rope_type": JSON, "factor": JSON})))
def test_any_configuration_is_read_or_refused(tmp_path, changes):
    try:
        config = read(tmp_path, **changes)
    except ModelError as error:
        assert "\n" not in str(error)
        str(error).encode("ascii")
    else:
        assert config.num_heads * config.head_dim > 0


def test_a_folder_without_config_says_so(tmp_path):
    folder().write(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FormatError, match=r"config\.json: is missing beside the weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(Unsupported, match="is an adapter, and no model: merge it"):
        open_checkpoint(tmp_path)
