"""Random damage to every file of a run: no traceback, no hang, no changed figure without a sentence that names the run.

MUTATIONS=1000 makes that many; a failure prints its seed, which SEED repeats.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run, seal
from mutators import mutate

from t5bench import REPOSITORY
from t5bench.__main__ import main
from t5bench.record import collect, files
from t5bench.record.records import load
from t5bench.report import compare as report
from t5bench.report import tables, wandb_report
from t5bench.report.page import render

COUNT = int(os.environ.get("MUTATIONS", "40"))
SEED = int(os.environ.get("SEED", "1"))
HANGS_AFTER = 60  # seconds, on a busy machine


def asked(runs: Path, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(runs=[str(runs)], baseline="ddp", allow=[], peak_tflops=None, **more)


def compare(runs: Path, _: Path) -> int:
    comparison = report.compare(asked(runs))
    print(tables.terminal(comparison), json.dumps(comparison.to_json(), allow_nan=False, indent=0))
    return 0


def wandb(runs: Path, _: Path) -> int:
    """Stands for the client, which takes a second to start: only its arguments count."""
    comparison = wandb_report.compare(arguments := asked(runs, project="p", comparison=None))
    wandb_report.project_of(comparison, arguments)
    wandb_report.directory_of(comparison, arguments)
    lines = [wandb_report.curves(comparison, name) for name in wandb_report.LINES.values()]
    found = [wandb_report.summary(comparison), wandb_report.configuration(comparison), tables.data(comparison), lines]
    print(json.dumps(found, indent=0))
    return 0


def page(runs: Path, _: Path) -> int:
    print(render(report.compare(asked(runs))))
    return main(["explain", *map(str, sorted(runs.iterdir()))])


def parity(runs: Path, _: Path) -> int:
    return main(["parity", *map(str, sorted(runs.iterdir()))])


def collected(runs: Path, target: Path) -> int:
    for run in sorted(runs.iterdir()):
        print(collect.run(argparse.Namespace(run=target / run.name, sources=[str(run)], same_run=False)))
    return 0


COMMANDS: tuple[Callable[[Path, Path], int], ...] = (compare, wandb, page, parity, collected)


def outcome(execute: Callable[[Path, Path], int], runs: Path, target: Path) -> str:
    """A command's output and exit status; an exception that it should not raise passes through."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status: object = execute(runs, target)
        except ValueError as problem:
            if type(problem).__module__.partition(".")[0] != "t5bench":
                raise
            status = f"{problem}\n{getattr(problem, 'remedy', '')}"
    shutil.rmtree(target, ignore_errors=True)
    return f"{said.getvalue()}{status}"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four complete runs, of which one has no checksums, one that was killed and one that crashed."""
    runs = tmp_path / "runs"
    times = [100.0 + number % 7 for number in range(30)]
    made: dict[str, Any] = {"elapsed_ms": times, "norms": [1.5 - number / 30 for number in range(30)]}
    sampled = made | {"sent_per_iteration": 1e6, "sample_seconds": 0.5}
    make_run(runs / "ddp", **made)
    make_run(runs / "zero1", "zero1", **sampled)
    make_run(runs / "zero2", "zero2", nodes=2, **sampled)
    for name in ("ddp", "zero1"):
        shutil.copy(Path(__file__).with_name("profile.json"), runs / name)
        seal(runs / name)
    make_run(runs / "tensor", "tensor", **made)
    (runs / "tensor" / "node0.sha256").unlink()
    make_run(runs / "pipeline", "pipeline", elapsed_ms=times, status="running")
    longer = {"TRAIN_ITERS": "30"}
    make_run(runs / "zero3", "zero3", elapsed_ms=times[:9], settings=longer, status="crashed", reason="r")
    return runs


def hung(*_: object) -> None:
    raise TimeoutError("it hangs")


def test_no_damage_goes_unnoticed(runs: Path, tmp_path: Path):
    pristine = tmp_path / "pristine"
    target = tmp_path / "target"
    counts = Counter()
    shutil.copytree(runs, pristine)
    clean = {execute: outcome(execute, runs, target) for execute in COMMANDS}
    (runs / "ddp" / "notes.txt").write_text("the first run after the upgrade")
    assert outcome(compare, runs, target) == clean[compare], "a user's note is no damage"
    signal.signal(signal.SIGALRM, hung)
    for number in range(SEED, SEED + COUNT):
        rng = random.Random(number)
        run = rng.choice(sorted(runs.iterdir()))
        execute = rng.choice(COMMANDS)
        reseal = rng.random() < 0.3
        what = f"SEED={number} MUTATIONS=1: {execute.__name__} after {mutate(rng, run, reseal)} of {run.name}"
        signal.alarm(HANGS_AFTER)
        try:
            found = outcome(execute, runs, target)
        except BaseException as error:
            raise AssertionError(what) from error
        finally:
            signal.alarm(0)
        # What nobody can notice in a run with new checksums, tests of packages do. A run without checksums has a
        # sentence that says so, whether anything was changed or not.
        is_same = found == clean[execute]
        is_sealed = (pristine / run.name / "node0.sha256").exists()
        counts["no difference" if is_same else "sealed again" if reseal else "named"] += 1
        new = set(found.splitlines()) - set(clean[execute].splitlines() if is_sealed else ())
        named = (str(run), str(target / run.name), f"({run.name})")
        assert is_same or reseal or any(name in line for line in new for name in named), f"{what}:\n{found}"
        shutil.rmtree(run)
        shutil.copytree(pristine / run.name, run)
    print(f"{COUNT} mutations: {dict(counts)}", file=sys.stderr)


def test_a_changed_byte_and_a_broken_line_are_damage(tmp_path: Path):
    run = make_run(tmp_path, sent_per_iteration=1e6)
    for path in files.own_files(run, 0, 1):
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        with pytest.raises(files.RecordError, match=f"{path.name} was changed after the run ended"):
            load(run)
        path.write_bytes(content)
    (run / "node0.sha256").unlink()
    (run / "metrics.jsonl").write_bytes(content.replace(b"{", b"", 1))
    with pytest.raises(files.RecordError, match=r"metrics\.jsonl line 1 cannot be read"):
        load(run)


def test_a_setting_under_anothers_name(tmp_path: Path):
    """With checksums that fit: the run is left out, and the others are compared."""
    make_run(tmp_path / "ddp")
    plan = make_run(tmp_path / "zero1", "zero1") / "node0.json"
    content = json.loads(plan.read_text())
    values = content["plan"]["settings_by_role"]
    values["model"]["PRECISION_FLAG"] = values["label"]["WANDB_PROJECT"]
    plan.write_text(json.dumps(content))
    files.seal(plan.parent, 0, 1)
    assert f"the run in {plan.parent} is damaged and left out" in outcome(compare, tmp_path, tmp_path / "target")


@pytest.mark.parametrize("name", ["metrics.jsonl", "node0.json", "node0.log", "node0.samples.jsonl", "node0.sha256"])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_disk_that_fails_leaves_out_one_run(tmp_path: Path, name: str, sealed: bool):
    """Reading a process's memory at address 0 is an I/O error, as from a broken disk or a lost file server."""
    make_run(tmp_path / "ddp")
    run = make_run(tmp_path / "zero1", "zero1", sent_per_iteration=1e6)
    if not sealed:
        (run / "node0.sha256").unlink()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to("/proc/self/mem")
    told = outcome(compare, tmp_path, tmp_path / "target")
    assert f"the run in {run} is damaged and left out: {run / name} cannot be read: Input/output error" in told
    assert "ddp" in told


def test_a_sparse_file_takes_no_memory(tmp_path: Path):
    for name in ("node0.log", "metrics.jsonl", "node0.json"):
        run = make_run(tmp_path / name / "zero1", "zero1")
        (run / "node0.sha256").unlink()
        os.truncate(run / name, 1 << 30)
    code = """if True:
        import resource, sys
        from pathlib import Path
        from t5bench.record.records import load
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for run in sys.argv[1:]:
            try:
                load(Path(run), from_log=True)
            except ValueError as error:
                print(error)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
        """
    runs = [str(path / "zero1") for path in sorted(tmp_path.iterdir())]
    command = [sys.executable, "-c", code, *runs]
    told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(told) == 4 and int(told[-1]) < 300, told
