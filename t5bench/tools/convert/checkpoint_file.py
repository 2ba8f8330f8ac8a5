"""Reads a checkpoint file without running anything that it names.

A file that torch.save wrote is a pickle, and a pickle names the functions that rebuild its objects. Only those listed
here are looked up, by their exact names; every other object becomes an Absent. torch.load(weights_only=True) would
refuse such files altogether, because they hold objects of the engine and of DeepSpeed.
"""

import argparse
import collections
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from t5bench import Problem
from t5bench.record.checkpoints import damage

# What tensors, their containers and the engine's arguments are made of.
KNOWN: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "Tensor"): torch.Tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): torch._tensor._rebuild_from_type_v2,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
} | {("torch", name): getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64", "int64")}
TORCHSCRIPT_MARK = "constants.pkl"


class Absent:
    """Stands for an object that is not needed to read weights: of the engine, of DeepSpeed, or of a hostile file."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class Unpickler(pickle.Unpickler):
    """torch.load takes it from this module, and resolves its own types of storage before it asks here."""

    def find_class(self, module: str, name: str) -> Any:
        return KNOWN.get((module, name), Absent)


def read_checkpoint_file(path: Path) -> Any:
    """The content of a file; its tensors stay on disk until they are used. Raises Problem for a damaged file."""
    fault = damage(path)
    if fault:
        raise Problem(f"{path} {fault}", "Copy every node's checkpoint files to this directory")
    with zipfile.ZipFile(path) as archive:
        if any(Path(name).name == TORCHSCRIPT_MARK for name in archive.namelist()):
            raise Problem(f"{path} is a TorchScript program, not a checkpoint", "Do not load files from strangers")
    this_module = sys.modules[__name__]
    try:
        content = torch.load(path, map_location="cpu", weights_only=False, pickle_module=this_module, mmap=True)
    except Exception as error:  # whatever a file that torch.save did not write makes of the unpickler
        raise Problem(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(content, dict):
        kind = "an object of an unknown class" if isinstance(content, Absent) else f"a {type(content).__name__}"
        found = f"{path} holds {kind}, where a checkpoint's file has a dictionary"
        raise Problem(found, "It is as it was written, so name the checkpoint of a run of Megatron-DeepSpeed")
    return content
