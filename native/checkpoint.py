"""Checkpoints in one form, whatever divides the model: each tensor has the name and the shape of a one-process model.

    iter_0000020/__0_0.distcp ...   each process's share, by PyTorch's distributed checkpoint (DCP)
                 .metadata          which box of which tensor is where, DCP's index
                 checkpoint.json    iteration, who saved it, every file's size and checksum: written last

Each process writes boxes of `model.NAME` (fp32 weights), `exp_avg.NAME` and `exp_avg_sq.NAME`, and what its dropout
draws. What several processes hold is written once. To load, a process asks for its own boxes under its own division,
and DCP reads what overlaps: so any division continues any other's run, without a conversion, and a process holds no
more than its part and one saved box.

A checkpoint without checkpoint.json is incomplete, and latest_checkpointed_iteration.txt names the last complete one.

Saving copies what the process writes, and a thread writes the copy while training goes on (DCP's async_save does the
same, but offers no place in which to seal the checkpoint). Without memory for a copy, training waits.
"""

import contextlib
import io
import json
import os
import pickle
import zlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from native.data_parallel import TorchTrainer
from native.parallel import Mesh
from native.pieces import Piece
from t5bench import Problem

TRACKER = "latest_checkpointed_iteration.txt"
SEAL = "checkpoint.json"
INDEX = ".metadata"
FORM = 1
LEAST_MEMORY_LEFT = 2  # a copy may take one part in two of the host's available memory


def checkpoint_folder(directory: str, iteration: int) -> Path:
    return Path(directory, f"iter_{iteration:07d}")


def division_of(args: Namespace) -> dict[str, int]:
    """How the processes divide the model. `t5bench/record/checkpoints.py` has the same of a plan."""
    zero = args.deepspeed_json.get("zero_optimization", {})
    return {
        "tp": args.tp,
        "pp": args.pp,
        "dp": args.dp,
        "zero_stage": zero.get("stage", 0),
        "fsdp2_shards": (args.fsdp2_shard_size or args.dp) if args.fsdp2 else 0,
        "parts_of_a_stage": args.virtual_pipeline_stages,
        "split": getattr(args, "pipeline_model_parallel_split_rank", 0) if args.pp > 1 else 0,
    }


# ---- what DCP is told ------------------------------------------------------------------------------------------------


def chunk_of(piece: Piece) -> metadata.ChunkStorageMetadata:
    return metadata.ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.size())


class SavePlanner(DefaultSavePlanner):
    """Writes these pieces."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self.pieces = {(piece.key, piece.offsets): piece for piece in pieces}

    def create_local_plan(self) -> planner.SavePlan:
        return planner.SavePlan([self.item(piece) for piece in self.pieces.values()])

    def item(self, piece: Piece) -> planner.WriteItem:
        properties = metadata.TensorProperties(dtype=piece.tensor.dtype)
        data = planner.TensorWriteData(chunk_of(piece), properties, torch.Size(piece.shape))
        index = metadata.MetadataIndex(piece.key, piece.offsets)
        return planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: planner.WriteItem) -> Tensor:
        return self.pieces[write_item.index.fqn, tuple(write_item.index.offset)].tensor.detach()


class LoadPlanner(DefaultLoadPlanner):
    """Fills these pieces from what overlaps with them in the checkpoint."""

    def __init__(self, pieces: Sequence[Piece], folder: Path) -> None:
        super().__init__(flatten_state_dict=False)
        self.folder = folder
        self.pieces: dict[str, dict[tuple[int, ...], Piece]] = {}
        for piece in pieces:
            self.pieces.setdefault(piece.key, {})[piece.offsets] = piece

    def create_local_plan(self) -> planner.LoadPlan:
        """Raises Problem for a checkpoint of another model."""
        items = []
        for key, boxes in self.pieces.items():
            stored = self.metadata.state_dict_metadata.get(key)
            shape = torch.Size(next(iter(boxes.values())).shape)
            if stored is None or stored.size != shape:
                has = f"with the shape {list(stored.size)}" if stored else "missing"
                found = f"{key} is {has} in {self.folder}, and this run's model has it with the shape {list(shape)}"
                raise Problem(found, "Resume with the run's own model settings")
            items += create_read_items_for_chunk_list(key, stored, [chunk_of(piece) for piece in boxes.values()])
        return planner.LoadPlan(items)

    def resolve_tensor(self, read_item: planner.ReadItem) -> Tensor:
        target = self.pieces[read_item.dest_index.fqn][tuple(read_item.dest_index.offset)].tensor.detach()
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, begin, length)
        return target

    def commit_tensor(self, read_item: planner.ReadItem, tensor: Tensor) -> None:
        pass


class Checksummed(io.RawIOBase):
    """A file that is written, with its size and CRC-32."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.size = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += memoryview(data).nbytes
        return self.file.write(data)

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        self.file.flush()  # what is synced must be with the kernel
        return self.file.fileno()

    def flush(self) -> None:
        self.file.flush()


