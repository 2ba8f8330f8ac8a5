"""The checkpoints of a run: their files, whether they are intact, and how the engines find them. Imports no torch.

Megatron-DeepSpeed's have no list of their files. They follow from strategy and layout, and each is a zip archive
written by torch.save. An archive's directory comes last, so a truncated file has none, and every tensor in it has a
CRC-32. The native engine writes a list with every file's size and CRC-32 last, when all the others are complete.

A checkpoint therefore counts as intact if every file that this node's processes will read exists and agrees with its
checksums, however the run that wrote it ended.
"""

import contextlib
import io
import pickle
import re
import shlex
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.checkpoint_form import SEAL, TRACKER, Division, Seal, checksum, damage_of, folder_of, seal_of_iteration
from t5bench.costmodel.job import Architecture
from t5bench.record.files import MOST_BYTES_OF_A_DOCUMENT, write_whole
from t5bench.record.plan import Plan

DEEPSPEED_TRACKER = "latest"
# Where `python -m t5bench reshape` puts the record of the run that it converts.
RESHAPED_FROM = "reshaped-from"
# In a directory of checkpoints from which no training can continue.
WEIGHTS_ONLY = "weights-only"
_NAME = re.compile(r"(?:iter_|global_step)(\d+)")
DIGITS = 16  # of a checksum that nodes tell each other
READERS = 4  # files at once: zlib computes CRC-32 without Python's lock


def damage(path: Path) -> str:
    """What is wrong with a file that torch.save wrote, to follow its name in a sentence; '' if it is intact."""
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
    except FileNotFoundError:
        return "is missing"
    except (zipfile.BadZipFile, EOFError, zlib.error):
        return f"is truncated (it has {path.stat().st_size:,} bytes)"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return f"is damaged ({torn} in it does not match its checksum)" if torn else ""


def is_of_an_earlier_release(folder: Path) -> bool:
    """Whether the native engine saved it in files of one layout, as it did before it had one form for all."""
    return any(folder.glob("mp_rank_*")) or any(folder.glob("*zero_pp_rank_*"))


class _Inert:
    """Stands for whatever a pickle names."""

    def __new__(cls, *_: Any, **__: Any) -> "_Inert":
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, *_: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Makes the dictionaries, texts and numbers of a file that torch.save wrote, and looks nothing up."""

    def find_class(self, module: str, name: str) -> Any:
        return dict if (module, name) == ("collections", "OrderedDict") else _Inert

    def persistent_load(self, _: Any) -> None:
        """A tensor's storage."""


def iteration_in(path: Path) -> int | None:
    """The iteration that an intact file of Megatron-DeepSpeed says it was saved at; None if it says none."""
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:  # whatever another program has written
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        if archive.getinfo(name).file_size <= MOST_BYTES_OF_A_DOCUMENT:
            said = _Unpickler(io.BytesIO(archive.read(name))).load().get("iteration")
            return said if type(said) is int else None
    return None


