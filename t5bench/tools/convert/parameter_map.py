"""The classes of Transformers that are the engines' models to the digit, and where each parameter has its counterpart.

A GPT is a GPT2LMHeadModel. The T5 that Megatron trains (LayerNorm before each block, learned positions, biases, a tied
head with a bias) is no T5ForConditionalGeneration, but a BlenderbotForConditionalGeneration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from t5bench import Problem
from t5bench.costmodel.job import Architecture
from t5bench.costmodel.transformers_config import PRICED
from t5bench.tools.convert.shards import WORDS
from t5bench.tools.convert.trained import TrainedModel

POSITIONS = "language_model.embedding.position_embeddings.weight"
HEAD_BIAS = "lm_head.bias"
LAYERNORM_EPSILON = 1e-5  # the only one that Blenderbot has


@dataclass(frozen=True)
class EngineParameter:
    """Where a parameter of Transformers is in the engine's model."""

    source: str
    """The engine's name of the parameter."""
    view: Callable[[Tensor], Tensor]
    """A view into the engine's parameter. Reading it exports; copying into it imports."""


def as_it_is(parameter: Tensor) -> Tensor:
    return parameter


def transposed(parameter: Tensor) -> Tensor:
    """GPT-2's Conv1D has its weights as [inputs, outputs]."""
    return parameter.T


def third(number: int) -> Callable[[Tensor], Tensor]:
    """Of self-attention's [query | key | value]."""
    return lambda parameter: parameter.chunk(3)[number]


def half_of_heads(number: int, heads: int) -> Callable[[Tensor], Tensor]:
    """Of cross-attention's [key | value] for every head: [heads, head size] or [heads, head size, inputs]."""
    return lambda parameter: parameter.unflatten(0, (heads, 2, -1))[:, number]


def one_row(parameter: Tensor) -> Tensor:
    return parameter.unsqueeze(0)


def both_ends(name: str, source: str, view: Callable[[Tensor], Tensor] = as_it_is) -> dict[str, EngineParameter]:
    """Weight and bias."""
    return {f"{name}.{end}": EngineParameter(f"{source}.{end}", view) for end in ("weight", "bias")}


def linear_gpt2(name: str, source: str) -> dict[str, EngineParameter]:
    return {
        f"{name}.weight": EngineParameter(f"{source}.weight", transposed),
        f"{name}.bias": EngineParameter(f"{source}.bias", as_it_is),
    }


def parameter_map(architecture: Architecture) -> dict[str, EngineParameter]:
    """By the name of the parameter in Transformers. Raises Problem for a model that has no such class."""
    if architecture.kind:
        return MAPS[architecture.kind](architecture)
    check(architecture)
    return blenderbot_map(architecture) if architecture.family == "t5" else gpt2_map(architecture)


def check(architecture: Architecture) -> None:
    lacks = {
        "a gated feed-forward": architecture.gated,
        "grouped queries": architecture.kv_heads != architecture.heads,
        "a head with weights of its own": not architecture.tied,
        f"{architecture.positions} positions": architecture.positions != "learned",
        "RMSNorm": architecture.norm != "layer",
        "linear layers without biases": not architecture.biases,
        "heads that are not hidden size / heads wide": architecture.query != architecture.hidden,
    }
    for what, is_so in lacks.items():
        if is_so:
            remedy = "Only models that the launchers' settings describe can be converted"
            raise Problem(f"the model has {what}, which GPT-2 and Blenderbot lack", remedy)


