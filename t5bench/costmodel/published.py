"""Published models by name: what their config.json say of the model, for MODEL and for predictions."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def _decoder(
    kind: str, layers: int, hidden: int, heads: int, groups: int, ffn: int, words: int, length: int, **more: Any
) -> Config:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": words,
        "max_position_embeddings": length,
    } | more


def _neox(layers: int, hidden: int, heads: int) -> Config:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    numbers = {"rotary_pct": 0.25, "rotary_emb_base": 10000, "layer_norm_eps": 1e-5, "hidden_act": "gelu"}
    rest = {"vocab_size": 50304, "max_position_embeddings": 2048, "use_parallel_residual": True}
    return (
        {"model_type": "gpt_neox", "intermediate_size": 4 * hidden, "tie_word_embeddings": False}
        | sizes
        | numbers
        | rest
    )


def _gpt2(layers: int, hidden: int, heads: int) -> Config:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"} | sizes


def _t5(kind: str, layers: int, hidden: int, heads: int, ffn: int, words: int = 32128, **more: Any) -> Config:
    sizes = {"num_layers": layers, "d_model": hidden, "num_heads": heads, "d_ff": ffn, "d_kv": 64, "vocab_size": words}
    return {"model_type": kind, "layer_norm_epsilon": 1e-6} | sizes | more


_TIED = {"tie_word_embeddings": True}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_LLAMA_3_2 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6}

PUBLISHED: Mapping[str, Config] = {
    # Of the repository llama2.c.
    "stories15m": _decoder("llama", 6, 288, 6, 6, 768, 32000, 256, rms_norm_eps=1e-5, **_TIED),
    "smollm2-135m": _decoder(
        "llama", 30, 576, 9, 3, 1536, 49152, 8192, rms_norm_eps=1e-5, rope_theta=1e5, initializer_range=1 / 24, **_TIED
    ),
    "tinyllama-1.1b": _decoder("llama", 22, 2048, 32, 4, 5632, 32000, 2048, rms_norm_eps=1e-5),
    "llama-3.2-1b": _decoder(
        "llama", 16, 2048, 32, 8, 8192, 128256, 131072,
        rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=_LLAMA_3_2, **_TIED,
    ),
    "mistral-7b": _decoder("mistral", 32, 4096, 32, 8, 14336, 32000, 32768, rms_norm_eps=1e-5, sliding_window=4096),
    "qwen2.5-0.5b": _decoder("qwen2", 24, 896, 14, 2, 4864, 151936, 32768, **_QWEN, **_TIED),
    "qwen3-0.6b": _decoder("qwen3", 28, 1024, 16, 8, 3072, 151936, 40960, head_dim=128, **_QWEN, **_TIED),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "pythia-70m": _neox(6, 512, 8),
    "pythia-160m": _neox(12, 768, 12),
    "t5-small": _t5("t5", 6, 512, 8, 2048),
    "t5-base": _t5("t5", 12, 768, 12, 3072),
    "t5-v1.1-small": _t5("t5", 8, 512, 6, 1024, **_GATED),
    "t5-v1.1-base": _t5("t5", 12, 768, 12, 2048, **_GATED),
    "t5-v1.1-large": _t5("t5", 24, 1024, 16, 2816, **_GATED),
    "mt5-small": _t5("mt5", 8, 512, 6, 1024, 250112, **_GATED),
}  # fmt: skip
