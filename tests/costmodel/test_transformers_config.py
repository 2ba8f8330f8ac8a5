"""Models by their config.json: parameters tensor by tensor, and FLOPs, are those of what transformers builds."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from t5bench import __main__ as program
from t5bench.costmodel.flops import multiply_adds
from t5bench.costmodel.parameters import parameters, tensors
from t5bench.costmodel.transformers_config import architecture_of

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


def built(config: Sizes) -> Any:
    """The model as transformers builds it, without memory."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    sizes = {name: value for name, value in config.items() if name != "model_type"}
    made = CONFIG_MAPPING[config["model_type"]](**sizes)
    kind = AutoModelForSeq2SeqLM if config["model_type"] == "t5" else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(made, attn_implementation="eager")


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
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_parameters_and_flops_are_those_of_transformers(name: str):
    config = CONFIGURATIONS[name]
    model = built(config)
    sizes: Counter[str] = Counter()
    a = architecture_of(model.config.to_dict(), LENGTH)
    for tensor, value in model.named_parameters():
        for pattern, joined in JOINED_GROUPS if a.kv_heads < a.heads else JOINED:
            tensor = re.sub(pattern, joined, tensor)
        sizes[tensor] += value.numel()
    own = [size for component in tensors(a).values() for size in component]
    assert sorted(own) == sorted(sizes.values())
    # The angles of rotary positions are a product, too: of head_size / 2 frequencies and the positions.
    counted = counted_multiply_adds(model, is_t5=a.cross_attention)
    assert sum(multiply_adds(a).values()) == pytest.approx(counted, rel=1e-4)


def test_published_configurations_are_enough():
    """A file that leaves out what transformers has a default for: 30 models or more."""
    assert len(CONFIGURATIONS) >= 30
    assert parameters(architecture_of(CONFIGURATIONS["llama-3-8b"])) == 8_030_261_248
    assert parameters(architecture_of(CONFIGURATIONS["qwen2-0.5b"])) == 494_032_768


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "has experts"),
        ({"model_type": "mamba2", "state_size": 128}, "layers with a state"),
        ({"model_type": "bert"}, "does not know models of the type 'bert'"),
        (decoder("llama", 2, 64, 4, 4, 128, 100, attention_bias=True), "its attention has biases"),
        (decoder("qwen2", 2, 64, 4, 4, 128, 100, use_sliding_window=True, max_window_layers=1), "only its last layers"),
        ({"model_type": "llama", "hidden_size": 64}, "'num_attention_heads' is missing"),
    ],
)
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
    assert best["seconds"] and best["missing"] == "no: --model"
    assert program.main(["predict", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {sum(row["parameters"]) for row in rows if row["job"]["parallel"]["pipeline"] == 1} >= {8_030_261_248}
