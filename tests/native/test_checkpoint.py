"""Checkpoints in one form: the boxes of every division, what is written and read, and what is refused."""

import enum
import io
import json
import os
import pickle
import subprocess
import sys
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from command_lines import parsed
from hypothesis import given
from hypothesis import strategies as st
from made_runs import made_checkpoints
from real_runs import EXACT, finish, start
from support import REPO_ROOT, nightly
from torch.distributed.checkpoint import FileSystemReader, SavePlan

from docs import continuations as continuations_page
from native import checkpoint, form
from native.form import Reader, SavePlanner, write_form
from native.parallel import Axis, Mesh
from native.pieces import Piece, boxes_of_rows, boxes_of_stretch, shared_out
from native.tensor_parallel import Slice
from t5bench import Problem
from t5bench.checkpoint_form import FIRST_INDEX, INDEX, SEAL, TRACKER, Division, Seal, folder_of, read_seal
from t5bench.record.settings import MODEL_FAMILIES

LARGEST = 5e-6  # the gate's, of a relative difference in fp32


# ---- boxes ---------------------------------------------------------------------------------------------------------


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_stretch_of_elements_is_a_few_boxes(shape: list[int], ends: tuple[float, float]):
    elements = torch.arange(torch.Size(shape).numel())
    begin, end = sorted(round(place * len(elements)) for place in ends)
    boxes = list(boxes_of_stretch(shape, begin, end))
    found = []
    for offsets, sizes in boxes:
        index = [slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
        found += elements.view(shape)[tuple(index)].flatten().tolist()
    assert found == list(range(begin, end))
    assert len(boxes) <= 2 * len(shape) - 1


@given(
    tp=st.integers(1, 4), shards=st.integers(1, 5), blocks=st.sampled_from([1, 3]), dim=st.sampled_from([0, 1]),
    each=st.integers(4, 13), copies=st.sampled_from([1, 2]),
)  # fmt: skip
def test_the_boxes_of_all_processes_are_the_whole_tensor(
    tp: int, shards: int, blocks: int, dim: int, each: int, copies: int
):
    """FSDP2 cuts the rows of what tensor parallelism has cut, of which the last processes may have none.

    Parts of tensor parallelism may have different sizes, as those of a vocabulary, and several ranks the same one.
    """
    blocks = blocks if dim == 0 else 1
    size = blocks * each
    copies = copies if tp % copies == 0 else 1
    tp_slice = Slice(dim, blocks, size, copies)
    whole = torch.arange(size * 2.0).view((size, 2) if dim == 0 else (2, size))
    found = torch.full_like(whole, -1)
    for rank in range(tp):
        axis = Axis(tp, rank)
        part = tp_slice.cut(whole, axis)
        assert tp_slice.local_shape(tuple(whole.shape), axis) == tuple(part.shape)
        assert tp_slice.whole_shape(tuple(part.shape)) == tuple(whole.shape)
        if not tp_slice.is_first_copy(axis):
            continue
        stretches = tp_slice.stretches(axis)
        rows = -(-len(part) // shards)
        for shard in range(shards):
            begin = min(shard * rows, len(part))
            local = part[begin : begin + rows]
            for box in boxes_of_rows(2, dim, stretches, (begin, begin + len(local))):
                values = box.of(local)
                target = found
                for axis_number, (offset, length) in enumerate(zip(box.offsets, values.shape, strict=True)):
                    target = target.narrow(axis_number, offset, length)
                assert (target == -1).all(), "no element is in two boxes"
                target.copy_(values)
    assert found.equal(whole)


@given(sizes=st.lists(st.integers(0, 100), max_size=30), writers=st.integers(1, 5))
def test_replicas_share_the_writing(sizes: list[int], writers: int):
    chosen = shared_out(sizes, writers)
    loads = [sum(size for size, each in zip(sizes, chosen, strict=True) if each == writer) for writer in range(writers)]
    assert max(loads) - min(loads) <= max(sizes, default=0)


# ---- files ---------------------------------------------------------------------------------------------------------


def pieces_of(**tensors: torch.Tensor) -> list[Piece]:
    return [Piece(f"model.{name}", tuple(value.shape), (0,) * value.dim(), value, 0) for name, value in tensors.items()]


SEALED = Seal(iteration=3, step=3, consumed_samples=12, division=Division(), has_dropout=False)


def test_what_is_written_can_be_read_in_other_boxes(tmp_path: Path):
    weight = torch.arange(24.0).view(6, 4)
    boxes = [Piece("model.w", (6, 4), offsets, weight[offsets[0] : offsets[0] + 3], 0) for offsets in ((0, 0), (3, 0))]
    write_form(tmp_path, SavePlanner(boxes), SEALED)
    column = torch.empty(6, 1)
    reader = Reader(tmp_path)
    reader.fill(reader.read_metadata(), [Piece("model.w", (6, 4), (0, 2), column, 0)])
    assert column.flatten().equal(weight[:, 2])
    for name in (INDEX, FIRST_INDEX):
        assert str(tmp_path).encode() not in (tmp_path / name).read_bytes(), "checkpoints are moved"


def test_a_tensor_that_no_process_has_whole_is_not_saved():
    planning = SavePlanner([Piece("model.w", (6, 4), (0, 0), torch.ones(3, 4), 0)])
    planning.set_up_planner({}, is_coordinator=True)
    with pytest.raises(ValueError, match="tensor-volume: 24 chunks-volume: 12"):
        planning.create_global_plan([planning.create_local_plan(), SavePlan([])])


def test_another_model_is_refused(tmp_path: Path):
    write_form(tmp_path, SavePlanner(pieces_of(w=torch.ones(3, 4))), SEALED)
    reader = Reader(tmp_path)
    for name, shape, has in (("w", (3, 5), "with the shape [3, 4]"), ("v", (3, 4), "missing")):
        with pytest.raises(Problem, match=f"model.{name} is {has}".replace("[", r"\[")):
            reader.fill(reader.read_metadata(), pieces_of(**{name: torch.empty(shape)}))


class Hostile:
    def __reduce__(self) -> tuple:
        return os.system, ("touch hostile",)


PICKLES = {"a hostile one": pickle.dumps(Hostile()), "none": b"", "text": b"no pickle", "cut off": pickle.dumps([])[:3]}


@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES)
def test_the_index_of_pytorch_is_for_pytorch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes):
    monkeypatch.chdir(tmp_path)
    write_form(tmp_path, SavePlanner(pieces_of(w=torch.ones(3, 4))), SEALED)
    FileSystemReader(tmp_path).read_metadata()
    (tmp_path / FIRST_INDEX).write_bytes(content)
    stored = torch.zeros(3, 4)
    reader = Reader(tmp_path)
    reader.fill(reader.read_metadata(), pieces_of(w=stored))
    assert stored.equal(torch.ones(3, 4)) and not (tmp_path / "hostile").exists()


