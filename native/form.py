"""The form of a checkpoint's files, in which names and shapes are those of a one-process model.

    tensors.json       which box of which tensor is where
    __0_0.distcp ...   each process's boxes, by PyTorch's distributed checkpoint (DCP)
    checkpoint.json    iteration, who saved it, every file's size and checksum: written last
    .metadata          DCP's own index, for PyTorch's tools: a pickle, which each Python and PyTorch may write
                       differently and which may name programs, so nothing here reads it

A process names the boxes that it has, and DCP writes them; or those that it needs, and DCP reads what overlaps.
"""

import contextlib
import io
import os
import pickle
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from msgspec import Meta
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from native.pieces import Piece
from t5bench import Problem
from t5bench.checkpoint_form import COPY_AGAIN, FIRST_INDEX, INDEX, SEAL, Seal, Sums, read_seal, write_whole, writer_of
from training_comparison.given_files import read_file

DTYPES = {"float32": torch.float32, "uint8": torch.uint8}


class StoredBox(msgspec.Struct):
    """A part of a tensor, and where it is."""

    offsets: list[Annotated[int, Meta(ge=0)]]
    sizes: list[Annotated[int, Meta(ge=0)]]
    file: Annotated[str, Meta(pattern=r"^__\d+_\d+\.distcp$")]
    begin: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=0)]
    """begin, length: bytes of the file, in which torch.save wrote the box."""


class StoredTensor(msgspec.Struct):
    shape: list[Annotated[int, Meta(ge=0)]]
    dtype: Literal["float32", "uint8"]
    boxes: list[StoredBox]


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
        self.written: dict[str, Sums] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            if "w" not in mode:
                yield file
                return
            checksummed = Checksummed(file)
            yield checksummed
        self.written[Path(path).name] = Sums(checksummed.size, checksummed.crc)


class Writer(dcp.FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = Files()

    def write_data(self, plan: planner.SavePlan, planning: planner.SavePlanner) -> Future[list[WriteResult]]:
        """Writes one tensor after the other; DCP's own method keeps all of them until the file is complete."""
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        with self.fs.create_stream(Path(self.path, name), "wb") as file:
            for item in plan.items:
                tensor = planning.resolve_data(item).cpu()
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone()  # or torch.save would write all that it is a part of
                begin = file.tell()
                torch.save(tensor, file)
                length = file.tell() - begin
                results.append(WriteResult(item.index, length, filesystem._StorageInfo(name, begin, length)))
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def storage_meta(self) -> metadata.StorageMeta:
        """Without the directory's path: checkpoints are moved."""
        return metadata.StorageMeta(save_id=self.save_id)


def index_file_of(index: metadata.Metadata) -> bytes:
    """The content of tensors.json. index: as DCP returns it after writing."""
    tensors = {}
    for key, tensor in index.state_dict_metadata.items():
        boxes = []
        for chunk in tensor.chunks:
            place = index.storage_data[metadata.MetadataIndex(key, chunk.offsets)]
            box = StoredBox(list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length)
            boxes.append(box)
        tensors[key] = StoredTensor(list(tensor.size), str(tensor.properties.dtype).removeprefix("torch."), boxes)
    return msgspec.json.encode(tensors)


def index_of_file(content: bytes) -> metadata.Metadata:
    """The index as DCP wants it. Raises msgspec.MsgspecError."""
    tensors = msgspec.json.decode(content, type=dict[str, StoredTensor])
    described: dict[str, metadata.STORAGE_TYPES] = {}
    places = {}
    for key, tensor in tensors.items():
        chunks = [metadata.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes]
        properties = metadata.TensorProperties(dtype=DTYPES[tensor.dtype])
        described[key] = metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for box in tensor.boxes:
            place = filesystem._StorageInfo(box.file, box.begin, box.length)
            places[metadata.MetadataIndex(key, torch.Size(box.offsets))] = place
    return metadata.Metadata(described, storage_data=places)


def a_member_of_an_enum(kind: Any, name: str) -> Any:
    """Stands for getattr, with which Python 3.11.0 to 3.11.3 pickle an enum's member; others call the class."""
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it names an attribute of {kind!r}")
    return kind[name]


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
    ("builtins", "getattr"): a_member_of_an_enum,
}


class IndexUnpickler(pickle.Unpickler):
    """Reads DCP's index, which is all that a checkpoint of form 1 has. It is a pickle, which may name programs: only
    DCP's own classes are looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in INDEX_CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return INDEX_CLASSES[module, name]


NOT_AN_INDEX = (
    msgspec.MsgspecError, pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, ValueError, IndexError
)  # fmt: skip
LARGEST_INDEX = 1 << 30  # bytes


class Reader(dcp.FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """Raises Problem for files that do not match their checksums, or that another program wrote."""
        folder = Path(self.path)
        files = read_seal(folder).files
        path = folder / (INDEX if INDEX in files else FIRST_INDEX)
        content = read_file(path, COPY_AGAIN, LARGEST_INDEX)
        if (len(content), zlib.crc32(content)) != files.get(path.name):
            raise Problem(f"{path} does not match its checksum", COPY_AGAIN)
        try:
            if path.name == INDEX:
                return index_of_file(content)
            return IndexUnpickler(io.BytesIO(content)).load()
        except NOT_AN_INDEX as error:
            found = f"{path} is as it was written, but no index that the native engine knows: {error}"
            raise Problem(found, "Take another checkpoint, and report this with the versions in run.json") from error

    def fill(self, index: metadata.Metadata, pieces: Sequence[Piece]) -> None:
        """Reads the pieces' tensors, in this process alone. Raises Problem."""
        loading = LoadPlanner(pieces, Path(self.path))
        loading.set_up_planner({}, index, is_coordinator=True)
        self.set_up_storage_reader(index, is_coordinator=True)
        self.read_data(loading.create_local_plan(), loading)


def write_index_and_seal(folder: Path, index: metadata.Metadata, seal: Seal, written: Mapping[str, Sums]) -> None:
    """written: each file's size and checksum, without the index's."""
    tensors = index_file_of(index)
    write_whole(folder / INDEX, tensors)
    files = {name: sums for name, sums in written.items() if writer_of(name) >= 0}
    files[INDEX] = Sums(len(tensors), zlib.crc32(tensors))
    write_whole(folder / SEAL, replace(seal, files=files).encode())


def save(writer: Writer, planning: SavePlanner, group: dist.ProcessGroup | None) -> metadata.Metadata:
    """Writes all but the seal; what the index says. group: of all that write; None: this process alone.

    Every process raises what has gone wrong in one of them.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return dcp.save({}, storage_writer=writer, planner=planning, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # no Exception, so that it would pass by whoever expects a full disk
        cause, _ = next(iter(error.failures.values()))
        raise cause from None
    finally:
        planning.pieces.clear()  # DCP's closures are garbage that is collected late, and would keep the tensors


def write_form(folder: Path, planning: SavePlanner, seal: Seal) -> None:
    """A complete checkpoint, by one process that is no part of a run. seal: without its files."""
    writer = Writer(folder)
    index = save(writer, planning, None)
    write_index_and_seal(folder, index, seal, writer.fs.written)
