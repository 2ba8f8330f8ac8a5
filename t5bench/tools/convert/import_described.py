"""Imports a published model as the native engine's first weights, from which every strategy trains on."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from native.pieces import MOMENTS, WEIGHTS
from t5bench import Problem
from t5bench.checkpoint_form import folder_of
from t5bench.costmodel.job import TRAINED_KINDS, Architecture, beyond_parts
from t5bench.costmodel.transformers_config import architecture_of
from t5bench.given_files import read_json
from t5bench.tools.convert.parameter_map import EngineParameter, parameter_map, transposed
from t5bench.tools.convert.stored import write_stored

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
# What files have besides the parameters: masks and frequencies, and other names of a tied embedding.
NO_PARAMETER = re.compile(r"\.(masked_)?bias$|rotary_emb\.inv_freq$|^lm_head\.weight$|\.embed_tokens\.weight$")


def usual_engine(source: Path) -> str:
    """Of those that have models of this kind, the one that imports have always been for."""
    if not (source / "config.json").is_file():
        return "megatron"  # whose import says so
    config = read_json(source / "config.json", dict, "Name a directory that Transformers has saved")
    kind = config.get("model_type")
    return "native" if kind in TRAINED_KINDS and kind != "gpt2" else "megatron"


def import_described(source: Path, run: Path) -> None:
    """Writes the first weights into a run's new directory. Raises Problem."""
    model = described(source)
    folder = folder_of(run / "checkpoints", 0).resolve()
    write_stored(folder, {WEIGHTS: DescribedWeights(source, model), **{kind: {} for kind in MOMENTS}}, 0, 0, 0)
    settings = f"MODEL={shlex.quote(str(source.resolve()))} OUTPUT_DIR={shlex.quote(f'{run}-trained')}"
    words = f"{settings} bash scripts/run_megatron_t5_ddp.sh -- --initial-weights {shlex.quote(str(folder))}"
    print(f"{run}: a {model.kind} for the native engine. To train it, under any strategy:\n  {words}")
    print(f"The data must have its tokens: prepare them with TOKENIZER_MODEL={shlex.quote(str(source))}")


def described(source: Path) -> Architecture:
    """The model of a directory's config.json. Raises Problem."""
    remedy = "Name a directory that Transformers has saved"
    content = read_json(source / "config.json", dict, remedy)
    try:
        model = architecture_of(content, 1)  # weights are the same at any length
    except (KeyError, TypeError, ValueError) as error:
        raise Problem(f"{source / 'config.json'}: {error}", remedy) from error
    lacks = beyond_parts(model)
    if lacks:
        raise Problem(f"{source / 'config.json'}: {lacks}", remedy)
    return model


class DescribedWeights(Mapping[str, Tensor]):
    """The parameters by the engine's names, read from safetensors when they are asked for."""

    def __init__(self, source: Path, model: Architecture) -> None:
        """Raises Problem for files that lack a parameter or have another."""
        self._files = weight_files(source)
        self._parts: dict[str, list[tuple[str, EngineParameter]]] = {}
        used = set()
        for name, parameter in parameter_map(model).items():
            # GPT-2's own files have these names without the prefix.
            stored = name if name in self._files else name.removeprefix("transformer.")
            if stored not in self._files:
                raise Problem(f"the files in {source} lack {name}", "Save the model again with save_pretrained")
            used.add(stored)
            self._parts.setdefault(parameter.source, []).append((stored, parameter))
        other = sorted(name for name in self._files.keys() - used if not NO_PARAMETER.search(name))
        if other:
            found = f"the files in {source} also have {other[0]}, which config.json does not describe"
            raise Problem(found, "Save the language model alone")

    def __getitem__(self, name: str) -> Tensor:
        parts = [(self._read(stored), parameter) for stored, parameter in self._parts[name]]
        first, parameter = parts[0]
        if parameter.view is transposed:
            return first.T.float()
        whole = torch.empty((sum(len(part) for part, _ in parts), *first.shape[1:]))
        for part, parameter in parts:
            view = parameter.view(whole)
            view.copy_(part.reshape(view.shape))
        return whole

    def _read(self, stored: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[stored], framework="pt") as file:
            return file.get_tensor(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class SafetensorsIndex(msgspec.Struct):
    """model.safetensors.index.json."""

    weight_map: dict[str, str]
    """The file of each parameter."""


def weight_files(directory: Path) -> dict[str, Path]:
    """The file of each stored parameter. Raises Problem."""
    from safetensors import SafetensorError, safe_open

    if (directory / INDEX).is_file():
        stored = read_json(directory / INDEX, SafetensorsIndex, "Copy it again").weight_map
        files = {name: directory / file for name, file in stored.items()}
        for path in {*files.values()}:
            if path.parent != directory or not path.is_file():
                raise Problem(f"{directory / INDEX} names {path.name}, which is no file beside it", "Copy it again")
        return files
    path = directory / ONE_FILE
    if not path.is_file():
        raise Problem(f"{directory} has no {ONE_FILE}", "Save the model again: save_pretrained writes it")
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except SafetensorError as error:
        raise Problem(f"{path} cannot be read: {error}", "Copy it again") from error
