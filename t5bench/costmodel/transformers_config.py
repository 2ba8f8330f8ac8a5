"""Models by Transformers' configurations (config.json): decoders, and T5 with its relatives.

Every key of a known kind is priced, changes nothing, or is refused by its name: what a kind's function reads is priced,
NOTHING lists what changes neither parameters nor work, and any other key of the library's class must have its default.
Where a file leaves a key out, the library's class decides (transformers_defaults.py). A key that the class does not
know is not read by the library either: keys_not_read() names these.

tests/costmodel/test_transformers_config.py compares parameters and FLOPs with the models that transformers builds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from t5bench.costmodel.job import TRAINED_KINDS, Architecture
from t5bench.costmodel.transformers_defaults import DEFAULTS, OF_EVERY_KIND, OTHER_NAMES

Config = Mapping[str, Any]
LENGTH = 4096
"""Tokens of a sample where nothing else is asked; a model that takes fewer has those."""
ENCODER_LENGTH = 512
"""The same of an encoder-decoder, whose relative positions have no end."""
LLAMA_3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
NEVER = 10**6  # of so many layers, one has global attention
OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
OF_STATES = ("ssm_cfg", "state_size", "mamba_d_state", "linear_num_value_heads")
# Transformers' names of activations.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Neither parameters nor work depend on these.
NOTHING = {
    # which words are special, and what a program does with the model afterwards
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "use_cache", "prefix",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "num_beam_groups", "diversity_penalty", "output_attentions", "output_hidden_states",
    "return_dict", "id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "problem_type",
    "tokenizer_class", "tf_legacy_loss", "is_decoder", "chunk_size_feed_forward", "cross_attention_hidden_size",
    # where the file comes from; the precision of a training is a setting
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_bfloat16", "_attn_implementation",
    "_attn_implementation_autoset", "attn_implementation", "model_type", "architectures",
    # numbers inside of what has the same shape; dropout is a setting
    "initializer_range", "initializer_factor", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta",
    "rope_scaling", "rope_parameters", "rope_local_base_freq", "rotary_pct", "rotary_emb_base", "partial_rotary_factor",
    "pretraining_tp", "attention_dropout", "hidden_dropout", "classifier_dropout", "dropout_rate", "resid_pdrop",
    "embd_pdrop", "attn_pdrop", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "relative_attention_max_distance", "use_parallel_residual", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
    # of GPT-2's heads for other tasks
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
}  # fmt: skip
# Of these, what a model's description does not carry: an engine would compute another model with another value.
COMPUTED = {
    "partial_rotary_factor": 1.0,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
# The class that each kind is priced as, and its former names. Others have another head, or a part of the model alone.
PRICED = {
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3_text": ("Gemma3ForCausalLM",),
    "gpt_neox": ("GPTNeoXForCausalLM",),
    "gpt2": ("GPT2LMHeadModel",),
    "phi": ("PhiForCausalLM",),
    "t5": ("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    "mt5": ("MT5ForConditionalGeneration",),
}


class Values:
    """What a configuration says, with the defaults of its class; it knows what was asked for.

    Its methods raise ValueError for a value that no such model has.
    """

    def __init__(self, config: Config, kind: str) -> None:
        self.config = config
        self.kind = kind
        self.defaults = DEFAULTS[kind]
        self.other_names = OTHER_NAMES[kind]
        self.read: set[str] = set()

    def of(self, key: str) -> Any:
        """The file's value, else the class's default; None for a key that is in neither."""
        self.read.add(key)
        for other, own in self.other_names.items():
            if own == key and other in self.config:  # the class sets these last
                self.read.add(other)
                return self.config[other]
        return self.config.get(key, self.defaults.get(key, OF_EVERY_KIND.get(key)))

    def number(self, key: str, otherwise: int | None = None, least: int = 1) -> int:
        """otherwise: what null stands for, and the lack of a key that the class does not have."""
        value = self.of(key)
        if value is None and otherwise is not None:
            return otherwise
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or value < least:
            raise ValueError(f"{key} must be a whole number of at least {least}, and is {_shown(value)}")
        return int(value)

    def decimal(self, key: str) -> float:
        value = self.of(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ValueError(f"{key} must be a number, and is {_shown(value)}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.of(key)
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, and is {_shown(value)}")
        return value

    def activation(self, key: str) -> str:
        value = self.of(key)
        if value not in ACTIVATIONS:
            raise ValueError(f"{key} is {_shown(value)}, which the cost model cannot price; it knows: {_KNOWN}")
        return ACTIVATIONS[value]


_KNOWN = " ".join(ACTIVATIONS)


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def architecture_of(config: Config, length: int = 0, decoder_length: int = 0) -> Architecture:
    """The model of a configuration. Raises ValueError, which names the key, for one that cannot be priced.

    length: tokens of a sample, of an encoder-decoder those of the encoder; 0: LENGTH, or the most that the model takes.
    decoder_length: of an encoder-decoder; 0: as many.
    """
    kind = _kind(config)
    values = Values(config, kind)
    if kind in ENCODER_DECODERS:
        found = _t5(values, length, decoder_length)
    else:
        if decoder_length:
            raise ValueError(f"'{kind}' is a decoder alone: its samples have one length")
        found = DECODERS[kind](values, length)
    if found.heads % found.kv_heads:
        raise ValueError(f"{found.heads} heads of queries cannot share {found.kv_heads} of keys")
    _refuse_others(values)
    for key, usual in COMPUTED.items():
        value = config.get(key, values.defaults.get(key, usual))
        if value != usual and key not in values.read and kind in TRAINED_KINDS:
            return replace(found, kind=f"{kind} with {key}={value}")
    return found


def class_of(config: Config) -> str:
    """The library's class that a configuration is priced as. Raises ValueError."""
    return PRICED[_kind(config)][0]


