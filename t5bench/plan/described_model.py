"""MODEL: a model that a config.json of Transformers describes, as the settings of a run.

The setting's value becomes the description itself, as JSON: every node and every later command then reads the same
model, wherever the file is.
"""

import json
import os
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
from t5bench.record.settings import DEFAULT_PRESET, MODEL_FAMILIES, TABLE, declarations_of
from t5bench.text import guard_streams
from t5bench.unread import never_wait

REMEDY = "Give a config.json of Transformers, a directory that has one, or a published model's name"
MOST_BYTES = 1 << 20
# Of the settings that are sizes, by the engine's argument for each, the description's name for it.
PARTS = {
    "--hidden-size": "hidden",
    "--num-attention-heads": "heads",
    "--ffn-hidden-size": "ffn",
    "--num-layers": "decoder_layers",
    "--encoder-num-layers": "encoder_layers",
    "--decoder-num-layers": "decoder_layers",
    "--seq-length": "decoder_length",
    "--encoder-seq-length": "encoder_length",
    "--decoder-seq-length": "decoder_length",
}
SIZES = [entry.name for entry in TABLE if entry.argument in PARTS]
LENGTHS = [name for name in SIZES if name.endswith("SEQ_LENGTH")]
# What follows from MODEL alone, unlike lengths.
FOLLOWING = ("MODEL_FAMILY", *(name for name in SIZES if name not in LENGTHS))


def described(value: str, directory: str, lengths: Mapping[str, int], preset: str) -> Architecture:
    """The model of a value of MODEL. Raises Problem for one that is not read, or that the native engine cannot train.

    directory: where a relative path begins. lengths: the settings of sequences' lengths that are given. preset: a value
    of MODEL_PRESET, for the others.
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
        model = with_lengths(model, lengths, preset)
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


def with_lengths(model: Architecture, given: Mapping[str, int], preset: str) -> Architecture:
    """The model with the lengths that are given, else those of its family's preset, or the most that it takes.

    Raises ValueError for a part that the engine lacks, or for lengths that the model does not take.
    """
    presets = MODEL_FAMILIES[model.family].presets
    usual = presets.get(preset, presets[DEFAULT_PRESET])
    lengths = {name: given.get(name, usual[name]) for name in usual if name.endswith("SEQ_LENGTH")}
    if model.family == "t5":
        encoder_length = lengths["ENCODER_SEQ_LENGTH"]
        model = replace(model, encoder_length=encoder_length, decoder_length=lengths["DECODER_SEQ_LENGTH"])
    else:
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
    own = [entry for entry in declarations_of(model.family) if entry.argument in PARTS]
    return {entry.name: str(getattr(model, PARTS[entry.argument])) for entry in own}


def with_model(environ: Mapping[str, str], directory: str) -> dict[str, str]:
    """The environment with MODEL as a description, and the settings that follow from it; as it is without MODEL.

    Raises Problem, also for a size or a family that says something else.
    """
    settings = dict(environ)
    if not environ.get("MODEL"):
        return settings
    lengths = {}
    for name in LENGTHS:
        if environ.get(name, "").isdecimal():
            lengths[name] = int(environ[name])
    model = described(environ["MODEL"], directory, lengths, environ.get("MODEL_PRESET", ""))
    follows = {"MODEL_FAMILY": model.family, **sizes_of(model)}
    for name, value in follows.items():
        found = environ.get(name)
        if found and found != value and name in FOLLOWING:
            raise Problem(f"MODEL has {name}={value}, but {name} is {found}", f"Unset {name}, or MODEL")
    return settings | follows | {"MODEL": model.description(), "ENGINE": environ.get("ENGINE") or "native"}


def main() -> int:
    """For scripts: the settings of the environment's MODEL as lines NAME=VALUE. sys.argv: the user's directory."""
    try:
        settings = with_model(os.environ, sys.argv[1])
    except Problem as problem:
        note(problem.report)
        return EXIT_CONFIGURATION
    for name, value in settings.items():
        if name not in SIZES and value != os.environ.get(name):
            print(f"{name}={value}")
    return 0


if __name__ == "__main__":
    guard_streams()
    never_wait("stderr")
    sys.exit(main())