def as_the_first_form(folder: Path, index: bytes) -> None:
    """Seals a checkpoint as if it had been written with this index."""
    seal = json.loads((folder / SEAL).read_text())
    (folder / INDEX).unlink()
    del seal["files"][INDEX]
    (folder / FIRST_INDEX).write_bytes(index)
    seal["files"][FIRST_INDEX] = [len(index), zlib.crc32(index)]
    del seal["form"], seal["checksum"]
    (folder / SEAL).write_text(json.dumps(seal))


class EarlyPickler(pickle.Pickler):
    """Writes an enum's members as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


class LatePickler(pickle.Pickler):
    """Writes an enum's members as other Pythons do."""

    def reducer_override(self, value: object) -> Any:
        return (type(value), (value.value,)) if isinstance(value, enum.Enum) else NotImplemented


@pytest.mark.parametrize("pickler", [EarlyPickler, LatePickler])
@pytest.mark.parametrize("protocol", [4, 5])  # 5: of Python 3.14
def test_the_first_form_is_read_whichever_python_wrote_it(tmp_path: Path, pickler: Any, protocol: int):
    write_form(tmp_path, SavePlanner(pieces_of(w=torch.ones(3, 4))), SEALED)
    written = io.BytesIO()
    pickler(written, protocol).dump(FileSystemReader(tmp_path).read_metadata())
    as_the_first_form(tmp_path, written.getvalue())
    stored = torch.zeros(3, 4)
    reader = Reader(tmp_path)
    reader.fill(reader.read_metadata(), pieces_of(w=stored))
    assert stored.equal(torch.ones(3, 4))


GETATTR = pickle.dumps(getattr)[:-1] + b"ctorch\nSize\n\x8c\x07__new__\x86R."


