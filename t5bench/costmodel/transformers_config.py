"""Models by Transformers' configurations (config.json): decoders and T5.

What is priced: norms, rotary positions, gates, grouped queries, biases, tied heads, sliding windows. What is not is
refused. tests/costmodel/test_transformers_config.py compares parameters and FLOPs with the models that transformers
builds.
"""

from collections.abc import Callable, Mapping
from typing import Any

from t5bench.costmodel.job import Architecture

Config = Mapping[str, Any]
LENGTH = 4096
"""Tokens of a sample where nothing else is asked; a model that takes fewer has those."""
# Transformers' names of activations.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
OF_STATES = ("ssm_cfg", "state_size", "mamba_d_state", "linear_num_value_heads")


def architecture_of(config: Config, length: int = 0, decoder_length: int = 0) -> Architecture:
    """The model of a configuration. Raises ValueError for one that the cost model cannot price.

    length: tokens of a sample, of an encoder-decoder those of the encoder; 0: LENGTH, or the most that the model takes.
    decoder_length: of an encoder-decoder; 0: as many.
    """
    kind = str(config.get("model_type", ""))
    if any(config.get(name) for name in OF_EXPERTS):
        raise ValueError(f"'{kind}' has experts, which the cost model cannot price")
    if any(config.get(name) for name in OF_STATES):
        raise ValueError(f"'{kind}' has layers with a state, which the cost model cannot price")
    if kind in ("t5", "mt5"):
        return _t5(config, length, decoder_length)
    if kind not in DECODERS:
        known = " ".join((*DECODERS, "t5", "mt5"))
        raise ValueError(f"the cost model does not know models of the type '{kind}'; it knows: {known}")
    return DECODERS[kind](config, length)