def keys_not_read(config: Config) -> list[str]:
    """Keys that the library's class does not know, so that its model is the same without them. Raises ValueError."""
    kind = _kind(config)
    known = DEFAULTS[kind].keys() | OTHER_NAMES[kind].keys() | OF_EVERY_KIND.keys() | NOTHING | FURTHER.get(kind, set())
    return sorted(config.keys() - known)


def _kind(config: Config) -> str:
    """The model's type. Raises ValueError where the cost model does not know it, or not with this head."""
    kind = str(config.get("model_type", ""))
    for names, what in ((OF_EXPERTS, "experts"), (OF_STATES, "layers with a state")):
        given = next((name for name in names if config.get(name)), "")
        if given:
            raise ValueError(f"'{kind}' has {what} ({given}), which the cost model cannot price")
    if kind not in PRICED:
        known = " ".join(PRICED)
        raise ValueError(f"the cost model does not know models of the type '{kind}'; it knows: {known}")
    if config.get("quantization_config"):
        raise ValueError("quantization_config: what is trained here are whole weights")
    named = config.get("architectures") or []
    others = [str(name) for name in (named if isinstance(named, list) else [named]) if name not in PRICED[kind]]
    if others:
        found = f"architectures names {' '.join(others)}, which has another head or not all parts"
        raise ValueError(f"{found}; the cost model prices {PRICED[kind][0]}")
    return kind


def _refuse_others(values: Values) -> None:
    """Raises ValueError for a key of the library's class that was not priced and is not at its default."""
    usual = {**OF_EVERY_KIND, **values.defaults}
    for key, value in values.config.items():
        own = values.other_names.get(key, key)
        if own in values.read or key in values.read or key in NOTHING or own not in usual:
            continue
        if value != usual[own] and (value or usual[own]):  # an empty list, null and false say the same
            raise ValueError(f"{key} is {_shown(value)}, which the cost model cannot price")


