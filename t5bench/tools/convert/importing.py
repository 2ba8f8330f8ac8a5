"""Imports a Hugging Face GPT-2, or a T5 that export has written, as a checkpoint of Megatron-DeepSpeed.

The checkpoint is for finetuning and evaluating in the layout that you choose: it has no optimizer states. Parameters
are read one by one, so a model takes the memory of one rank's part of it.
"""

import argparse
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from t5bench import Problem, note
from t5bench.costmodel.job import Architecture
from t5bench.imports import import_transformers
from t5bench.tools.convert.export import SUMMARY, expected_shapes
from t5bench.tools.convert.foreign import check_config
from t5bench.tools.convert.import_described import import_described, usual_engine, weight_files
from t5bench.tools.convert.parameter_map import HEAD_BIAS, LAYERNORM_EPSILON, EngineParameter, class_of, parameter_map
from t5bench.tools.convert.reshape import write
from t5bench.tools.convert.shards import HEAD, WORDS, Sharding
from t5bench.tools.convert.tokenizer import tokenizer_of
from t5bench.tools.convert.trained import DTYPES

MULTIPLE = 128  # the launchers pad a vocabulary to a multiple of this in every layout
NEVER = -1e4  # the output bias of rows that no token has
ACTIVATIONS = ("gelu", "gelu_new")
# What files have besides parameters of their own: masks, and other names of the tied embedding.
NO_PARAMETER = re.compile(r"\.attn\.(masked_)?bias$|^lm_head\.weight$|\.embed_tokens\.weight$")


def run(arguments: argparse.Namespace) -> int:
    if arguments.run.exists():
        raise Problem(f"{arguments.run} exists", "Remove it, or name another directory")
    source = arguments.directory
    if (arguments.engine or usual_engine(source)) == "native":
        import_described(source, arguments.run)
        return 0
    config = read_config(source)
    architecture = architecture_of(config)
    args = engine_arguments(architecture, config, DTYPES[arguments.precision], source)
    sharding = Sharding.of(args, arguments.tp, arguments.pp)
    check_vocabulary(source, architecture, config.vocab_size)
    weights = ImportedWeights(source, config, architecture, DTYPES[arguments.precision])
    head = {"args": args, "iteration": 0, "tokens": 0, "checkpoint_version": 3.0}
    write(head, weights, arguments.run / "checkpoints", sharding)
    print(f"{arguments.run}: {config.architectures[0]} for TP {sharding.tp} and PP {sharding.pp}. To finetune it:")
    print(f"  {command(architecture, sharding, source, arguments)}")
    if (source / SUMMARY).is_file():
        print("On the data of the run that it was exported from, leave out TOKENIZER_MODEL.")
    if config.activation_function == "gelu_new":
        print("On a CPU, where the engine's GELU is the exact one, add --openai-gelu: this model has the tanh form.")
    return 0


def command(architecture: Architecture, sharding: Sharding, source: Path, arguments: argparse.Namespace) -> str:
    """A launcher with the settings of this model."""
    precision = "" if arguments.precision == "fp32" else f"--{arguments.precision}"
    settings = f"MODEL_FAMILY={architecture.family} TOKENIZER_MODEL={shlex.quote(str(source))}"
    settings += f" HIDDEN_SIZE={architecture.hidden} NUM_ATTENTION_HEADS={architecture.heads}"
    settings += f" FFN_HIDDEN_SIZE={architecture.ffn} PRECISION_FLAG={precision}"
    if architecture.family == "t5":
        settings += (
            f" ENCODER_NUM_LAYERS={architecture.encoder_layers} DECODER_NUM_LAYERS={architecture.decoder_layers}"
        )
        settings += f" ENCODER_SEQ_LENGTH={architecture.position_rows}"
    else:
        settings += f" NUM_LAYERS={architecture.layers} SEQ_LENGTH={architecture.position_rows}"
    settings += f" OUTPUT_DIR={shlex.quote(f'{arguments.run}-finetuned')}"
    strategy = {(False, False): "ddp", (True, False): "tensor", (False, True): "pipeline", (True, True): "hybrid"}
    name = strategy[sharding.tp > 1, sharding.pp > 1]
    load = shlex.quote(str(arguments.run / "checkpoints"))
    return f"{settings} bash scripts/run_megatron_t5_{name}.sh -- --finetune --load {load}"


