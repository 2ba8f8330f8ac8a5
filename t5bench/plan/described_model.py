"""MODEL: a model that a config.json of Transformers describes, as the settings of a run.

The setting's value becomes the description itself, as JSON: every node and every later command then reads the same
model, wherever the file is.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from t5bench import EXIT_CONFIGURATION, Problem, note
from t5bench.costmodel.job import Architecture, beyond_parts
from t5bench.costmodel.published import PUBLISHED
from t5bench.costmodel.transformers_config import architecture_of
from t5bench.given_files import read_text
from t5bench.record.settings import DEFAULT_PRESET, MODEL_FAMILIES

REMEDY = "Give a config.json of Transformers, a directory that has one, or a published model's name"
MOST_BYTES = 1 << 20
# The settings that follow from MODEL alone.
SIZES = (
    *("MODEL_FAMILY", "HIDDEN_SIZE", "NUM_ATTENTION_HEADS", "FFN_HIDDEN_SIZE"),
    *("NUM_LAYERS", "ENCODER_NUM_LAYERS", "DECODER_NUM_LAYERS"),
)


def described(value: str, directory: str, lengths: Mapping[str, int]) -> Architecture:
    """The model of a value of MODEL. Raises Problem for one that is not read, or that the native engine cannot train.

    directory: where a relative path begins. lengths: the settings of sequences' lengths that are given.
    """
    if value.lstrip().startswith("{"):
        content = _decoded(value, "MODEL")
    elif value in PUBLISHED:
        content = PUBLISHED[value]
    else:
        path = Path(directory, value).expanduser()
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            known = " ".join(PUBLISHED)
            raise Problem(f"MODEL is '{value}', which is no file and no published model", f"{REMEDY}: {known}")
        content = _decoded(read_text(path, REMEDY, MOST_BYTES), str(path))
    try:
        model = Architecture.of_description(content) if "kind" in content else architecture_of(content)
        model = with_lengths(model, content, lengths)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        found = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise Problem(f"MODEL cannot be trained: {found}", REMEDY) from error
    return model


def _decoded(text: str, name: str) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{name} is no JSON: {error}", REMEDY) from error
    if not isinstance(content, dict):
        raise Problem(f"{name} is no JSON object", REMEDY)
    return content


def with_lengths(model: Architecture, content: Mapping[str, Any], given: Mapping[str, int]) -> Architecture:
    """The model with the lengths that are given, else the usual ones of its family, or the most that it takes.

    Raises ValueError for a part that the engine lacks, or for lengths that the model does not take.
    """
    usual = MODEL_FAMILIES[model.family].presets[DEFAULT_PRESET]
    lengths = {name: given.get(name, usual[name]) for name in usual if name.endswith("SEQ_LENGTH")}
    if model.family == "t5":
        model = replace(
            model, encoder_length=lengths["ENCODER_SEQ_LENGTH"], decoder_length=lengths["DECODER_SEQ_LENGTH"]
        )
    else:
        most = int(content.get("max_position_embeddings") or content.get("n_positions") or 0)
        if model.positions == "learned":
            most = model.position_rows
        if most and given.get("SEQ_LENGTH", 0) > most:
            raise ValueError(f"it takes {most} tokens, fewer than SEQ_LENGTH={given['SEQ_LENGTH']}")
        length = given.get("SEQ_LENGTH") or min(lengths["SEQ_LENGTH"], most or lengths["SEQ_LENGTH"])
        model = replace(model, decoder_length=length)
    lacks = beyond_parts(model)
    if lacks:
        raise ValueError(lacks)
    return replace(model, window=0, global_every=1)


def sizes_of(model: Architecture) -> dict[str, str]:
    """The settings that have the model's sizes."""
    sizes: dict[str, int] = {
        "HIDDEN_SIZE": model.hidden,
        "NUM_ATTENTION_HEADS": model.heads,
        "FFN_HIDDEN_SIZE": model.ffn,
    }
    if model.family == "t5":
        sizes |= {"ENCODER_NUM_LAYERS": model.encoder_layers, "DECODER_NUM_LAYERS": model.decoder_layers}
        sizes |= {"ENCODER_SEQ_LENGTH": model.encoder_length, "DECODER_SEQ_LENGTH": model.decoder_length}
    else:
        sizes |= {"NUM_LAYERS": model.decoder_layers, "SEQ_LENGTH": model.decoder_length}
    return {name: str(size) for name, size in sizes.items()}


def with_model(environ: Mapping[str, str], directory: str) -> dict[str, str]:
    """The environment with MODEL as a description, and the settings that follow from it; as it is without MODEL.

    Raises Problem, also for a size or a family that says something else.
    """
    settings = dict(environ)
    if not environ.get("MODEL"):
        return settings
    lengths = {}
    for name in ("ENCODER_SEQ_LENGTH", "DECODER_SEQ_LENGTH", "SEQ_LENGTH"):
        if environ.get(name, "").isdecimal():
            lengths[name] = int(environ[name])
    model = described(environ["MODEL"], directory, lengths)
    follows = {"MODEL_FAMILY": model.family, **sizes_of(model)}
    for name, value in follows.items():
        found = environ.get(name)
        if found and found != value and name in SIZES:
            raise Problem(f"MODEL has {name}={value}, but {name} is {found}", f"Unset {name}, or MODEL")
    return settings | follows | {"MODEL": model.description(), "ENGINE": environ.get("ENGINE") or "native"}


def main() -> int:
    """For scripts: the settings of the environment's MODEL as lines NAME=VALUE. sys.argv: the user's directory."""
    import os

    try:
        settings = with_model(os.environ, sys.argv[1])
    except Problem as problem:
        note(problem.report)
        return EXIT_CONFIGURATION
    for name in ("MODEL", "MODEL_FAMILY", "ENGINE"):
        print(f"{name}={settings[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