def _decoder(config: Config, length: int, **different: Any) -> Architecture:
    """As a Llama, but for what is different."""
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    values: dict[str, Any] = {
        "encoder_layers": 0,
        "decoder_layers": int(config["num_hidden_layers"]),
        "hidden": hidden,
        "heads": heads,
        "head_size": int(config.get("head_dim") or hidden // heads),
        "ffn": int(config["intermediate_size"]),
        "encoder_length": 0,
        "decoder_length": _length(config.get("max_position_embeddings"), length),
        "padded_vocabulary": int(config["vocab_size"]),
        "family": "gpt",
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "gated": True,
        "activation": activation_of(config.get("hidden_act", "silu")),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "positions": "rotary",
        "biases": False,
        "head_bias": False,
        "norm": "rms",
        "kind": str(config.get("model_type", "")),
        "norm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        **_rotary(config),
        "initial": "plain",
        "initial_std": float(config.get("initializer_range", 0.02)),
    }
    return Architecture(**(values | different))


def activation_of(name: Any) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"its activation is '{name}', which is not one of: {' '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _rotary(config: Config) -> dict[str, Any]:
    """Base and scaling of rotary positions; newer configurations have both in rope_parameters."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    numbers: tuple[float, ...] = ()
    if kind == "linear":
        numbers = (float(scaling["factor"]),)
    elif kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        numbers = tuple(float(scaling[name]) for name in names)
    elif kind != "default":
        raise ValueError(f"its rotary positions are scaled in a way that is not supported: '{kind}'")
    return {"rotary_base": float(base), "rotary_scaling": numbers}


def _length(most: Any, asked: int) -> int:
    most = int(most or LENGTH)
    if asked > most:
        raise ValueError(f"the model takes {most} tokens, fewer than {asked}")
    return asked or min(LENGTH, most)


def _llama(config: Config, length: int) -> Architecture:
    biases = bool(config.get("attention_bias", False))
    if biases != bool(config.get("mlp_bias", False)):
        raise ValueError("its attention has biases and its FFN has none, or the other way round")
    return _decoder(config, length, biases=biases)


def _mistral(config: Config, length: int) -> Architecture:
    return _decoder(config, length, window=int(config.get("sliding_window") or 0), global_every=NEVER)


def _qwen2(config: Config, length: int) -> Architecture:
    return _decoder(config, length, query_biases=True, **_qwens_window(config))


def _qwen3(config: Config, length: int) -> Architecture:
    if config.get("attention_bias"):
        raise ValueError("its attention has biases and its FFN has none")
    return _decoder(config, length, query_key_norms=True, **_qwens_window(config))


def _qwens_window(config: Config) -> dict[str, int]:
    """Layers from max_window_layers on have a window, where it is used at all."""
    if not config.get("use_sliding_window"):
        return {}
    if int(config.get("max_window_layers", 0)):
        raise ValueError("only its last layers have a sliding window, which the cost model cannot price")
    return {"window": int(config["sliding_window"]), "global_every": NEVER}


NEVER = 10**6  # of so many layers, one has global attention


def _gemma(config: Config, length: int) -> Architecture:
    tied = bool(config.get("tie_word_embeddings", True))
    return _decoder(config, length, activation="gelu", tied=tied, head_size=int(config.get("head_dim", 256)))


def _gemma2(config: Config, length: int, every: int = 2, query_key_norms: bool = False) -> Architecture:
    return _decoder(
        config,
        length,
        activation="gelu",
        tied=bool(config.get("tie_word_embeddings", True)),
        head_size=int(config.get("head_dim", 256)),
        post_norms=True,
        query_key_norms=query_key_norms,
        window=int(config.get("sliding_window") or 0),
        global_every=every,
    )


def _gemma3(config: Config, length: int) -> Architecture:
    every = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    return _gemma2(config, length, every, query_key_norms=True)


def _gpt_neox(config: Config, length: int) -> Architecture:
    if not config.get("attention_bias", True):
        raise ValueError("its FFN has biases and its attention has none")
    columns = int(int(config["hidden_size"]) // int(config["num_attention_heads"]) * config.get("rotary_pct", 0.25))
    return _decoder(
        config,
        length,
        gated=False,
        kv_heads=int(config["num_attention_heads"]),
        activation=activation_of(config.get("hidden_act", "gelu")),
        biases=True,
        norm="layer",
        norm_epsilon=float(config.get("layer_norm_eps", 1e-5)),
        parallel_residual=bool(config.get("use_parallel_residual", True)),
        rotary_columns=columns,
        rotary_base=float(config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0),
    )


def _phi(config: Config, length: int) -> Architecture:
    return _decoder(
        config, length, gated=False, activation="gelu", biases=True, norm="layer", one_norm=True, head_bias=True
    )


def _gpt2(config: Config, length: int) -> Architecture:
    hidden = int(config["n_embd"])
    rows = int(config.get("n_positions", 1024))
    renamed = {
        "hidden_size": hidden,
        "num_attention_heads": config["n_head"],
        "num_hidden_layers": config["n_layer"],
        "intermediate_size": config.get("n_inner") or 4 * hidden,
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": rows,
    }
    return _decoder(
        renamed,
        length,
        gated=False,
        activation=activation_of(config.get("activation_function", "gelu_new")),
        tied=bool(config.get("tie_word_embeddings", True)),
        positions="learned",
        position_rows=rows,
        biases=True,
        norm="layer",
        kind="gpt2",
        norm_epsilon=float(config.get("layer_norm_epsilon", 1e-5)),
        initial="scaled",
        initial_std=float(config.get("initializer_range", 0.02)),
    )


def _t5(config: Config, length: int, decoder_length: int) -> Architecture:
    kind = str(config["model_type"])
    feed_forward = str(config.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu"))
    gate, _, activation = feed_forward.rpartition("-")
    if gate not in ("", "gated"):
        raise ValueError(f"its feed-forward is '{feed_forward}', which is not supported")
    activation = "gelu_new" if feed_forward == "gated-gelu" else activation
    tied = bool(config.get("tie_word_embeddings", kind == "t5"))
    heads = int(config["num_heads"])
    layers = int(config["num_layers"])
    encoder_length = length or 512
    return Architecture(
        encoder_layers=layers,
        decoder_layers=int(config.get("num_decoder_layers") or layers),
        hidden=int(config["d_model"]),
        heads=heads,
        head_size=int(config["d_kv"]),
        ffn=int(config["d_ff"]),
        encoder_length=encoder_length,
        decoder_length=decoder_length or encoder_length,
        padded_vocabulary=int(config["vocab_size"]),
        gated=gate == "gated",
        activation=activation_of(activation),
        tied=tied,
        positions="relative",
        relative_buckets=int(config.get("relative_attention_num_buckets", 32)),
        biases=False,
        head_bias=False,
        norm="rms",
        kind=kind,
        norm_epsilon=float(config.get("layer_norm_epsilon", 1e-6)),
        relative_distance=int(config.get("relative_attention_max_distance", 128)),
        scaled_scores=False,
        scaled_head=tied,
        initial="t5",
        initial_std=float(config.get("initializer_factor", 1.0)),
    )


DECODERS: Mapping[str, Callable[[Config, int], Architecture]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "phi": _phi,
}