def read_config(directory: Path) -> Any:
    """Raises Problem for what is no model that the engine has."""
    if not (directory / "config.json").is_file():
        raise Problem(f"{directory} has no config.json", "Name a directory that Transformers has saved")
    check_config(directory)
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise Problem(f"{directory} cannot be loaded: {str(error).splitlines()[0]}") from error
    remedy = "A GPT-2, or what python -m t5bench export has written, can be imported"
    if config.model_type not in ("gpt2", "blenderbot"):
        raise Problem(f"{directory} is a {config.model_type}, which the engine does not have", remedy)
    unknown = {
        "its head is not tied to its embedding": not config.tie_word_embeddings,
        f"its activation is {config.activation_function}": config.activation_function not in ACTIVATIONS,
        "its embedding is scaled": getattr(config, "scale_embedding", False),
        "its attention is scaled by layer": getattr(config, "scale_attn_by_inverse_layer_idx", False),
        "its attention is not scaled": not getattr(config, "scale_attn_weights", True),
        f"its LayerNorm's epsilon is not {LAYERNORM_EPSILON}": (
            getattr(config, "layer_norm_epsilon", LAYERNORM_EPSILON) != LAYERNORM_EPSILON
        ),
    }
    if config.model_type == "blenderbot":
        unknown["encoder and decoder differ in their number of heads"] = (
            config.encoder_attention_heads != config.decoder_attention_heads
        )
        unknown["encoder and decoder differ in their feed-forward size"] = (
            config.encoder_ffn_dim != config.decoder_ffn_dim
        )
    for what, is_so in unknown.items():
        if is_so:
            raise Problem(f"the engine does not have the model in {directory}: {what}", remedy)
    return config