def _decoder(values: Values, length: int, **different: Any) -> Architecture:
    """As a Llama, but for what is different."""
    hidden = values.number("hidden_size")
    heads = values.number("num_attention_heads")
    same: dict[str, Any] = {
        "encoder_layers": 0,
        "decoder_layers": values.number("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "encoder_length": 0,
        "decoder_length": _length(values.number("max_position_embeddings"), length),
        "position_rows": values.number("max_position_embeddings"),
        "padded_vocabulary": values.number("vocab_size"),
        "family": "gpt",
        "gated": True,
        "tied": values.flag("tie_word_embeddings"),
        "positions": "rotary",
        "biases": False,
        "head_bias": False,
        "norm": "rms",
        **_rotary(values),
        "initial": "plain",
        "initial_std": values.decimal("initializer_range"),
    }
    architecture = {**same, **different}
    architecture.setdefault("head_size", hidden // heads)
    turned = architecture.get("rotary_columns") or architecture["head_size"]
    if turned % 2:
        raise ValueError(f"rotary positions turn pairs of columns, and a head has {turned} of them to turn")
    return Architecture(**architecture)


def _rotary(values: Values) -> dict[str, Any]:
    """Base and scaling of rotary positions; newer configurations have both in rope_parameters.

    No cost depends on them. A way of scaling that no engine here computes becomes part of the kind.
    """
    scaling = _scaling(values)
    # A GPT-NeoX has rotary_emb_base, whatever else its file says.
    bases = (scaling.get("rope_theta"), values.of("rotary_emb_base"), values.of("rope_theta"), 10000.0)
    base = _positive("rope_theta", next(base for base in bases if base is not None))
    way = str(scaling.get("rope_type") or scaling.get("type") or "default")
    names = {"default": (), "linear": ("factor",), "llama3": LLAMA_3}.get(way)
    kind = values.kind
    if names is None:
        kind = f"{kind} with rotary positions scaled by {way}"
    elif scaling.get("partial_rotary_factor", 1.0) != 1.0 and kind != "gpt_neox":
        kind = f"{kind} with partial_rotary_factor={scaling['partial_rotary_factor']}"
    lacking = [name for name in names or () if name not in scaling]
    if lacking:
        raise ValueError(f"rope_scaling of the type '{way}' lacks {' '.join(lacking)}")
    numbers = tuple(_positive(f"{name} of rope_scaling", scaling[name]) for name in names or ())
    if names == LLAMA_3 and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError("low_freq_factor of rope_scaling must be below high_freq_factor")
    return {"kind": kind, "rotary_base": base, "rotary_scaling": numbers}


def _scaling(values: Values) -> Mapping[str, Any]:
    given = values.of("rope_parameters") or values.of("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_scaling must be an object, and is {_shown(given)}")
    return given


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} must be a number above 0, and is {_shown(value)}")
    return float(value)


def _sizes(values: Values, none_is_all: bool = True) -> dict[str, Any]:
    """What most kinds call by the same names. none_is_all: whether null stands for as many keys as queries."""
    heads = values.number("num_attention_heads")
    return {
        "ffn": values.number("intermediate_size"),
        "kv_heads": values.number("num_key_value_heads", heads if none_is_all else None),
        "activation": values.activation("hidden_act"),
        "norm_epsilon": values.decimal("rms_norm_eps"),
    }


def _head_size(values: Values) -> int:
    """Of a kind whose head size is the heads' part of the hidden size unless the file has another."""
    return values.number("head_dim", values.number("hidden_size") // values.number("num_attention_heads"))


def _length(most: int, asked: int) -> int:
    if asked > most:
        raise ValueError(f"the model takes {most} tokens (max_position_embeddings), fewer than {asked}")
    return asked or min(LENGTH, most)


def _llama(values: Values, length: int) -> Architecture:
    biases = _biases(values.flag("attention_bias"), values.flag("mlp_bias"))
    return _decoder(values, length, **_sizes(values), head_size=_head_size(values), **biases)


def _biases(of_attention: bool, of_ffn: bool) -> dict[str, bool]:
    return {
        "biases": of_attention and of_ffn,
        "query_biases": of_attention and not of_ffn,
        "output_biases": of_attention and not of_ffn,
        "ffn_biases": of_ffn and not of_attention,
    }


def _mistral(values: Values, length: int) -> Architecture:
    window = {"window": values.number("sliding_window", 0, least=0), "global_every": NEVER}
    return _decoder(values, length, **_sizes(values), head_size=_head_size(values), **window)


def _qwen2(values: Values, length: int) -> Architecture:
    window = _qwens_window(values)
    return _decoder(values, length, **_sizes(values), head_size=_head_size(values), query_biases=True, **window)


def _qwen3(values: Values, length: int) -> Architecture:
    return _decoder(
        values,
        length,
        **_sizes(values),
        head_size=values.number("head_dim"),
        **_biases(values.flag("attention_bias"), False),
        query_key_norms=True,
        **_qwens_window(values),
    )


def _qwens_window(values: Values) -> dict[str, int]:
    """Layers from max_window_layers on have a window, where it is used at all."""
    layers = values.number("num_hidden_layers")
    first = values.number("max_window_layers", least=0)
    types = _layer_types(
        values, ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    )
    size = values.number("sliding_window", 0, least=0)
    if not values.flag("use_sliding_window") or not size:
        return {}
    return _window(types, size)


def _layer_types(values: Values, usual: Sequence[str]) -> Sequence[str]:
    types = values.of("layer_types")
    if types is None:
        return usual
    if not isinstance(types, list) or len(types) != len(usual):
        raise ValueError(f"layer_types must be a list of {len(usual)} types")
    return [str(each) for each in types]


def _window(types: Sequence[str], size: int) -> dict[str, int]:
    """Local attention in some layers: in none, in all, or in all but every n-th."""
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"layer_types has '{min(unknown)}', which the cost model cannot price")
    if "sliding_attention" not in types or not size:
        return {}
    if "full_attention" not in types:
        return {"window": size, "global_every": NEVER}
    every = types.index("full_attention") + 1
    expected = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(len(types))]
    if list(types) != expected:
        raise ValueError("layer_types (or max_window_layers) has windows in a pattern that the cost model cannot price")
    return {"window": size, "global_every": every}


