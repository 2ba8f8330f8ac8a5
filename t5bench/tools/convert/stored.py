"""The form in which the native engine saves, in one process: whole tensors read from it, and written into it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from native.form import Reader, SavePlanner, write_form
from native.pieces import KINDS, Piece
from t5bench import Problem
from t5bench.checkpoint_form import SEAL, Division, Seal, damage_of, read_seal
from t5bench.tools.convert.foreign import COPY_AGAIN
from t5bench.tools.convert.shards import HEAD, WORDS, Weights


def is_stored(folder: Path) -> bool:
    """Whether a checkpoint has this form."""
    return (folder / SEAL).is_file()


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a kind, by the names of their parameters; each is read when it is asked for."""

    def __init__(self, folder: Path, kind: str) -> None:
        """kind: of native.pieces.KINDS. Raises Problem for a checkpoint that is damaged or not complete."""
        for name, sums in read_seal(folder).files.items():
            what = damage_of(folder / name, sums)
            if what:
                raise Problem(f"{folder / name} {what}", COPY_AGAIN)
        self._reader = Reader(folder)
        self._index = self._reader.read_metadata()
        self._kind = kind
        prefix = f"{kind}."
        stored = self._index.state_dict_metadata
        self._shapes = {key.removeprefix(prefix): stored[key].size for key in stored if key.startswith(prefix)}

    def __getitem__(self, name: str) -> Tensor:
        stored = WORDS if name == HEAD else name
        shape = tuple(self._shapes[stored])
        whole = torch.empty(shape)
        self._reader.fill(self._index, [Piece(f"{self._kind}.{stored}", shape, (0,) * len(shape), whole, 0)])
        return whole

    def __iter__(self) -> Iterator[str]:
        yield from self._shapes
        yield HEAD

    def __len__(self) -> int:
        return len(self._shapes) + 1


class _Planner(SavePlanner):
    """Writes tensors that are read when it is their turn."""

    def __init__(self, values: Mapping[str, Weights]) -> None:
        self.values = values
        pieces = []
        for kind in KINDS:
            for name in values[kind]:
                if name != HEAD:
                    shape = tuple(values[kind][name].shape)
                    held = torch.empty(shape, device="meta")
                    pieces.append(Piece(f"{kind}.{name}", shape, (0,) * len(shape), held, 0))
        super().__init__(pieces)

    def resolve_data(self, write_item: Any) -> Tensor:
        kind, _, name = write_item.index.fqn.partition(".")
        return self.values[kind][name].float().contiguous()


def write_stored(
    folder: Path,
    values: Mapping[str, Weights],
    iteration: int,
    updates: int,
    samples: int,
    schedule: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint from which RESUME=1 continues under any strategy, by one process.

    values: by kind, by the parameter's name; the weights are fp32. updates: AdamW's steps. samples: consumed so far.
    schedule: the engine's arguments of native.checkpoint.SCHEDULE, if they are known.
    """
    seal = Seal(iteration, updates, samples, Division(), has_dropout=False)
    if schedule:
        planned = schedule["train_iters"] * schedule["global_batch_size"]
        seal = replace(seal, learning_rate=schedule, planned_samples=[planned])
    write_form(folder, _Planner(values), seal)