def _content_of(path: Path) -> str:
    """A checksum of a zip archive's content, from the checksums in its directory."""
    with zipfile.ZipFile(path) as archive:
        return checksum({entry.filename: [entry.file_size, entry.CRC] for entry in archive.infolist()})[:DIGITS]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a planned run, as the plan's node sees them."""

    plan: Plan

    @property
    def directory(self) -> Path:
        return Path(self.plan.output_dir, "checkpoints")

    def folder(self, iteration: int) -> Path:
        """DeepSpeed inside Megatron gives a checkpoint's directory its own name."""
        by_deepspeed = self.plan.zero_stage and self.plan.engine == "megatron"
        return self.directory / f"global_step{iteration}" if by_deepspeed else folder_of(self.directory, iteration)

    @property
    def division(self) -> Division:
        """How the plan's processes divide the model."""
        layout = self.plan.layout
        given = self.plan.named_arguments
        assert layout
        return Division.of(
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            zero_stage=self.plan.zero_stage,
            has_fsdp2=self.plan.strategy.has_fsdp2,
            shard_size=int(given.get("fsdp2_shard_size") or 0),
            parts=int(given.get("virtual_pipeline_stages") or 1),
            split=int(given.get("pipeline_model_parallel_split_rank") or 0),
        )

    def seal(self, iteration: int) -> Seal:
        """A native checkpoint's. Raises Problem."""
        folder = self.folder(iteration)
        if not (folder / SEAL).exists():
            if is_of_an_earlier_release(folder):
                raise Problem(f"{folder.name} was saved by an earlier release: {how_to_renew(self.plan.output_dir)}")
            raise Problem(f"{folder.name}/{SEAL} is missing: its saving did not end")
        return seal_of_iteration(self.directory, iteration)

    def files(self, ranks: Sequence[int]) -> list[str]:
        """The files in a checkpoint's directory of Megatron-DeepSpeed that these ranks read, sorted.

        Ranks count tensor parallelism fastest, then data, then pipeline parallelism, in both engines.
        """
        return sorted({name for rank in ranks for name in self._files_of(rank)})

    def _files_of(self, rank: int) -> Iterator[str]:
        layout = self.plan.layout
        stage = self.plan.zero_stage
        assert layout
        pp, dp, tp = layout.coordinates(rank)
        if stage:
            bf16 = "bf16_" if self.plan.precision == "bf16" else ""
            model_rank = pp * layout.tp + tp
            yield f"{bf16}zero_pp_rank_{dp}_mp_rank_{model_rank:02d}_optim_states.pt"
            own = f"zero_pp_rank_{dp}_" if stage == 3 else ""
            yield f"{own}mp_rank_{model_rank:02d}_model_states.pt"
            if layout.pp > 1:
                yield from (f"layer_{layer:02d}-model_{tp:02d}-model_states.pt" for layer in self._layers_of(pp))
        else:
            yield f"mp_rank_{tp:02d}{f'_{pp:03d}' if layout.pp > 1 else ''}/model_optim_rng.pt"

    def _layers_of(self, stage: int) -> range:
        """A stage's layers as DeepSpeed's pipeline counts them: 1 is the embedding, after the last comes the norm, and
        the head if its weights are separate."""
        assert self.plan.layout
        model = Architecture.of_arguments(self.plan.named_arguments, 0)
        each = model.layers // self.plan.layout.pp
        stages = self.plan.layout.pp
        first = 2 + stage * each
        after = 2 + (stage + 1) * each
        return range(first if stage else 1, after if stage < stages - 1 else after + (1 if model.tied else 2))

    def iterations(self) -> list[int]:
        """The iterations that left any checkpoint files, the newest first."""
        names = (_NAME.fullmatch(path.name) for path in self.directory.glob("*") if path.is_dir())
        return sorted({int(name[1]) for name in names if name}, reverse=True)

    def fault(self, iteration: int) -> str:
        """What this node's processes could not read of a checkpoint; '' if it is intact."""
        assert self.plan.layout
        folder = self.folder(iteration)
        ranks = self.plan.layout.ranks_of(self.plan.node)
        if self.plan.engine == "native":
            try:
                seal = self.seal(iteration)
            except Problem as problem:
                return str(problem)
            checks = {
                name: partial(damage_of, folder / name, seal.files[name])
                for name in seal.files_of(ranks, self.division)
            }
        else:
            checks = {name: partial(damage, folder / name) for name in self.files(ranks)}
        # Look for missing files before reading any.
        absent = [name for name in checks if not (folder / name).is_file()]
        if absent:
            return f"{folder.name}/{absent[0]} is missing"
        with ThreadPoolExecutor(READERS) as pool:
            found = zip(checks, pool.map(lambda check: check(), checks.values()), strict=True)
            damaged = next((f"{folder.name}/{name} {what}" for name, what in found if what), "")
        if damaged or self.plan.engine == "native":
            return damaged
        own = {iteration_in(folder / name) for name in checks} - {None, iteration}
        return f"{folder.name} holds the checkpoint of iteration {own.pop()}; its name is wrong" if own else ""

    def content(self, iteration: int) -> dict[str, str]:
        """What identifies the files of an intact checkpoint that other nodes must have alike, by their names."""
        assert self.plan.layout
        folder = self.folder(iteration)
        if self.plan.engine == "native":
            return {SEAL: self.seal(iteration).identity[:DIGITS]}
        names = self.files(self.plan.layout.ranks_of(self.plan.node))
        return {name: _content_of(folder / name) for name in names if "zero_pp_rank_" not in name}  # one rank's own

    def newest(self, limit: int | None = None) -> tuple[int, dict[int, str]]:
        """The newest intact checkpoint of at most `limit` iterations, 0 for none, and what is wrong with newer ones."""
        faults = {}
        for iteration in (each for each in self.iterations() if limit is None or each <= limit):
            fault = self.fault(iteration)
            if not fault:
                return iteration, faults
            faults[iteration] = fault
        return 0, faults

    def point_to(self, iteration: int) -> None:
        """Lets the engines find this checkpoint and no newer one, on a shared file system too. Raises OSError."""
        for newer in (each for each in self.iterations() if each > iteration):
            _set_aside(self.folder(newer))
        write_whole(self.directory / TRACKER, str(iteration))
        if (name := self.folder(iteration).name).startswith("global_step"):
            write_whole(self.directory / DEEPSPEED_TRACKER, name)


def how_to_renew(run: str) -> str:
    """What to do with an earlier release's native checkpoint."""
    return f"python -m t5bench reshape {shlex.quote(run)} writes it anew, in a directory for OUTPUT_DIR"


def _set_aside(folder: Path) -> None:
    """Moves an old checkpoint away: if a new attempt wrote into its remains, the mixture could look intact."""
    number = 0
    while (target := folder.with_name(f"{folder.name}.passed-over{f'.{number}' if number else ''}")).exists():
        number += 1
    with contextlib.suppress(FileNotFoundError):  # another node was faster
        folder.rename(target)