@pytest.mark.parametrize("content", [*PICKLES.values(), GETATTR], ids=[*PICKLES, "another's attribute"])
def test_an_index_of_the_first_form_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes):
    monkeypatch.chdir(tmp_path)
    write_form(tmp_path, SavePlanner(pieces_of(w=torch.ones(3, 4))), SEALED)
    as_the_first_form(tmp_path, content)
    with pytest.raises(Problem, match="is as it was written, but no index that the native engine knows") as caught:
        Reader(tmp_path).read_metadata()
    assert "Copy" not in caught.value.report, "copying cannot help"
    assert not (tmp_path / "hostile").exists()


def test_the_copy_is_blamed_for_bytes_that_are_not_those_that_were_written(tmp_path: Path):
    write_form(tmp_path, SavePlanner(pieces_of(w=torch.ones(3, 4))), SEALED)
    (tmp_path / INDEX).write_bytes((tmp_path / INDEX).read_bytes()[:-9])
    with pytest.raises(Problem, match="does not match its checksum") as caught:
        Reader(tmp_path).read_metadata()
    assert "Copy the checkpoint's files again" in caught.value.report


def test_an_index_names_files_of_its_own_folder_alone(tmp_path: Path):
    write_form(tmp_path, SavePlanner(pieces_of(w=torch.ones(3, 4))), SEALED)
    content = (tmp_path / INDEX).read_bytes().replace(b"__0_0.distcp", b"../../secret")
    with pytest.raises(msgspec.ValidationError, match="matching regex"):
        form.index_of_file(content)


