"""Tiny models of every kind that a config.json describes, and Transformers' own models with the same weights."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from native.arguments import parse
from native.model import initial_value
from t5bench.costmodel.job import Architecture
from t5bench.costmodel.transformers_config import architecture_of
from t5bench.imports import import_transformers
from t5bench.tools.convert.parameter_map import parameter_map

WORDS = 250
LENGTH = 32
DECODER_LENGTH = 16
PAD = 0


def _decoder(kind: str, **more: Any) -> dict[str, Any]:
    sizes = {
        "model_type": kind,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": WORDS,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,  # so that every part counts in the loss
    }
    return sizes | more


def _t5(kind: str, **more: Any) -> dict[str, Any]:
    sizes = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 96, "d_kv": 24}
    return (
        {"model_type": kind, "vocab_size": WORDS, "relative_attention_num_buckets": 8, "initializer_factor": 0.5}
        | sizes
        | more
    )


# Several of a kind where it has parts that others lack. Their numbers are not the defaults of these.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": _decoder("llama", num_key_value_heads=1, rms_norm_eps=1e-3, rope_theta=100.0),
    "llama with biases": _decoder(
        "llama", num_key_value_heads=4, attention_bias=True, mlp_bias=True, rope_scaling=LLAMA3, head_dim=24
    ),
    "mistral": _decoder("mistral", head_dim=24, sliding_window=LENGTH, rope_theta=50.0),
    "qwen2": _decoder("qwen2", tie_word_embeddings=True, rms_norm_eps=1e-5),
    "qwen3": _decoder("qwen3", head_dim=24, vocab_size=251, tie_word_embeddings=True, rope_theta=300.0),
    "gpt2": {
        "model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_inner": 96, "vocab_size": 251,
        "n_positions": 40, "layer_norm_epsilon": 1e-3, "initializer_range": 0.1,
    },
    "gpt_neox": _decoder("gpt_neox", rotary_pct=0.5, layer_norm_eps=1e-3, hidden_act="gelu"),
    "gpt_neox without parallel residual": _decoder("gpt_neox", use_parallel_residual=False, hidden_act="gelu_new"),
    "t5": _t5("t5", relative_attention_max_distance=20),
    "t5 v1.1": _t5("t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False, layer_norm_epsilon=1e-3),
    "mt5": _t5("mt5", num_decoder_layers=3, vocab_size=251),
}  # fmt: skip


def family_of(config: Mapping[str, Any]) -> str:
    return "t5" if config["model_type"] in ("t5", "mt5") else "gpt"


def description_of(config: Mapping[str, Any]) -> Architecture:
    lengths = (LENGTH, DECODER_LENGTH) if family_of(config) == "t5" else (LENGTH,)
    return architecture_of(config, *lengths)


def arguments_of(config: Mapping[str, Any], *flags: str) -> Namespace:
    """The engine's, of one process in fp32 without dropout; more flags win."""
    a = description_of(config)
    family = family_of(config)
    words = ["--model-description", a.description(), "--hidden-size", a.hidden, "--num-attention-heads", a.heads]
    words += ["--ffn-hidden-size", a.ffn, "--max-position-embeddings", a.position_rows]
    if family == "t5":
        words += ["--encoder-num-layers", a.encoder_layers, "--decoder-num-layers", a.decoder_layers]
        words += ["--encoder-seq-length", LENGTH, "--decoder-seq-length", DECODER_LENGTH, "--tokenizer-model", "none"]
    else:
        words += ["--num-layers", a.decoder_layers, "--seq-length", LENGTH, "--vocab-file", "none"]
    words += ["--attention-dropout", 0, "--hidden-dropout", 0, "--micro-batch-size", 2, "--global-batch-size", 8]
    # With a small epsilon AdamW makes updates of gradients that are rounding alone.
    words += [
        "--adam-eps",
        1e-5,
        "--train-iters",
        100,
        "--lr",
        1e-3,
        "--data-path",
        "none",
        "--distributed-backend",
        "gloo",
    ]
    args = parse([str(word) for word in [*words, *flags]], family)
    args.padded_vocab_size = a.padded_vocabulary
    args.pad_token = PAD
    return args


def batch_of(config: Mapping[str, Any], rows: int, seed: int) -> tuple[Tensor, ...]:
    """Random tokens, some of them padding, as the engine's trainers take them."""
    random = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, WORDS, (rows, length), generator=random)

    if family_of(config) == "gpt":
        text = tokens(LENGTH + 1)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    encoder, decoder, labels = tokens(LENGTH), tokens(DECODER_LENGTH), tokens(DECODER_LENGTH)
    encoder[1::3, -7:] = PAD
    decoder[2::3, -5:] = PAD
    labels[2::3, -5:] = -1
    return encoder, decoder, labels


# ---- Transformers' own model -----------------------------------------------------------------------------------------


def reference_of(config: Mapping[str, Any], seed: int, attention: str = "eager") -> nn.Module:
    """Transformers' model with the weights from which the engine starts."""
    transformers = import_transformers()
    options = dict(config)
    kind = options.pop("model_type")
    silent = ("dropout_rate", "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout")
    options |= dict.fromkeys(silent, 0.0) | {"use_cache": False}
    their_config = transformers.AutoConfig.for_model(kind, **options)
    their_config._attn_implementation = attention
    kinds = transformers.AutoModelForSeq2SeqLM if family_of(config) == "t5" else transformers.AutoModelForCausalLM
    model = kinds.from_config(their_config)
    architecture = description_of(config)
    pairs = parameter_map(architecture)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == pairs.keys(), parameters.keys() ^ pairs.keys()
    with torch.no_grad():
        for name, value in initial_weights(config, seed).items():
            for theirs, parameter in pairs.items():
                if parameter.source == name:
                    target = parameters[theirs]
                    target.copy_(parameter.view(value).reshape(target.shape))
    return model


def initial_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """The engine's, of one process, by its names."""
    from native.model import make
    from native.parallel import Mesh

    model = make(arguments_of(config), Mesh())
    architecture = description_of(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: initial_value(name, shape, architecture, seed) for name, shape in shapes.items()}


def logits_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Transformers' logits, [b, s, vocabulary]."""
    if len(batch) == 2:
        return model(input_ids=batch[0]).logits
    encoder, decoder, _ = batch
    return model(input_ids=encoder, attention_mask=(encoder != PAD).long(), decoder_input_ids=decoder).logits


def train(config: Mapping[str, Any], args: Namespace, steps: int) -> list[tuple[float, float]]:
    """The losses and gradient norms of Transformers' model under PyTorch's own AdamW, in fp32."""
    model = reference_of(config, args.seed)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, eps=args.adam_eps, foreach=False)
    found = []
    for step in range(steps):
        micro_batches = [
            tuple(tensor.narrow(0, start, args.micro_batch_size) for tensor in batch_of(config, 8, step))
            for start in range(0, 8, args.micro_batch_size)
        ]
        total = 0.0
        for micro_batch in micro_batches:
            labels = micro_batch[-1]
            logits = logits_of(model, micro_batch)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1) / len(micro_batches)
            loss.backward()
            total += loss.item()
        norm = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, args.clip_grad / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
    return found
