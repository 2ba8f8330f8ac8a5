"""What the conversions accept of files that others wrote: types and ranges, checked before anything is built."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from t5bench import Problem
from t5bench.given_files import read_json

# Far beyond every model: a larger number is a mistake, and building what it asks for would take hours or all memory.
Layers = Annotated[int, Meta(ge=1, le=10_000)]
Heads = Annotated[int, Meta(ge=1, le=1 << 14)]
Size = Annotated[int, Meta(ge=1, le=1 << 22)]
Rows = Annotated[int, Meta(ge=1, le=1 << 27)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ranks = Annotated[int, Meta(ge=1, le=1 << 20)]
SAVE_AGAIN = "Save the model again with save_pretrained"
COPY_AGAIN = "Copy every node's checkpoint files to this directory again"


class Gpt2(Struct):
    """config.json of a GPT-2; what it lacks has the library's default."""

    n_layer: Layers = 12
    n_head: Heads = 12
    n_embd: Size = 768
    n_inner: Size | None = None
    n_positions: Size = 1024
    vocab_size: Rows = 50257
    activation_function: str = "gelu_new"
    resid_pdrop: Share = 0.1
    embd_pdrop: Share = 0.1
    attn_pdrop: Share = 0.1
    layer_norm_epsilon: Annotated[float, Meta(gt=0, lt=1)] = 1e-5
    initializer_range: Annotated[float, Meta(ge=0, le=100)] = 0.02

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")


class Blenderbot(Struct):
    """config.json of a Blenderbot, as export writes it."""

    encoder_layers: Layers = 2
    decoder_layers: Layers = 24
    encoder_attention_heads: Heads = 32
    decoder_attention_heads: Heads = 32
    d_model: Size = 2560
    encoder_ffn_dim: Size = 10240
    decoder_ffn_dim: Size = 10240
    max_position_embeddings: Size = 128
    vocab_size: Rows = 8008
    activation_function: str = "gelu"
    dropout: Share = 0.1
    attention_dropout: Share = 0.0
    activation_dropout: Share = 0.0
    init_std: Annotated[float, Meta(ge=0, le=100)] = 0.02

    def __post_init__(self) -> None:
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            if self.d_model % getattr(self, name):
                raise ValueError(f"{name} {getattr(self, name)} does not divide d_model {self.d_model}")


class EngineArguments(Struct):
    """What the conversions read of the arguments in a checkpoint of Megatron-DeepSpeed."""

    num_layers: Layers
    hidden_size: Size
    ffn_hidden_size: Size
    num_attention_heads: Heads
    padded_vocab_size: Rows
    tensor_model_parallel_size: Ranks
    pipeline_model_parallel_size: Ranks
    deepspeed: bool
    max_position_embeddings: Size | None = None
    layernorm_epsilon: Annotated[float, Meta(gt=0, lt=1)] = 1e-5
    make_vocab_size_divisible_by: Rows = 128
    encoder_num_layers: Layers | None = None
    decoder_num_layers: Layers | None = None
    num_key_value_heads: Heads | None = None
    kv_channels: Size | None = None
    zero_stage: Annotated[float, Meta(ge=0, le=3)] = 0  # the engine's default is 1.0

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"{self.num_attention_heads} heads do not divide the hidden size {self.hidden_size}")


CONFIGURATIONS: Mapping[str, type[Struct]] = {"gpt2": Gpt2, "blenderbot": Blenderbot}


def check_config(directory: Path) -> None:
    """Checks a model's config.json, as far as its kind is one of ours. Raises Problem."""
    path = directory / "config.json"
    kind = read_json(path, dict[str, Any], SAVE_AGAIN).get("model_type")
    if not isinstance(kind, str):
        raise Problem(f"{path} does not say what kind of model it is of: its model_type is {kind!r}", SAVE_AGAIN)
    if kind in CONFIGURATIONS:
        read_json(path, CONFIGURATIONS[kind], SAVE_AGAIN)


def arguments_of(content: Any, path: Path) -> Namespace:
    """The engine's arguments in a checkpoint file's content. Raises Problem."""
    args = content.get("args")
    if not isinstance(args, Namespace):
        raise Problem(f"{path} has no arguments of the engine", COPY_AGAIN)
    try:
        msgspec.convert(vars(args), EngineArguments)
    except msgspec.ValidationError as error:
        raise Problem(f"{path} has arguments that no engine takes: {error}", COPY_AGAIN) from error
    return args


@contextlib.contextmanager
def of_this_model(folder: Path) -> Iterator[None]:
    """Makes a Problem of what reading raises where the files in a folder are not of the model that they describe."""
    try:
        yield
    except Problem:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        found = f"the checkpoint in {folder} does not hold what its arguments describe: {error!r}"
        raise Problem(found, COPY_AGAIN) from error
    except RuntimeError as error:  # torch's, for tensors of other shapes
        found = f"the checkpoint in {folder} has tensors of other shapes than its arguments describe: {error}"
        raise Problem(found, COPY_AGAIN) from error