def _gemma(values: Values, length: int) -> Architecture:
    values.of("hidden_activation")  # which the library does not use
    biases = _biases(values.flag("attention_bias"), False)
    sizes = _sizes(values, none_is_all=False)
    return _decoder(values, length, **sizes, head_size=values.number("head_dim"), **biases)


def _gemma2(values: Values, length: int, every: int = 2, query_key_norms: bool = False) -> Architecture:
    layers = values.number("num_hidden_layers")
    usual = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    size = values.number("sliding_window", 0, least=0)
    return _decoder(
        values,
        length,
        ffn=values.number("intermediate_size"),
        kv_heads=values.number("num_key_value_heads"),
        head_size=values.number("head_dim"),
        activation=values.activation("hidden_activation"),
        **_biases(values.flag("attention_bias"), False),
        norm_epsilon=values.decimal("rms_norm_eps"),
        post_norms=True,
        query_key_norms=query_key_norms,
        **_window(_layer_types(values, usual), size),
    )


def _gemma3(values: Values, length: int) -> Architecture:
    every = values.number("sliding_window_pattern", 6)
    return _gemma2(values, length, every, query_key_norms=True)


def _gpt_neox(values: Values, length: int) -> Architecture:
    head_size, rest = divmod(values.number("hidden_size"), values.number("num_attention_heads"))
    if rest:
        raise ValueError("num_attention_heads does not divide hidden_size")
    values.of("partial_rotary_factor")  # the class's second name for rotary_pct
    share = _scaling(values).get("partial_rotary_factor", values.decimal("rotary_pct"))
    columns = int(head_size * _positive("rotary_pct", share))
    if not 0 < columns <= head_size:
        raise ValueError(f"rotary_pct is {share}, of heads of {head_size} columns")
    return _decoder(
        values,
        length,
        ffn=values.number("intermediate_size"),
        activation=values.activation("hidden_act"),
        **_biases(values.flag("attention_bias"), True),
        gated=False,
        norm="layer",
        norm_epsilon=values.decimal("layer_norm_eps"),
        parallel_residual=values.flag("use_parallel_residual"),
        rotary_columns=columns,
    )


