"""Models by their config.json: parameters tensor by tensor, and FLOPs, are those of what transformers builds."""

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import make_transformers_defaults
import pytest

from t5bench import __main__ as program
from t5bench.costmodel import transformers_defaults
from t5bench.costmodel.flops import multiply_adds
from t5bench.costmodel.job import beyond_parts
from t5bench.costmodel.parameters import parameters, tensors
from t5bench.costmodel.transformers_config import LLAMA_3, architecture_of, keys_not_read
from t5bench.costmodel.transformers_defaults import DEFAULTS

LENGTH = 64
Sizes = Mapping[str, Any]


def decoder(kind: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, words: int, **more: Any) -> Sizes:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": words,
    } | more


def gpt2(layers: int, hidden: int, heads: int) -> Sizes:
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 50257}


def t5(layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> Sizes:
    sizes = {"num_layers": layers, "d_model": hidden, "num_heads": heads, "d_ff": ffn, "d_kv": 64, "vocab_size": 32128}
    return {"model_type": "t5"} | sizes | more


V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
# The sizes of published models.
CONFIGURATIONS: Mapping[str, Sizes] = {
    "llama-7b": decoder("llama", 32, 4096, 32, 32, 11008, 32000),
    "llama-13b": decoder("llama", 40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": decoder("llama", 80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": decoder("llama", 32, 4096, 32, 8, 14336, 128256),
    "llama-3.2-1b": decoder("llama", 16, 2048, 32, 8, 8192, 128256, head_dim=64, **TIED),
    "llama-3.2-3b": decoder("llama", 28, 3072, 24, 8, 8192, 128256, head_dim=128, **TIED),
    "tinyllama-1.1b": decoder("llama", 22, 2048, 32, 4, 5632, 32000),
    "smollm2-135m": decoder("llama", 30, 576, 9, 3, 1536, 49152, **TIED),
    "mistral-7b": decoder("mistral", 32, 4096, 32, 8, 14336, 32000, sliding_window=4096),
    "mistral-nemo": decoder("mistral", 40, 5120, 32, 8, 14336, 131072, head_dim=128, sliding_window=None),
    "qwen2-0.5b": decoder("qwen2", 24, 896, 14, 2, 4864, 151936, **TIED),
    "qwen2-7b": decoder("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-1.5b": decoder("qwen2", 28, 1536, 12, 2, 8960, 151936, **TIED),
    "qwen2.5-72b": decoder("qwen2", 80, 8192, 64, 8, 29568, 152064),
    "qwen3-0.6b": decoder("qwen3", 28, 1024, 16, 8, 3072, 151936, head_dim=128, **TIED),
    "qwen3-8b": decoder("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-32b": decoder("qwen3", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "gemma-2b": decoder("gemma", 18, 2048, 8, 1, 16384, 256000, head_dim=256),
    "gemma-7b": decoder("gemma", 28, 3072, 16, 16, 24576, 256000, head_dim=256),
    "gemma-2-2b": decoder("gemma2", 26, 2304, 8, 4, 9216, 256000, head_dim=256),
    "gemma-2-9b": decoder("gemma2", 42, 3584, 16, 8, 14336, 256000, head_dim=256),
    "gemma-3-270m": decoder("gemma3_text", 18, 640, 4, 1, 2048, 262144, head_dim=256),
    "gemma-3-1b": decoder("gemma3_text", 26, 1152, 4, 1, 6912, 262144, head_dim=256),
    "pythia-160m": decoder("gpt_neox", 12, 768, 12, 12, 3072, 50304),
    "pythia-6.9b": decoder("gpt_neox", 32, 4096, 32, 32, 16384, 50432),
    "gpt-neox-20b": decoder("gpt_neox", 44, 6144, 64, 64, 24576, 50432),
    "gpt2": gpt2(12, 768, 12),
    "gpt2-xl": gpt2(48, 1600, 25),
    "phi-1.5": decoder("phi", 24, 2048, 32, 32, 8192, 51200),
    "phi-2": decoder("phi", 32, 2560, 32, 32, 10240, 51200),
    "t5-large": t5(24, 1024, 16, 4096),
    "t5-v1.1-base": t5(12, 768, 12, 2048, **V1_1),
    "t5-v1.1-xl": t5(24, 2048, 32, 5120, **V1_1),
    "t5-small": t5(6, 512, 8, 2048),
    "t5-3b": t5(24, 1024, 32, 16384) | {"d_kv": 128},
    "t5-v1.1-small": t5(8, 512, 6, 1024, **V1_1),
    "t5-gated-relu": t5(12, 768, 12, 2048, feed_forward_proj="gated-relu", tie_word_embeddings=False),
    "t5-gated-silu-uneven": t5(6, 512, 8, 1024, feed_forward_proj="gated-silu", num_decoder_layers=2),
    "t5-as-saved": t5(6, 512, 8, 1024, dense_act_fn="gelu_new", is_gated_act=True, **V1_1),
    "mt5-small": t5(8, 512, 6, 1024) | {"model_type": "mt5", "vocab_size": 250112},
    "mt5-base": t5(12, 768, 12, 2048) | {"model_type": "mt5", "vocab_size": 250112},
    "llama-3.1-405b": decoder("llama", 126, 16384, 128, 8, 53248, 128256),
    "llama-with-biases": decoder("llama", 4, 512, 8, 8, 1024, 1000, attention_bias=True, mlp_bias=True),
    "llama-with-biases-of-attention": decoder("llama", 4, 512, 8, 4, 1024, 1000, attention_bias=True),
    "llama-with-biases-of-its-ffn": decoder("llama", 4, 512, 8, 4, 1024, 1000, mlp_bias=True),
    "qwen3-with-biases": decoder("qwen3", 4, 512, 8, 4, 1024, 1000, attention_bias=True),
    "gemma-with-biases": decoder("gemma", 4, 512, 8, 4, 1024, 1000, attention_bias=True),
    "gemma-2-with-biases": decoder("gemma2", 4, 512, 8, 4, 1024, 1000, attention_bias=True),
    "gpt-neox-without-biases-of-attention": decoder("gpt_neox", 4, 512, 8, 8, 1024, 1000, attention_bias=False),
    "smollm2-1.7b": decoder("llama", 24, 2048, 32, 32, 8192, 49152, **TIED),
    "mistral-with-biases-that-it-ignores": decoder("mistral", 4, 512, 8, 4, 1024, 1000, attention_bias=True),
    "mathstral": decoder("mistral", 32, 4096, 32, 8, 14336, 32768, sliding_window=None),
    "ministral-8b": decoder("mistral", 36, 4096, 32, 8, 12288, 131072, head_dim=128, sliding_window=32768),
    "qwen2.5-0.5b": decoder("qwen2", 24, 896, 14, 2, 4864, 151936, use_sliding_window=False, **TIED),
    "qwen2-with-heads-of-its-own": decoder("qwen2", 4, 512, 8, 2, 1024, 1000, head_dim=128),
    "qwen2.5-windows-that-no-layer-has": decoder("qwen2", 28, 1536, 12, 2, 8960, 151936, use_sliding_window=True),
    "qwen3-1.7b": decoder("qwen3", 28, 2048, 16, 8, 6144, 151936, head_dim=128, **TIED),
    "qwen3-4b": decoder("qwen3", 36, 2560, 32, 8, 9728, 151936, head_dim=128, **TIED),
    "gemma-2-27b": decoder("gemma2", 46, 4608, 32, 16, 36864, 256000, head_dim=128),
    "gemma-3-4b": decoder("gemma3_text", 34, 2560, 8, 4, 10240, 262208, head_dim=256, sliding_window=1024),
    "gemma-3-12b": decoder("gemma3_text", 48, 3840, 16, 8, 15360, 262208, head_dim=256, sliding_window=1024),
    "pythia-70m": decoder("gpt_neox", 6, 512, 8, 8, 2048, 50304),
    "pythia-1.4b": decoder("gpt_neox", 24, 2048, 16, 16, 8192, 50304, use_parallel_residual=False),
    "gpt2-medium": gpt2(24, 1024, 16),
    "gpt2-large-by-other-names": {"model_type": "gpt2", "num_hidden_layers": 36, "hidden_size": 1280, "n_head": 20},
    "gpt2-narrow-ffn": gpt2(4, 256, 4) | {"n_inner": 512, "n_positions": 2048, "tie_word_embeddings": False},
    "phi-1.5-grouped": decoder("phi", 24, 2048, 32, 8, 8192, 51200),
    "phi-2-qk-norms": decoder("phi", 32, 2560, 32, 32, 10240, 51200, qk_layernorm=True),
}
# What a layer has in one tensor here and in several there.
JOINED = (
    (r"self_attn\.[qkv]_proj", "self_attn.qkv"),
    (r"SelfAttention\.[qkv]\.", "SelfAttention.qkv."),
    (r"EncDecAttention\.[kv]\.", "EncDecAttention.kv."),
    (r"(gate|up)_proj", "gate_up"),
    (r"wi_[01]", "wi"),
)
# The same with grouped heads, whose queries are apart.
JOINED_GROUPS = ((r"self_attn\.[kv]_proj", "self_attn.kv"), *JOINED[1:])


ENCODER_DECODERS = ("t5", "mt5")


def built(config: Sizes) -> Any:
    """The model as transformers builds it, without memory and without values."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.modeling_utils import no_init_weights

    sizes = {name: value for name, value in config.items() if name != "model_type"}
    made = CONFIG_MAPPING[config["model_type"]](**sizes)
    kind = AutoModelForSeq2SeqLM if config["model_type"] in ENCODER_DECODERS else AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():
        model = kind.from_config(made, attn_implementation="eager")
    model.tie_weights()
    return model


# One of these without the others gives no model that the library could run.
TOGETHER = (("num_attention_heads", "num_key_value_heads", "hidden_size"), ("n_embd", "n_head", "hidden_size"))


def with_keys_left_out(config: Sizes, seed: int) -> Sizes:
    """The same file as another trainer may write it: some keys are left out, others say what is the default anyway."""
    choice = random.Random(seed)
    left_out = {name for name in config if choice.random() < 0.4} - {"model_type"}
    for together in TOGETHER:
        left_out -= set(together) if len(left_out & set(together)) < len(set(together) & config.keys()) else set()
    kept = {name: value for name, value in config.items() if name not in left_out}
    defaults = DEFAULTS[config["model_type"]]
    said = [name for name in defaults if name not in config and defaults[name] is not None]
    return kept | {name: defaults[name] for name in choice.sample(said, 3)}


FILES = CONFIGURATIONS | {
    f"{name}, some keys left out": with_keys_left_out(CONFIGURATIONS[name], seed)
    for seed, name in enumerate(list(CONFIGURATIONS)[::2])
}


def test_parameters_are_those_of_transformers():
    """Of more than 60 files, of which more than 20 leave keys out at random: tensor by tensor."""
    assert len(CONFIGURATIONS) >= 60 and len(FILES) >= 80
    wrong = {}
    for name, config in FILES.items():
        sizes: Counter[str] = Counter()
        a = architecture_of(config)
        for tensor, value in built(config).named_parameters():
            for pattern, joined in JOINED_GROUPS if a.kv_heads < a.heads else JOINED:
                tensor = re.sub(pattern, joined, tensor)
            sizes[tensor] += value.numel()
        own = [size for component in tensors(a).values() for size in component]
        if sorted(own) != sorted(sizes.values()):
            wrong[name] = sum(own), sum(sizes.values())
    assert not wrong


def test_the_table_of_defaults_is_that_of_the_installed_library():
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != transformers_defaults.RELEASE:
        pytest.skip(f"transformers {transformers.__version__} is not the one that the table was made from")
    made: dict[str, Any] = {}
    exec(make_transformers_defaults.text(), made)
    for name in ("OF_EVERY_KIND", "DEFAULTS", "OTHER_NAMES"):
        assert made[name] == getattr(transformers_defaults, name)


def counted_multiply_adds(model: Any, is_t5: bool) -> float:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    tokens = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    inputs = {"input_ids": tokens, "use_cache": False} | ({"decoder_input_ids": tokens} if is_t5 else {})
    counter = FlopCounterMode(display=False)
    # Tensors without memory cannot be cast automatically, which is turned off anyway around rotary positions.
    with patch("torch.autocast", lambda **options: nullcontext()), counter, torch.no_grad():
        model(**inputs)
    return counter.get_total_flops() / 2


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", FILES)
def test_flops_are_those_of_transformers(name: str):
    config = FILES[name]
    a = architecture_of(config, LENGTH)
    # The angles of rotary positions are a product, too: of head_size / 2 frequencies and the positions.
    counted = counted_multiply_adds(built(config), is_t5=a.cross_attention)
    assert sum(multiply_adds(a).values()) == pytest.approx(counted, rel=2e-3 if a.hidden <= 512 else 1e-4)


def test_the_parameters_are_the_published_ones():
    assert parameters(architecture_of(CONFIGURATIONS["llama-3-8b"])) == 8_030_261_248
    assert parameters(architecture_of(CONFIGURATIONS["qwen2-0.5b"])) == 494_032_768


LLAMA = decoder("llama", 2, 64, 4, 4, 128, 100)
QWEN2 = decoder("qwen2", 2, 64, 4, 4, 128, 100, use_sliding_window=True, max_window_layers=1)
NEOX = decoder("gpt_neox", 2, 64, 4, 4, 128, 100)
REFUSED: Sequence[tuple[Sizes, str]] = (
    ({"model_type": "mixtral", "num_local_experts": 8}, "has experts (num_local_experts)"),
    ({"model_type": "mamba2", "state_size": 128}, "layers with a state (state_size)"),
    ({"model_type": "phi", "qk_layernorm": True, "head_dim": 24}, "qk_layernorm norms heads of"),
    ({"model_type": "bert"}, "does not know models of the type 'bert'"),
    (
        LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
        "architectures names LlamaForSequenceClassification",
    ),
    (LLAMA | {"architectures": ["LlamaModel"]}, "architectures names LlamaModel"),
    (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
    (LLAMA | {"hidden_act": "mish"}, "hidden_act is 'mish'"),
    (LLAMA | {"hidden_size": 64.5}, "hidden_size must be a whole number"),
    (LLAMA | {"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number"),
    (LLAMA | {"vocab_size": None}, "vocab_size must be a whole number of at least 1, and is null"),
    (LLAMA | {"num_key_value_heads": 3}, "4 heads of queries cannot share 3 of keys"),
    (LLAMA | {"head_dim": 15}, "a head has 15 of them to turn"),
    (LLAMA | {"rope_theta": 0}, "rope_theta must be a number above 0"),
    (LLAMA | {"rope_scaling": ["linear"]}, "rope_scaling must be an object"),
    (LLAMA | {"rope_scaling": {"type": "linear", "factor": "4"}}, "factor of rope_scaling must be a number above 0"),
    (
        LLAMA | {"rope_scaling": dict.fromkeys(LLAMA_3, 1.0) | {"rope_type": "llama3"}},
        "low_freq_factor of rope_scaling",
    ),
    (NEOX | {"rotary_pct": 0.0}, "rotary_pct must be a number above 0"),
    (NEOX | {"rotary_pct": 0.2}, "a head has 3 of them to turn"),
    (NEOX | {"rope_parameters": {"partial_rotary_factor": 1.5}}, "rotary_pct is 1.5, of heads of 16 columns"),
    (LLAMA | {"torchscript": True}, "torchscript is True"),
    (LLAMA | {"pruned_heads": {"0": [1]}}, "pruned_heads is"),
    (QWEN2, "has windows in a pattern"),
    (QWEN2 | {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
    (decoder("gemma2", 2, 64, 4, None, 128, 100), "num_key_value_heads must be a whole number"),
    (decoder("gemma3_text", 2, 64, 4, 4, 128, 100, use_bidirectional_attention=True), "use_bidirectional_attention"),
    (gpt2(2, 64, 4) | {"add_cross_attention": True}, "add_cross_attention is True"),
    (gpt2(2, 65, 4), "n_head does not divide n_embd"),
    (t5(2, 64, 4, 128, tie_encoder_decoder=True), "tie_encoder_decoder is True"),
    (t5(2, 64, 4, 128, feed_forward_proj="gated-gelu-wide"), "feed_forward_proj"),
    (t5(2, 64, 4, 128, architectures=["T5EncoderModel"]), "architectures names T5EncoderModel"),
    (t5(2, 64, 4, 128, is_encoder_decoder=False), "is_encoder_decoder is False"),
    (t5(2, 64, 4, 128, relative_attention_num_buckets=2), "relative_attention_num_buckets must be a whole number of"),
    (t5(2, 64, 4, 128, relative_attention_max_distance=16), "relative_attention_max_distance is 16, not above half"),
)


def test_what_an_engine_would_compute_otherwise_is_part_of_the_kind():
    """Prices are the same, but the native engine must not train another model."""
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    for config in (
        LLAMA | yarn,
        LLAMA | {"partial_rotary_factor": 0.5},
        LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}},
        gpt2(2, 64, 4) | {"scale_attn_weights": False},
    ):
        found = architecture_of(config)
        plain = architecture_of({name: config[name] for name in config if name in (*LLAMA, *gpt2(2, 64, 4))})
        assert replace(found, kind=plain.kind) == plain
        assert "does not train models of the type" in beyond_parts(found) and not beyond_parts(plain)
    assert architecture_of(NEOX | {"partial_rotary_factor": 0.25}) == architecture_of(NEOX)


def test_rope_parameters_stand_for_what_older_files_say_one_by_one():
    new = {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}
    assert architecture_of(NEOX | new) == architecture_of(NEOX | {"rotary_emb_base": 500, "rotary_pct": 0.5})


def test_a_key_that_the_library_does_not_read_changes_nothing_and_is_named():
    foreign = LLAMA | {"unsloth_version": "2025.1", "num_key_value_head": 2, "transformers_version": "4.40.0"}
    assert architecture_of(foreign) == architecture_of(LLAMA)
    assert keys_not_read(foreign) == ["num_key_value_head", "unsloth_version"]


@pytest.mark.parametrize(("config", "says"), REFUSED)
def test_what_cannot_be_priced_is_refused(config: Sizes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert program.main(["layouts", "--gpus", "8", "--device", "h100", "--model", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_layouts_and_predict_take_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.delenv("ENGINE", raising=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGURATIONS["llama-3-8b"]))
    options = ["--device", "h100", "--model", str(path), "--json", "--defaults"]
    assert program.main(["layouts", "--gpus", "8", "--link", "400", *options]) == 0
    (best, *_) = json.loads(capsys.readouterr().out)["8"]
    assert best["seconds"] and best["missing"] == ("" if best["engine"] == "native" else "no: --model")
    assert program.main(["predict", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {sum(row["parameters"]) for row in rows if row["job"]["parallel"]["pipeline"] == 1} >= {8_030_261_248}