def architecture_of(config: Any) -> Architecture:
    is_t5 = config.model_type == "blenderbot"
    hidden = config.d_model if is_t5 else config.n_embd
    heads = config.encoder_attention_heads if is_t5 else config.n_head
    positions = config.max_position_embeddings
    return Architecture(
        encoder_layers=config.encoder_layers if is_t5 else 0,
        decoder_layers=config.decoder_layers if is_t5 else config.n_layer,
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=config.encoder_ffn_dim if is_t5 else config.n_inner or 4 * hidden,
        encoder_length=positions if is_t5 else 0,
        decoder_length=positions,
        padded_vocabulary=-(-config.vocab_size // MULTIPLE) * MULTIPLE,
        family="t5" if is_t5 else "gpt",
        head_bias=is_t5,
        position_rows=positions,
    )


def engine_arguments(architecture: Architecture, config: Any, dtype: torch.dtype, source: Path) -> Namespace:
    """What the engine and these conversions read of a checkpoint's arguments."""
    is_t5 = architecture.family == "t5"
    layers = architecture.encoder_layers if is_t5 else architecture.decoder_layers
    return Namespace(
        num_layers=layers,
        encoder_num_layers=layers,
        decoder_num_layers=architecture.decoder_layers if is_t5 else None,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.ffn,
        num_attention_heads=architecture.heads,
        num_key_value_heads=architecture.heads,
        kv_channels=architecture.head_size,
        seq_length=architecture.position_rows,
        encoder_seq_length=architecture.position_rows,
        decoder_seq_length=architecture.position_rows if is_t5 else None,
        max_position_embeddings=architecture.position_rows,
        add_position_embedding=True,
        padded_vocab_size=architecture.padded_vocabulary,
        make_vocab_size_divisible_by=MULTIPLE,
        tokenizer_type="HFTokenizer",
        tokenizer_model=str(source.resolve()),
        vocab_file=None,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        bias_gelu_fusion=False,
        openai_gelu=config.activation_function == "gelu_new",
        layernorm_epsilon=LAYERNORM_EPSILON,
        init_method_std=config.init_std if is_t5 else config.initializer_range,
        hidden_dropout=config.dropout if is_t5 else config.resid_pdrop,
        attention_dropout=config.attention_dropout if is_t5 else config.attn_pdrop,
        swiglu=False,
        untie_embeddings_and_output_weights=False,
        deepspeed=False,
        ds_pipeline_enabled=False,
        zero_stage=0,
    )


def check_vocabulary(source: Path, architecture: Architecture, model_words: int) -> None:
    """Raises Problem unless the engine, which only knows the tokenizer, will have as many rows."""
    words = len(tokenizer_of(source, architecture.family))
    rows = -(-words // MULTIPLE) * MULTIPLE
    if rows != architecture.padded_vocabulary:
        found = f"the tokenizer in {source} has {words} tokens, so the engine's embedding would have {rows} rows"
        raise Problem(
            f"{found}, but the model's has {architecture.padded_vocabulary}", "Name a model with its tokenizer"
        )
    if words > model_words:
        note(f"note: the tokenizer has {words} tokens, the model {model_words}; the others begin as average words")


class ImportedWeights(Mapping[str, Tensor]):
    """The parameters by the engine's names, read when they are asked for."""

    def __init__(self, source: Path, config: Any, architecture: Architecture, dtype: torch.dtype) -> None:
        """Raises Problem for files that are not this model's."""
        self._words = config.vocab_size
        self._rows = architecture.padded_vocabulary
        self._dtype = dtype
        self._files = weight_files(source)
        self._parts: dict[str, list[tuple[str, EngineParameter]]] = {}
        self._names: dict[str, str] = {}  # in the files, by the names in Transformers' class
        for name, parameter in parameter_map(architecture).items():
            # GPT-2's own files have these names without the prefix.
            stored = name if name in self._files else name.removeprefix("transformer.")
            if stored not in self._files:
                raise Problem(f"the files in {source} lack {name}", "Save the model again with save_pretrained")
            self._names[name] = stored
            self._parts.setdefault(parameter.source, []).append((stored, parameter))
        self._check_files(source, config, architecture)
        if architecture.family == "t5":
            self._check_positions(source)

    def _check_files(self, source: Path, config: Any, architecture: Architecture) -> None:
        """Parameters of other sizes would be cut wrong, and others would be left out unseen."""
        used = {stored: name for name, stored in self._names.items()}
        other = sorted(name for name in self._files.keys() - used.keys() if not NO_PARAMETER.search(name))
        if other:
            found = f"the files in {source} also have {other[0]}, which the engine's model lacks"
            raise Problem(found, "Save the language model alone")
        expected = expected_shapes(getattr(import_transformers(), class_of(architecture)), config)
        for stored, name in used.items():
            shape = self._shape(stored)
            if shape != list(expected[name]):
                found = f"{stored} in {source} has the shape {shape}, but its config.json means {list(expected[name])}"
                raise Problem(found, "Save the model again with save_pretrained")

    def _check_positions(self, source: Path) -> None:
        encoder, decoder = (self._read(f"model.{stack}.embed_positions.weight") for stack in ("encoder", "decoder"))
        if not encoder.equal(decoder):
            found = f"encoder and decoder in {source} have different position embeddings; the engine's share one table"
            raise Problem(found, "Import a model that python -m t5bench export has written")

    def _read(self, stored: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[stored], framework="pt") as file:
            return file.get_tensor(stored)

    def _shape(self, stored: str) -> list[int]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._files[stored], framework="pt") as file:
                return file.get_slice(stored).get_shape()
        except SafetensorError as error:
            raise Problem(f"{self._files[stored]} cannot be read: {error}", "Copy it again") from error

    def __getitem__(self, name: str) -> Tensor:
        parts = [(self._read(stored), parameter) for stored, parameter in self._parts[WORDS if name == HEAD else name]]
        first, parameter = parts[0]
        if len(parts) == 1 or parameter.source.endswith("position_embeddings.weight"):
            whole = parameter.view(first)  # these views are their own inverses
        else:
            shape = (sum(len(part) for part, _ in parts), *first.shape[1:])
            whole = torch.empty(shape, dtype=first.dtype)
            for part, parameter in parts:
                view = parameter.view(whole)
                view.copy_(part.reshape(view.shape))
        if name == HEAD_BIAS:
            return padded(whole.flatten(), self._rows, NEVER).to(self._dtype)
        if name in (WORDS, HEAD):
            return padded(whole, self._rows, whole.float().mean(0)).to(self._dtype)
        return whole.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        yield from self._parts
        yield HEAD

    def __len__(self) -> int:
        return len(self._parts) + 1


def padded(value: Tensor, rows: int, filling: Tensor | float) -> Tensor:
    """With more rows: an average word's embedding, which is never the likeliest, or such a bias."""
    more = torch.empty(rows - len(value), *value.shape[1:], dtype=value.dtype)
    more[:] = filling
    return torch.cat([value, more])