def gpt2_map(architecture: Architecture) -> dict[str, EngineParameter]:
    pairs = {
        "transformer.wte.weight": EngineParameter(WORDS, as_it_is),
        "transformer.wpe.weight": EngineParameter(POSITIONS, as_it_is),
        **both_ends("transformer.ln_f", "language_model.encoder.final_layernorm"),
    }
    for number in range(architecture.layers):
        ours = f"language_model.encoder.layers.{number}"
        theirs = f"transformer.h.{number}"
        pairs |= both_ends(f"{theirs}.ln_1", f"{ours}.input_layernorm")
        pairs |= linear_gpt2(f"{theirs}.attn.c_attn", f"{ours}.self_attention.query_key_value")
        pairs |= linear_gpt2(f"{theirs}.attn.c_proj", f"{ours}.self_attention.dense")
        pairs |= both_ends(f"{theirs}.ln_2", f"{ours}.post_attention_layernorm")
        pairs |= linear_gpt2(f"{theirs}.mlp.c_fc", f"{ours}.mlp.dense_h_to_4h")
        pairs |= linear_gpt2(f"{theirs}.mlp.c_proj", f"{ours}.mlp.dense_4h_to_h")
    return pairs if architecture.tied else pairs | weight("lm_head", "lm_head")


def blenderbot_map(architecture: Architecture) -> dict[str, EngineParameter]:
    pairs = {
        "model.shared.weight": EngineParameter(WORDS, as_it_is),
        "final_logits_bias": EngineParameter(HEAD_BIAS, one_row),
    }
    for stack, layers in (("encoder", architecture.encoder_layers), ("decoder", architecture.decoder_layers)):
        pairs[f"model.{stack}.embed_positions.weight"] = EngineParameter(POSITIONS, as_it_is)
        pairs |= both_ends(f"model.{stack}.layer_norm", f"language_model.{stack}.final_layernorm")
        for number in range(layers):
            ours = f"language_model.{stack}.layers.{number}"
            theirs = f"model.{stack}.layers.{number}"
            pairs |= both_ends(f"{theirs}.self_attn_layer_norm", f"{ours}.input_layernorm")
            for part, projection in enumerate(("q_proj", "k_proj", "v_proj")):
                source = f"{ours}.self_attention.query_key_value"
                pairs |= both_ends(f"{theirs}.self_attn.{projection}", source, third(part))
            pairs |= both_ends(f"{theirs}.self_attn.out_proj", f"{ours}.self_attention.dense")
            pairs |= both_ends(f"{theirs}.fc1", f"{ours}.mlp.dense_h_to_4h")
            pairs |= both_ends(f"{theirs}.fc2", f"{ours}.mlp.dense_4h_to_h")
            if stack == "encoder":
                pairs |= both_ends(f"{theirs}.final_layer_norm", f"{ours}.post_attention_layernorm")
            else:
                pairs |= cross_attention_map(ours, theirs, architecture.heads)
    return pairs


def cross_attention_map(ours: str, theirs: str, heads: int) -> dict[str, EngineParameter]:
    pairs = both_ends(f"{theirs}.encoder_attn_layer_norm", f"{ours}.post_attention_layernorm")
    pairs |= both_ends(f"{theirs}.encoder_attn.q_proj", f"{ours}.inter_attention.query")
    for part, projection in enumerate(("k_proj", "v_proj")):
        source = f"{ours}.inter_attention.key_value"
        pairs |= both_ends(f"{theirs}.encoder_attn.{projection}", source, half_of_heads(part, heads))
    pairs |= both_ends(f"{theirs}.encoder_attn.out_proj", f"{ours}.inter_attention.dense")
    return pairs | both_ends(f"{theirs}.final_layer_norm", f"{ours}.post_inter_attention_layernorm")


# ---- models that a config.json describes -----------------------------------------------------------------------------


def weight(name: str, source: str, view: Callable[[Tensor], Tensor] = as_it_is) -> dict[str, EngineParameter]:
    return {f"{name}.weight": EngineParameter(f"{source}.weight", view)}


def half(number: int) -> Callable[[Tensor], Tensor]:
    """Of [key | value] of grouped heads, or of a feed-forward's [gate | up]."""
    return lambda parameter: parameter.chunk(2)[number]


def heads_first(heads: int) -> Callable[[Tensor], Tensor]:
    """Of [query | key | value]: all three of the first head, then of the next, as GPT-NeoX has them."""
    return lambda parameter: parameter.unflatten(0, (3, heads, -1)).transpose(0, 1)


