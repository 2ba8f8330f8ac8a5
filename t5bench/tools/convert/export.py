"""Exports a trained model to a directory that Hugging Face's libraries read: the same model to the digit.

The checkpoint's files are read parameter by parameter, and written in files of a limited size, so a model of any size
needs little more memory than one such file.
"""

import argparse
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from t5bench import Problem
from t5bench.imports import import_transformers
from t5bench.tools.convert.card import model_card
from t5bench.tools.convert.foreign import of_this_model
from t5bench.tools.convert.parameter_map import EngineParameter, class_of, configuration, parameter_map
from t5bench.tools.convert.shards import HEAD, Weights
from t5bench.tools.convert.tokenizer import tokenizer_of
from t5bench.tools.convert.trained import TrainedModel

SUMMARY = "training.json"  # what the export was made from, for programs; README.md says it to people
DEFAULT_SHARD = "2GB"
NEW_TOKENS = 64


def run(arguments: argparse.Namespace) -> int:
    model = TrainedModel.of_run(arguments.run, arguments.iteration)
    export(model, arguments.output, arguments.tokenizer or model.tokenizer, arguments.max_shard_size)
    title = class_of(model.architecture)
    print(f"{arguments.output}: the model of iteration {model.iteration} for Transformers ({title})")
    return 0


def export(model: TrainedModel, output: Path, tokenizer_directory: Path, max_shard_size: str = DEFAULT_SHARD) -> None:
    """Writes the directory, or nothing. Raises Problem."""
    if output.exists():
        raise Problem(f"{output} exists", "Remove it, or name another directory")
    family = model.architecture.family
    pairs = parameter_map(model.architecture)
    with of_this_model(model.folder):
        weights = model.weights
        list(weights)  # every file is opened, and every name read
    tokenizer = tokenizer_of(tokenizer_directory, family)
    words = model.architecture.padded_vocabulary
    if len(tokenizer) > words:
        found = f"the tokenizer in {tokenizer_directory} has {len(tokenizer)} tokens, the model {words}"
        raise Problem(found, "Name the tokenizer that the run was trained with: --tokenizer DIR")
    check_shard_size(max_shard_size)
    transformers = import_transformers()
    special_tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = configuration(model, special_tokens)
    config.architectures = [class_of(model.architecture)]
    config.torch_dtype = model.dtype
    shapes = expected_shapes(getattr(transformers, class_of(model.architecture)), config)
    check_complete(pairs, shapes, weights)

    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with of_this_model(model.folder):
            write_weights(partial, pairs, shapes, weights, model.dtype, max_shard_size)
        config.save_pretrained(partial)
        generation_config(model, tokenizer).save_pretrained(partial)
        tokenizer.model_max_length = model.architecture.position_rows
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(model_card(model))
        summary = {"run": str(model.directory.resolve()), "engine": model.engine, "iteration": model.iteration}
        (partial / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_shard_size(text: str) -> None:
    """Raises Problem unless it is a size as huggingface_hub reads it."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(?:KB|MB|GB|TB)", text.upper())
    if not number or float(number[1]) <= 0:
        raise Problem(f"--max-shard-size must be a size, found '{text}'", f"For example {DEFAULT_SHARD} or 500MB")


def expected_shapes(model_class: Any, config: Any) -> dict[str, torch.Size]:
    """The parameters of Transformers' class that a file must have: of those that are tied, the first."""
    with torch.device("meta"):
        model = model_class(config)
    shapes: dict[str, torch.Size] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            shapes[name] = value.shape
        seen.add(id(value))
    return shapes


def check_complete(pairs: Mapping[str, EngineParameter], shapes: Mapping[str, torch.Size], weights: Weights) -> None:
    """Every parameter on both sides has its counterpart."""
    sources = {parameter.source for parameter in pairs.values()}
    problems = [
        ("Transformers' model needs", shapes.keys() - pairs.keys()),
        ("Transformers' model does not know", pairs.keys() - shapes.keys()),
        ("the checkpoint lacks", sources - set(weights)),
        ("the checkpoint also has", set(weights) - sources - {HEAD}),
    ]
    for what, names in problems:
        if names:
            raise Problem(f"{what} {min(names)}", "Only models that the launchers' settings describe can be converted")


def write_weights(
    directory: Path,
    pairs: Mapping[str, EngineParameter],
    shapes: Mapping[str, torch.Size],
    weights: Weights,
    dtype: torch.dtype,
    max_shard_size: str,
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        tensors = dict(converted(names, pairs, shapes, weights, dtype))
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def converted(
    names: Iterable[str],
    pairs: Mapping[str, EngineParameter],
    shapes: Mapping[str, torch.Size],
    weights: Weights,
    dtype: torch.dtype,
) -> Iterable[tuple[str, torch.Tensor]]:
    """These parameters under their names in Transformers, each a tensor of its own."""
    for name in names:
        parameter = pairs[name]
        value = parameter.view(weights[parameter.source])
        copy = torch.empty(shapes[name], dtype=dtype)
        copy.copy_(value.reshape(shapes[name]))
        yield name, copy


def generation_config(model: TrainedModel, tokenizer: Any) -> Any:
    """Greedy and short unless told otherwise; rows of the embedding that pad the vocabulary are never chosen."""
    from transformers import GenerationConfig

    words = model.architecture.padded_vocabulary
    eos = tokenizer.eos_token_id
    is_t5 = model.architecture.family == "t5"
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=eos,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos,
        decoder_start_token_id=eos if is_t5 else None,
        suppress_tokens=list(range(len(tokenizer), words)) or None,
        max_new_tokens=min(NEW_TOKENS, model.architecture.decoder_length),
    )
