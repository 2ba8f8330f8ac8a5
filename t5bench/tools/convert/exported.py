"""A model that can be used, from a run directory or from a directory for Hugging Face's libraries."""

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from t5bench import Problem, note
from t5bench.given_files import read_json
from t5bench.imports import import_transformers
from t5bench.tools.convert.export import SUMMARY, export
from t5bench.tools.convert.foreign import check_config
from t5bench.tools.convert.trained import TrainedModel

FOLDER = "huggingface"  # in a run directory: the export of its newest checkpoint


@dataclass(frozen=True)
class ExportedModel:
    directory: Path
    model: Any  # Transformers'
    tokenizer: Any
    device: torch.device

    @property
    def is_t5(self) -> bool:
        return self.model.config.is_encoder_decoder

    @property
    def length(self) -> int:
        """The longest text in tokens; relative positions, as those of MODEL's T5, have no end."""
        return getattr(self.model.config, "max_position_embeddings", sys.maxsize)

    @property
    def start(self) -> int:
        """The token that comes before a text of a GPT."""
        return self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id

    def tokens(self, text: str) -> list[int]:
        """A prompt's, or those of a part of a text: for a GPT without the `</s>` that a T5's tokenizer ends a text in,
        after which the model has learnt to begin another document."""
        return self.tokenizer(text, add_special_tokens=self.is_t5, verbose=False).input_ids


def open_model(arguments: argparse.Namespace) -> ExportedModel:
    """Raises Problem."""
    device = usable_device(arguments.device)
    directory = exported_directory(arguments.run, arguments.tokenizer)
    check_config(directory)
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        name = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
        model = getattr(transformers, name).from_pretrained(directory, dtype="auto").to(device).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, use_fast=False)
    except (OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise Problem(f"{directory} cannot be loaded: {reason}", "Remove it, and export the run again") from error
    return ExportedModel(directory, model, tokenizer, device)


def usable_device(name: str | None) -> torch.device:
    """The device of this name, or a GPU if there is one. Raises Problem if nothing can be computed there."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name or default)
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: a torch without CUDA
        reason = str(error).strip().splitlines()[0]
        raise Problem(f"--device {name} cannot be used: {reason}", f"Use {default}, or leave it out") from error
    return device


def exported_directory(path: Path, tokenizer: Path | None) -> Path:
    """The directory itself, or a run's export, which is made if it is missing or older than the newest checkpoint."""
    if (path / "config.json").is_file():
        return path
    model = TrainedModel.of_run(path)
    target = path / FOLDER
    if target.exists():
        if is_current(target, model):
            return target
        shutil.rmtree(target)
    note(f"exporting iteration {model.iteration} of {path} to {target}")
    export(model, target, tokenizer or model.tokenizer)
    return target


class Summary(msgspec.Struct):
    """What export writes of the run, as far as it is read."""

    iteration: int


def is_current(target: Path, model: TrainedModel) -> bool:
    """Whether an export is of this checkpoint, which was not written again since."""
    summary = target / SUMMARY
    try:
        if read_json(summary, Summary).iteration != model.iteration:
            return False
    except Problem:
        return False
    written = max(path.stat().st_mtime_ns for path in model.folder.rglob("*") if path.is_file())
    return written < summary.stat().st_mtime_ns