# ---- saving and loading --------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Path]:
    """One process, which is a run of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield tmp_path
    dist.destroy_process_group()


def trainer_of(pieces: Callable[[], list[Piece]]) -> Namespace:
    return Namespace(pieces=pieces, updates=3, begin_load=lambda updates: None, end_load=lambda: None)


def test_dropout_continues_where_the_same_processes_draw_it(monkeypatch: pytest.MonkeyPatch, alone: Path):
    gpus = torch.Generator()
    shared = torch.Generator()
    drawn_from = torch.default_generator, shared, gpus
    monkeypatch.setattr("torch.cuda.default_generators", [gpus])
    args = parsed("--save", str(alone), "--save-interval", "1", "--load", str(alone))
    args.device = torch.device("cuda", 0)
    mesh = Mesh(tp=Axis(rng=shared))
    trainer = trainer_of(list)
    saver = checkpoint.Saver(trainer, args, mesh)
    saver.save(3)
    saver.close()
    assert (alone / TRACKER).read_text() == "3"

    def draws() -> list[list[float]]:
        return [torch.rand(4, generator=generator).tolist() for generator in drawn_from]

    before = draws()
    checkpoint.load(trainer, args, mesh, read_seal(folder_of(alone, 3)))
    assert draws() == before
    args.dp = 2
    anew = []
    for _ in range(2):  # every attempt begins alike
        for generator in drawn_from:
            generator.manual_seed(5)
        checkpoint.load(trainer, args, mesh, read_seal(folder_of(alone, 3)))
        anew.append(draws())
    assert anew[0] == anew[1]
    assert all(one != other for one, other in zip(anew[0], before, strict=True))


def test_training_goes_on_while_its_copy_is_written(monkeypatch: pytest.MonkeyPatch, alone: Path):
    """Without memory for the copy it waits."""
    weight = torch.zeros(2)
    args = parsed("--save", str(alone), "--save-interval", "1", "--load", str(alone))
    saver = checkpoint.Saver(trainer_of(lambda: pieces_of(w=weight)), args, Mesh(tp=Axis(rng=torch.Generator())))

    def saved(iteration: int) -> float:
        stored = torch.empty(2)
        reader = Reader(folder_of(alone, iteration))
        reader.fill(reader.read_metadata(), pieces_of(w=stored))
        return float(stored[0])

    threads = saver.thread
    blocked = Namespace(submit=lambda write, share: Namespace(result=lambda: write(share), done=lambda: False))
    saver.thread = blocked  # which writes when it is waited for
    saver.save(1)
    weight += 1
    saver.save(2)
    weight += 1
    saver.finish()
    assert (saved(1), saved(2)) == (0, 1)
    monkeypatch.setattr(checkpoint, "has_memory_for", lambda pieces: False)
    saver.save(3)
    assert saver.unfinished is None and saved(3) == 2
    saver.thread = threads
    saver.close()


def test_copies_are_equal_and_in_one_stretch_of_memory():
    tensors = {"a": torch.rand(3, 5), "b": torch.rand(8, 8)[:, 2:5], "c": torch.arange(7, dtype=torch.uint8)}
    tensors["d"] = torch.empty(0)
    pieces = pieces_of(**tensors)
    copies = checkpoint.copies_of(pieces)
    for piece, copy in zip(pieces, copies, strict=True):
        assert copy.tensor.equal(piece.tensor) and copy[:3] == piece[:3]
    assert len({copy.tensor.untyped_storage().data_ptr() for copy in copies}) == 1


def test_a_checkpoint_whose_writing_ends_early_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch, alone: Path):
    """A full disk is told, at the latest when the training ends; what is there counts as incomplete."""
    run = alone / "checkpoints"
    args = parsed("--save", str(run), "--save-interval", "1", "--load", str(run))
    saver = checkpoint.Saver(trainer_of(lambda: pieces_of(w=torch.ones(2))), args, Mesh(tp=Axis(rng=torch.Generator())))
    saver.save(1)
    saver.finish()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(form.Writer, "write_data", full)
    saver.save(2)
    with pytest.raises(Exception, match="No space left on device"):
        saver.close()
    assert (run / TRACKER).read_text() == "1"
    iteration, faults = made_checkpoints(alone, dp=1).newest()
    assert (iteration, faults) == (1, {2: f"iter_0000002/{SEAL} is missing: its saving did not end"})


@pytest.mark.slow
def test_a_save_that_is_killed_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path):
    """Before each file that it opens, renames or removes."""
    script = REPO_ROOT / "tests" / "native" / "killed_saves.py"
    paths = os.pathsep.join(str(REPO_ROOT / folder) for folder in (".", "tests", "tests/native"))
    command = [sys.executable, str(script), str(tmp_path)]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-5000:]
    *deaths, last = map(json.loads, result.stdout.splitlines())
    assert last == {"event": "", "newest": 2, "faults": [], "sealed": True}
    assert len(deaths) > 5 and all(death["event"] for death in deaths)
    for death in deaths:
        assert death["newest"] == (2 if death["sealed"] else 1), death
        assert death["sealed"] or all("its saving did not end" in fault for fault in death["faults"]), death


@pytest.mark.slow
def test_a_run_goes_on_where_its_disk_was_full(sample_data: Path, tmp_path: Path):
    """From the checkpoint before, once there is space again. Of two checkpoints one fits on it."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "none", place], check=True)
    settings = EXACT | {"ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data)}
    settings |= {"TRAIN_ITERS": "6", "SAVE_INTERVAL": "2"}
    try:
        [launcher] = start("zero1", tmp_path / "run", **settings)
        said = launcher.communicate(timeout=200)[1]
        assert launcher.returncode == 1
        assert "a checkpoint could not be written" in said and "Free space" in said
        subprocess.run(["mount", "-o", "remount,size=1g", place], check=True)
        [said] = finish(start("zero1", tmp_path / "run", **settings, RESUME="1"))
        assert "resuming from the checkpoint of iteration 2\n" in said
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


# ---- every setup continues every other's ---------------------------------------------------------------------------

RING = [
    "DDP, 3", "ZeRO-1, 2", "TP with sequence parallelism, 2", "ZeRO-2, 3", "pipeline interleaved, 2",
    "ZeRO-3, 3", "hybrid, TP 2 x PP 2 x DP 2", "FSDP2, 3", "ZeRO-3 offload, 2",
]  # fmt: skip
# Whose checkpoints differ most in how tensors are divided.
DAILY_RING = ["ZeRO-3, 3", "hybrid, TP 2 x PP 2 x DP 2", "FSDP2, 3"]


def continuations(family: str, precision: str, *words: str) -> dict[str, dict[str, list[float]]]:
    """What continuations.py finds."""
    command = [sys.executable, str(REPO_ROOT / "tests" / "native" / "continuations.py"), family, precision, *words]
    paths = os.pathsep.join([str(REPO_ROOT), str(REPO_ROOT / "tests")])
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(result.stdout)


def check(found: dict[str, dict[str, list[float]]], loss: float, norm: float) -> None:
    for after, pairs in found.items():
        for before, (own_loss, own_norm) in pairs.items():
            assert own_loss <= loss and own_norm <= norm, f"{after} continues {before}: {own_loss:.1e}, {own_norm:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ring", [DAILY_RING, pytest.param(RING, marks=pytest.mark.nightly)], ids=["the most different", "every strategy"]
)
def test_a_strategy_continues_another_s_run(ring: list[str]):
    """Each once as the one that saves and once as the one that continues."""
    found = continuations("t5", "fp32", "--ring", "--setups", *ring)
    assert sorted(found) == sorted(ring)
    check(found, LARGEST, LARGEST)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "is_equal"), [("gpt", True), ("t5", False)])