def projections(a: Architecture, theirs: str, names: tuple[str, str, str], ours: str) -> dict[str, EngineParameter]:
    """Self-attention's queries, keys and values, with their biases if they have any."""
    sources = [(f"{ours}.query_key_value", third(number)) for number in range(3)]
    if a.kv_heads < a.heads:
        sources = [(f"{ours}.query", as_it_is), (f"{ours}.key_value", half(0)), (f"{ours}.key_value", half(1))]
    pairs: dict[str, EngineParameter] = {}
    for name, (source, view) in zip(names, sources, strict=True):
        with_bias = a.biases or a.query_biases
        pairs |= (both_ends if with_bias else weight)(f"{theirs}.{name}", source, view)
    return pairs


def llama_map(a: Architecture) -> dict[str, EngineParameter]:
    """And Mistral, Qwen 2 and Qwen 3."""
    pairs = weight("model.embed_tokens", WORDS.removesuffix(".weight"))
    pairs |= weight("model.norm", "language_model.encoder.final_layernorm")
    output = both_ends if a.biases or a.output_biases else weight
    linear = both_ends if a.biases or a.ffn_biases else weight
    for number in range(a.layers):
        ours = f"language_model.encoder.layers.{number}"
        theirs = f"model.layers.{number}"
        pairs |= weight(f"{theirs}.input_layernorm", f"{ours}.input_layernorm")
        pairs |= weight(f"{theirs}.post_attention_layernorm", f"{ours}.post_attention_layernorm")
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        pairs |= projections(a, theirs, names, f"{ours}.self_attention")
        if a.query_key_norms:
            pairs |= weight(f"{theirs}.self_attn.q_norm", f"{ours}.self_attention.query_layernorm")
            pairs |= weight(f"{theirs}.self_attn.k_norm", f"{ours}.self_attention.key_layernorm")
        pairs |= output(f"{theirs}.self_attn.o_proj", f"{ours}.self_attention.dense")
        pairs |= linear(f"{theirs}.mlp.gate_proj", f"{ours}.mlp.dense_h_to_4h", half(0))
        pairs |= linear(f"{theirs}.mlp.up_proj", f"{ours}.mlp.dense_h_to_4h", half(1))
        pairs |= linear(f"{theirs}.mlp.down_proj", f"{ours}.mlp.dense_4h_to_h")
    return pairs if a.tied else pairs | weight("lm_head", "lm_head")


def neox_map(a: Architecture) -> dict[str, EngineParameter]:
    pairs = weight("gpt_neox.embed_in", WORDS.removesuffix(".weight"))
    pairs |= both_ends("gpt_neox.final_layer_norm", "language_model.encoder.final_layernorm")
    for number in range(a.layers):
        ours = f"language_model.encoder.layers.{number}"
        theirs = f"gpt_neox.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"):
            pairs |= both_ends(f"{theirs}.{name}", f"{ours}.{name}")
        source = f"{ours}.self_attention.query_key_value"
        linear = both_ends if a.biases else weight
        pairs |= linear(f"{theirs}.attention.query_key_value", source, heads_first(a.heads))
        pairs |= linear(f"{theirs}.attention.dense", f"{ours}.self_attention.dense")
    return pairs if a.tied else pairs | weight("embed_out", "lm_head")