def _phi(values: Values, length: int) -> Architecture:
    usual = values.number("hidden_size") // values.number("num_attention_heads")
    if values.flag("qk_layernorm") and _head_size(values) != usual:
        raise ValueError(f"qk_layernorm norms heads of {usual} (hidden_size / num_attention_heads), not of head_dim")
    return _decoder(
        values,
        length,
        ffn=values.number("intermediate_size"),
        kv_heads=values.number("num_key_value_heads", values.number("num_attention_heads")),
        activation=values.activation("hidden_act"),
        head_size=_head_size(values),
        norm_epsilon=values.decimal("layer_norm_eps"),
        query_key_norms=values.flag("qk_layernorm"),
        gated=False,
        biases=True,
        norm="layer",
        one_norm=True,
        head_bias=True,
    )


def _gpt2(values: Values, length: int) -> Architecture:
    hidden = values.number("n_embd")
    heads = values.number("n_head")
    rows = values.number("n_positions")
    if hidden % heads:
        raise ValueError("n_head does not divide n_embd")
    return Architecture(
        encoder_layers=0,
        decoder_layers=values.number("n_layer"),
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=values.number("n_inner", 4 * hidden),
        encoder_length=0,
        decoder_length=_length(rows, length),
        padded_vocabulary=values.number("vocab_size"),
        family="gpt",
        activation=values.activation("activation_function"),
        tied=values.flag("tie_word_embeddings"),
        positions="learned",
        position_rows=rows,
        biases=True,
        head_bias=False,
        kind="gpt2",
        norm_epsilon=values.decimal("layer_norm_epsilon"),
        initial="scaled",
        initial_std=values.decimal("initializer_range"),
    )


def _t5(values: Values, length: int, decoder_length: int) -> Architecture:
    feed_forward = str(values.of("feed_forward_proj"))
    words = feed_forward.split("-")
    if len(words) > 2 or (len(words) == 2 and words[0] != "gated"):
        raise ValueError(f"feed_forward_proj is '{feed_forward}': neither an activation nor gated-{{activation}}")
    activation = "gelu_new" if feed_forward == "gated-gelu" else words[-1]
    if values.of("dense_act_fn") is not None:  # what the class has derived, it reads back from its own files
        activation = values.of("dense_act_fn")
    is_gated = values.flag("is_gated_act") if values.of("is_gated_act") is not None else len(words) == 2
    if activation not in ACTIVATIONS:
        raise ValueError(f"feed_forward_proj is '{feed_forward}', which the cost model cannot price")
    buckets = values.number("relative_attention_num_buckets", least=4)  # two ways, near and far
    distance = values.number("relative_attention_max_distance")
    if distance <= buckets // 2:
        found = f"{distance}, not above half of relative_attention_num_buckets ({buckets})"
        raise ValueError(f"relative_attention_max_distance is {found}, which has no logarithmic buckets")
    encoder_length = length or ENCODER_LENGTH
    layers = values.number("num_layers")
    tied = values.flag("tie_word_embeddings")
    # The class sets this before it reads other names of the number of layers.
    own_layers = values.config.get("num_layers", values.defaults["num_layers"])
    return Architecture(
        encoder_layers=layers,
        decoder_layers=values.number("num_decoder_layers", own_layers),
        hidden=values.number("d_model"),
        heads=values.number("num_heads"),
        head_size=values.number("d_kv"),
        ffn=values.number("d_ff"),
        encoder_length=encoder_length,
        decoder_length=decoder_length or encoder_length,
        padded_vocabulary=values.number("vocab_size"),
        gated=is_gated,
        activation=ACTIVATIONS[activation],
        tied=tied,
        positions="relative",
        relative_buckets=buckets,
        biases=False,
        head_bias=False,
        norm="rms",
        kind=values.kind,
        norm_epsilon=values.decimal("layer_norm_epsilon"),
        relative_distance=distance,
        scaled_scores=False,
        scaled_head=tied,
        initial="t5",
        initial_std=values.decimal("initializer_factor"),
    )


DECODERS: Mapping[str, Callable[[Values, int], Architecture]] = {
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
ENCODER_DECODERS = ("t5", "mt5")
# Keys that a kind's model reads although its class does not have them.
FURTHER = {
    "qwen2": {"head_dim"},
    "phi": {"head_dim"},
    "gemma3_text": {"sliding_window_pattern", "_sliding_window_pattern"},
    "t5": {"dense_act_fn", "is_gated_act"},
    "mt5": {"dense_act_fn", "is_gated_act"},
}