def test_a_run_goes_on_with_other_micro_batches_where_its_targets_are_equal(family: str, is_equal: bool):
    """micro_batches_leave_the_curve() says where. A T5's samples differ in the number of their target tokens."""
    assert MODEL_FAMILIES[family].has_equal_targets == is_equal
    setups = ["DDP, 1 process", "DDP, 2, micro-batches of 3", "ZeRO-2, 3, micro-batches of 2"]
    found = continuations(family, "fp32", "--ring", "--setups", *setups)
    largest = max(loss for pairs in found.values() for loss, _ in pairs.values())
    assert (largest <= LARGEST) == is_equal


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["exp_avg", *nightly("step", "exp_avg_sq", "model")])
def test_a_mistake_in_what_is_carried_over_shows(mistake: str):
    found = continuations("t5", "fp32", "--mistake", mistake, "--setups", "DDP, 1 process")
    [[(loss, _)]] = [pairs.values() for pairs in found.values()]
    assert loss > LARGEST


def test_the_page_says_of_every_pair_whether_it_is_within_the_bounds():
    """docs/generated/continuations.md is made from these."""
    measured = json.loads(continuations_page.MEASURED.read_text())
    count = 0
    for title, pairs in measured.items():
        setups, others = 6, 1  # a ring
        if title.rsplit(maxsplit=1)[0] in continuations_page.FAMILIES:
            setups, others = 16, 16
        elif ", seed " in title:
            setups, others = 4, 3
        assert len(pairs) == len({before for row in pairs.values() for before in row}) == setups
        assert all(len(row) == others for row in pairs.values())
        check(pairs, *((LARGEST, LARGEST) if title.endswith("fp32") else (2e-3, 2e-2)))
        count += setups * others
    page = continuations_page.page(measured)
    assert f"**All {count} pairs stay below the bounds of the parity gate.**" in page
    assert "- qwen2 in fp32: " in page and "- t5 v1.1 in fp32: " in page and "- T5 in fp32: " not in page
    measured["gpt fp32"]["ZeRO-3, 3"]["TP, 2"] = [0.0, 6e-6]
    page = continuations_page.page(measured)
    assert f"**Of {count} pairs, 1 differ by more than the parity gate allows.**" in page
    assert "| GPT in fp32 | 256 |" in page and "6.0e-06: ZeRO-3, 3 continues TP, 2 |" in page


@pytest.mark.nightly
@pytest.mark.timeout(1500)  # 256 pairs, beside two other tests
@pytest.mark.parametrize(
    ("family", "precision", "loss", "norm"), [("t5", "fp32", LARGEST, LARGEST), ("gpt", "bf16", 2e-3, 2e-2)]
)
def test_every_setup_continues_every_other_s_run(family: str, precision: str, loss: float, norm: float):
    check(continuations(family, precision), loss, norm)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8 << 30),
        ({"sys/fs/cgroup/job/memory.max": "max", "sys/fs/cgroup/job/memory.current": "5"}, 8 << 30),
        ({"sys/fs/cgroup/job/memory.max": "3000", "sys/fs/cgroup/job/memory.current": "1000"}, 2000),
        ({"sys/fs/cgroup/memory.max": "3000", "sys/fs/cgroup/memory.current": "2500"}, 500),
        ({"sys/fs/cgroup/job/memory.max": "1000", "sys/fs/cgroup/job/memory.current": "1500"}, 0),
    ],
)
def test_a_copy_must_fit_into_the_jobs_share_of_the_host(tmp_path: Path, files: dict[str, str], free: int):
    every = {
        "proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable: 8388608 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/job/cgroup.procs": "",
    } | files
    for name, text in every.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert checkpoint.free_memory(tmp_path) == free