class Files(filesystem.FileSystem):
    """Keeps the size and checksum of each file that it has written, by name."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            if "w" not in mode:
                yield file
                return
            checksummed = Checksummed(file)
            yield checksummed
        self.written[Path(path).name] = (checksummed.size, checksummed.crc)


class Writer(dcp.FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = Files()

    def storage_meta(self) -> metadata.StorageMeta:
        """Without the directory's path: checkpoints are moved."""
        return metadata.StorageMeta(save_id=self.save_id)


# All that DCP's index is made of.
INDEX_CLASSES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
    )
} | {
    ("torch", "float32"): torch.float32,
    ("torch", "uint8"): torch.uint8,
    ("torch", "strided"): torch.strided,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


class IndexUnpickler(pickle.Unpickler):
    """An index is a pickle, which may name programs: only DCP's own classes are looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in INDEX_CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return INDEX_CLASSES[module, name]


class Reader(dcp.FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """Raises Problem for a file that is not DCP's index."""
        path = Path(self.path, INDEX)
        try:
            with path.open("rb") as file:
                return IndexUnpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise Problem(f"{path} cannot be read as a checkpoint's index: {error}", "Copy it again") from error


def read_pieces(folder: Path, pieces: Sequence[Piece]) -> None:
    """Fills the pieces' tensors, in this process alone. Raises Problem."""
    reader = Reader(folder)
    loading = LoadPlanner(pieces, folder)
    index = reader.read_metadata()
    loading.set_up_planner({}, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    reader.read_data(loading.create_local_plan(), loading)


def read_seal(folder: Path) -> dict[str, Any]:
    """checkpoint.json. Raises Problem for a checkpoint without one."""
    try:
        return json.loads((folder / SEAL).read_text())
    except FileNotFoundError:
        found = f"{folder} has no {SEAL}: its saving did not end, or an earlier release saved it"
        raise Problem(found, "python -m t5bench reshape RUN writes an earlier release's checkpoint anew") from None


# ---- saving ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What one process writes of a checkpoint, and what is said about it."""

    iteration: int
    pieces: Sequence[Piece]
    seal: Mapping[str, Any]
    read_from: Sequence[int]
    """The ranks whose files this process reads if it continues."""


class Saver:
    """Saves checkpoints of a trainer. All processes call its methods together."""

    def __init__(self, trainer: TorchTrainer, args: Namespace, mesh: Mesh) -> None:
        self.trainer = trainer
        self.args = args
        self.mesh = mesh
        # Of its own, because a thread uses it while training uses the others.
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.unfinished: Future[None] | None = None

    def save(self, iteration: int) -> None:
        """Training goes on when this process's share is copied, or if there is no memory for a copy, written."""
        self.finish()
        share = self.share(iteration)
        if not has_memory_for(share.pieces):
            self.write(share)
            return
        pieces = [piece._replace(tensor=piece.tensor.detach().to("cpu", copy=True)) for piece in share.pieces]
        self.unfinished = self.thread.submit(self.write, Share(iteration, pieces, share.seal, share.read_from))

    def check(self) -> None:
        """Raises what has gone wrong in the thread."""
        if self.unfinished and self.unfinished.done():
            self.finish()

    def finish(self) -> None:
        """Waits until the last checkpoint is complete."""
        if self.unfinished:
            self.unfinished.result()
        self.unfinished = None

    def close(self) -> None:
        self.finish()
        self.thread.shutdown()

    def share(self, iteration: int) -> Share:
        args = self.args
        pieces = [*self.trainer.pieces(), *dropout_pieces(args, self.mesh)]
        seal = {
            "form": FORM,
            "iteration": iteration,
            "step": self.trainer.updates,
            "consumed_samples": iteration * args.global_batch_size,
            "precision": "bf16" if args.bf16 else "fp32",
            "division": division_of(args),
            "has_dropout": True,
            "learning_rate": {
                name: getattr(args, name)
                for name in ("lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "train_iters")
            },
            "optimizer": {
                name: getattr(args, name) for name in ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay")
            },
        }
        own = [piece for piece in pieces if piece.writer == args.rank]
        return Share(iteration, own, seal, sorted({piece.writer for piece in pieces}))

    def write(self, share: Share) -> None:
        folder = checkpoint_folder(self.args.save, share.iteration)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SEAL).unlink(missing_ok=True)  # of an attempt before
        writer = Writer(folder)
        index = dcp.save({}, storage_writer=writer, planner=SavePlanner(share.pieces), process_group=self.group)
        told: list[Any] = [None] * self.args.world_size
        dist.all_gather_object(told, (writer.fs.written, share.read_from), group=self.group)
        if self.args.local_rank == 0:
            self.seal(folder, index, share, told)
        dist.barrier(self.group)  # the tracker names a checkpoint once all nodes have sealed theirs
        if self.args.local_rank == 0:
            write_whole(Path(self.args.save, TRACKER), str(share.iteration).encode(), self.args.rank)
        dist.barrier(self.group)

    def seal(self, folder: Path, index: metadata.Metadata, share: Share, told: Sequence[Any]) -> None:
        """Every node's directory gets the index and the seal: it need not be the others'."""
        files = {name: list(sum_) for written, _ in told for name, sum_ in written.items() if name.endswith(".distcp")}
        if not (folder / INDEX).is_file():
            write_whole(folder / INDEX, pickle.dumps(index), self.args.rank)
        stored = (folder / INDEX).read_bytes()
        files[INDEX] = [len(stored), zlib.crc32(stored)]
        content = {**share.seal, "files": files, "read_from": [read_from for _, read_from in told]}
        write_whole(folder / SEAL, json.dumps(content).encode(), self.args.rank)


def write_whole(path: Path, content: bytes, rank: int) -> None:
    """A reader sees the old content or the new. rank: of this process, because several may write the same file."""
    own = path.with_name(f"{path.name}.{rank}")
    with own.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    own.replace(path)


def has_memory_for(pieces: Sequence[Piece]) -> bool:
    """Whether this host's processes may all copy so much."""
    needed = sum(piece.tensor.nbytes for piece in pieces) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return needed * LEAST_MEMORY_LEFT < int(value.split()[0]) * 1024
    return False


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(trainer: TorchTrainer, args: Namespace, mesh: Mesh, iteration: int) -> None:
    """Continues from any division's checkpoint. Raises Problem."""
    folder = checkpoint_folder(args.load, iteration)
    seal = read_seal(folder)
    trainer.begin_load(seal["step"])
    read_pieces(folder, trainer.pieces())
    trainer.end_load()
    load_dropout(folder, seal, args, mesh, iteration)


def load_dropout(folder: Path, seal: Mapping[str, Any], args: Namespace, mesh: Mesh, iteration: int) -> None:
    """What is drawn continues if the same processes draw it; otherwise it begins anew."""
    generators = dropout_generators(args, mesh)
    own = division_of(args)
    if not seal["has_dropout"] or any(seal["division"][size] != own[size] for size in ("tp", "pp", "dp")):
        for generator in generators.values():
            generator.manual_seed(generator.initial_seed() + iteration)
        return
    pieces = dropout_pieces(args, mesh)
    read_pieces(folder, pieces)
    for generator, piece in zip(generators.values(), pieces, strict=True):
        generator.set_state(piece.tensor)


def dropout_generators(args: Namespace, mesh: Mesh) -> dict[str, torch.Generator]:
    """What this process's dropout masks are drawn from."""
    generators = {"cpu": torch.default_generator, "tp": mesh.tp.rng}
    if args.device.type == "cuda":
        generators["cuda"] = torch.cuda.default_generators[args.device.index]
    return generators


def dropout_pieces(args: Namespace, mesh: Mesh) -> list[Piece]:
    pieces = []
    for name, generator in dropout_generators(args, mesh).items():
        state = generator.get_state()
        pieces.append(Piece(f"dropout.{args.rank}.{name}", tuple(state.shape), (0,), state, args.rank))
    return pieces