def t5_map(a: Architecture) -> dict[str, EngineParameter]:
    pairs = weight("shared", WORDS.removesuffix(".weight"))
    for stack, layers in (("encoder", a.encoder_layers), ("decoder", a.decoder_layers)):
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        pairs |= weight(table, f"language_model.{stack}.relative_positions")
        pairs |= weight(f"{stack}.final_layer_norm", f"language_model.{stack}.final_layernorm")
        for number in range(layers):
            ours = f"language_model.{stack}.layers.{number}"
            theirs = f"{stack}.block.{number}.layer"
            names = ("SelfAttention.q", "SelfAttention.k", "SelfAttention.v")
            pairs |= projections(a, f"{theirs}.0", names, f"{ours}.self_attention")
            pairs |= weight(f"{theirs}.0.SelfAttention.o", f"{ours}.self_attention.dense")
            pairs |= weight(f"{theirs}.0.layer_norm", f"{ours}.input_layernorm")
            pairs |= weight(f"{theirs}.1.layer_norm", f"{ours}.post_attention_layernorm")
            last = 1
            if stack == "decoder":
                last = 2
                cross = f"{theirs}.1.EncDecAttention"
                pairs |= weight(f"{cross}.q", f"{ours}.inter_attention.query")
                for part, name in enumerate("kv"):
                    view = half_of_heads(part, a.heads)
                    pairs |= weight(f"{cross}.{name}", f"{ours}.inter_attention.key_value", view)
                pairs |= weight(f"{cross}.o", f"{ours}.inter_attention.dense")
                pairs |= weight(f"{theirs}.2.layer_norm", f"{ours}.post_inter_attention_layernorm")
            feed_forward = f"{theirs}.{last}.DenseReluDense"
            inner = f"{ours}.mlp.dense_h_to_4h"
            if a.gated:
                pairs |= weight(f"{feed_forward}.wi_0", inner, half(0)) | weight(f"{feed_forward}.wi_1", inner, half(1))
            else:
                pairs |= weight(f"{feed_forward}.wi", inner)
            pairs |= weight(f"{feed_forward}.wo", f"{ours}.mlp.dense_4h_to_h")
    return pairs if a.tied else pairs | weight("lm_head", "lm_head")


CLASSES = {"gpt": "GPT2LMHeadModel", "t5": "BlenderbotForConditionalGeneration"}


def class_of(a: Architecture) -> str:
    """The name of the model's class in Transformers."""
    return PRICED[a.kind][0] if a.kind else CLASSES[a.family]


MAPS: Mapping[str, Callable[[Architecture], dict[str, EngineParameter]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), llama_map),
    "gpt2": gpt2_map,
    "gpt_neox": neox_map,
    **dict.fromkeys(("t5", "mt5"), t5_map),
}


ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}


def described_configuration(a: Architecture, special_tokens: Mapping[str, int | None]) -> Any:
    """The configuration of a model that a config.json has described, from its parts."""
    from transformers import AutoConfig

    values: dict[str, Any] = {"vocab_size": a.padded_vocabulary, "tie_word_embeddings": a.tied, **special_tokens}
    activation = ACTIVATIONS[a.activation]
    if a.kind in ("t5", "mt5"):
        feed_forward = f"gated-{activation.removesuffix('_new')}" if a.gated else activation
        values |= {"d_model": a.hidden, "d_kv": a.head_size, "d_ff": a.ffn, "num_heads": a.heads}
        values |= {"num_layers": a.encoder_layers, "num_decoder_layers": a.decoder_layers}
        values |= {"relative_attention_num_buckets": a.relative_buckets, "feed_forward_proj": feed_forward}
        values |= {"relative_attention_max_distance": a.relative_distance, "initializer_factor": a.initial_std}
        # Samples of the training data begin with that token.
        values |= {"layer_norm_epsilon": a.norm_epsilon, "decoder_start_token_id": special_tokens["eos_token_id"]}
        return AutoConfig.for_model(a.kind, **values)
    values["initializer_range"] = a.initial_std
    if a.kind == "gpt2":
        values |= {"n_embd": a.hidden, "n_layer": a.layers, "n_head": a.heads, "n_inner": a.ffn}
        values |= {"n_positions": a.position_rows, "activation_function": activation}
        return AutoConfig.for_model(a.kind, **values, layer_norm_epsilon=a.norm_epsilon)
    values |= {"hidden_size": a.hidden, "num_hidden_layers": a.layers, "num_attention_heads": a.heads}
    values |= {"intermediate_size": a.ffn, "max_position_embeddings": a.position_rows, "hidden_act": activation}
    values |= {"rope_theta": a.rotary_base, "rope_scaling": rotary_scaling(a)}
    if a.kind == "gpt_neox":
        values |= {"rotary_pct": a.rotary_columns / a.head_size, "rotary_emb_base": a.rotary_base}
        values |= {"layer_norm_eps": a.norm_epsilon, "use_parallel_residual": a.parallel_residual}
        return AutoConfig.for_model(a.kind, **values, attention_bias=a.biases)
    values |= {"num_key_value_heads": a.kv_heads, "head_dim": a.head_size, "rms_norm_eps": a.norm_epsilon}
    if a.kind == "llama":
        values |= {"attention_bias": a.biases or a.output_biases, "mlp_bias": a.biases or a.ffn_biases}
    if a.kind == "qwen3":
        values["attention_bias"] = a.output_biases
    return AutoConfig.for_model(a.kind, **values, **windows(a))


def windows(a: Architecture) -> dict[str, Any]:
    """No sample of the training was longer than a window, but others may be."""
    if a.kind == "mistral":
        return {"sliding_window": a.window or None}
    if a.kind not in ("qwen2", "qwen3") or not a.window:
        return {}
    has_window = [(layer + 1) % a.global_every > 0 for layer in range(a.layers)]
    types = ["sliding_attention" if windowed else "full_attention" for windowed in has_window]
    return {"use_sliding_window": True, "sliding_window": a.window, "layer_types": types}


def rotary_scaling(a: Architecture) -> dict[str, Any] | None:
    if not a.rotary_scaling:
        return None
    factor, *of_llama3 = a.rotary_scaling
    if not of_llama3:
        return {"rope_type": "linear", "factor": factor}
    low, high, length = of_llama3
    factors = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return {"rope_type": "llama3", **factors, "original_max_position_embeddings": int(length)}


def configuration(model: TrainedModel, special_tokens: Mapping[str, int | None]) -> Any:
    """The model's configuration in Transformers. special_tokens: bos_token_id, eos_token_id and pad_token_id."""
    architecture = model.architecture
    if architecture.kind:
        return described_configuration(architecture, special_tokens)
    if model.args.layernorm_epsilon != LAYERNORM_EPSILON:
        raise Problem(f"the model's LayerNorm has an epsilon of {model.args.layernorm_epsilon}")
    if architecture.family == "t5":
        return blenderbot_configuration(model, special_tokens)
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=architecture.padded_vocabulary,
        n_positions=architecture.position_rows,
        n_embd=architecture.hidden,
        n_layer=architecture.layers,
        n_head=architecture.heads,
        n_inner=architecture.ffn,
        activation_function=model.activation,
        resid_pdrop=model.args.hidden_dropout,
        embd_pdrop=model.args.hidden_dropout,
        attn_pdrop=model.args.attention_dropout,
        layer_norm_epsilon=LAYERNORM_EPSILON,
        initializer_range=model.args.init_method_std,
        **special_tokens,
    )


def blenderbot_configuration(model: TrainedModel, special_tokens: Mapping[str, int | None]) -> Any:
    from transformers import BlenderbotConfig

    architecture = model.architecture
    return BlenderbotConfig(
        vocab_size=architecture.padded_vocabulary,
        max_position_embeddings=architecture.position_rows,
        d_model=architecture.hidden,
        encoder_layers=architecture.encoder_layers,
        decoder_layers=architecture.decoder_layers,
        encoder_attention_heads=architecture.heads,
        decoder_attention_heads=architecture.heads,
        encoder_ffn_dim=architecture.ffn,
        decoder_ffn_dim=architecture.ffn,
        activation_function=model.activation,
        dropout=model.args.hidden_dropout,
        attention_dropout=model.args.attention_dropout,
        activation_dropout=0.0,
        init_std=model.args.init_method_std,
        scale_embedding=False,
        # Samples of the training data begin like this.
        decoder_start_token_id=special_tokens["eos_token_id"],
        forced_eos_token_id=None,  # a habit of the chatbot that this class was written for
        **special_tokens,
    )
