"""Random damage to packages, and forgeries: no traceback, and no changed figure that a relation should have seen.

A forger seals what he changed again, and publishes the figures that follow from it. Then only the relations
(relations.py) can tell. MUTATIONS=1000 makes that many; a failure prints its SEED.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tampering
from made_runs import seal
from mutators import mutate

from t5bench import Problem
from t5bench.record import records
from t5bench.record.reader import decoded
from t5bench.record.records import write_list
from t5bench.record.settings import BY_NAME
from t5bench.report import page
from t5bench.report.compare import write
from t5bench_verify import pack as packing
from t5bench_verify import verify
from t5bench_verify.pack import (
    CONTENTS,
    PUBLISHED,
    RUNS,
    Contents,
    archive,
    pack,
    publish,
    working_in,
    write_file,
)

COUNT, SEED = int(os.environ.get("MUTATIONS", "60")), int(os.environ.get("SEED", "1"))
DIFFERENCES = ("PRECISION_FLAG", "VOCABULARY_MULTIPLE", "engine", "device")  # of the runs in the package
NAMES = ["native", "zero1", "gpus", "short"]
UNFORESEEN = "its records lack what a comparison needs"
FIGURES = f"{PUBLISHED}/comparison.json"

# ---- forgeries: one quantity, everywhere that a record tells it ------------------------------------------------------

Forgery = Callable[[random.Random, Path], tampering.Change]


def factor(rng: random.Random) -> float:
    return rng.choice([0.0, 1e-3, 0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25, 2.0, 10.0, -1.0, 1e9])


def some_iterations(rng: random.Random) -> list[int]:
    first = rng.randrange(1, 41)
    return rng.choice([list(range(1000)), [first], list(range(first, 41)), list(range(1, first + 1))])


def another_figure(rng: random.Random, _: Path) -> tampering.Change:
    name = rng.choice(sorted(tampering.NAMES))
    by = factor(rng)
    more = rng.choice([0.0, 0.0, 1.0])
    iterations = some_iterations(rng)
    if name in ("skipped", "nan"):  # whole numbers
        return tampering.figure(name, lambda value: int(value + abs(by) + more), iterations)
    return tampering.figure(name, lambda value: value * by + more, iterations)


def another_speed(rng: random.Random, _: Path) -> tampering.Change:
    return tampering.faster(abs(factor(rng)) or 3.0, some_iterations(rng))


def another_time(rng: random.Random, _: Path) -> tampering.Change:
    return tampering.moved(rng.choice([-1, 1]) * rng.choice([1.0, 4.0, 60.0, 3600.0, 86_400.0, 3e7]))


def another_setting(rng: random.Random, run: Path) -> tampering.Change:
    """Wherever the plan has it: as a setting and as an argument."""
    words = json.loads((run / "node0.json").read_text())["plan"]["arguments"]["settings"]
    argument = rng.choice([word for word in words if word.startswith("--") and word != "--bf16"])
    value = words[words.index(argument) + 1]
    names = [name for name, s in BY_NAME.items() if argument in s.arguments]
    numbers = [str(int(value) * 2), str(int(value) + 1)] if value.isdigit() else [value + "1", "0", "0.5"]
    return tampering.setting(rng.choice(names), argument, rng.choice(numbers))


def another_peak(rng: random.Random, run: Path) -> tampering.Change:
    name = "device_mib" if run.name == "gpus" and rng.random() < 0.5 else "host_mib"
    return tampering.both_peaks(0, **{name: round(400 * abs(factor(rng)), 1)})


def another_sample(rng: random.Random, _: Path) -> tampering.Change:
    name = rng.choice(["sent", "received", "time", "utilization", "power_w", "memory_mib"])
    by = factor(rng)
    count = rng.choice([0, 1])
    return tampering.sub(
        tampering.SAMPLES, rf'("{name}": )([\d.]+)', lambda match: f"{match[1]}{float(match[2]) * by}", count
    )


def a_tampering(rng: random.Random, run: Path) -> tampering.Change:
    return rng.choice([change for name, change, _ in tampering.TAMPERINGS.values() if name == run.name])


FORGERIES: tuple[Forgery, ...] = (
    another_figure, another_figure, another_speed, another_speed, another_time, another_setting, another_peak,
    another_sample, a_tampering,
)  # fmt: skip

# ---- what is found ---------------------------------------------------------------------------------------------------

# What nothing else in a package tells (docs/records.md).
FREE = re.compile(
    r"started|final_loss|parity\.|evaluations|peak_memory|bytes_sent|traffic|gpu_power|gpu_utilization|\.versions\.|"
    r"\.commits\.|\.gpu$|\.mfu|\.remedy"
)
# What follows from the times, which the clocks bind, or from other figures.
OF_TIMES = re.compile(
    r"milliseconds|samples_per_second|tokens_per_second|throughput_ratio|tflops|quartiles|outliers|intervals_used|warm-up"
)
SENTENCES = re.compile(r"^(verdicts|problems|notes|sound)|\.(limits|warnings|differs_from_baseline)|mfu_missing")


def is_free(address: str) -> bool:
    """Whether nothing else tells a figure, as a setting that reaches no argument of the engine."""
    _, is_setting, name = address.partition(".settings.")
    if is_setting:
        return name not in BY_NAME or not BY_NAME[name].arguments
    return bool(FREE.search(address) or SENTENCES.search(address))


def leaves(content: bytes) -> dict[str, Any]:
    return dict(verify._leaves(json.loads(content)))


def bound(honest: dict[str, Any], forged: dict[str, Any]) -> Iterator[str]:
    """The figures that differ although something else in the package tells them."""
    for address in honest | forged:
        ours, theirs = honest.get(address), forged.get(address)
        if ours == theirs or is_free(address):
            continue
        if OF_TIMES.search(address):
            # By how much clocks may differ: 2 % and 0.05 s in a run of at least 1.1 s, of which two thirds count.
            if not address.endswith(("median", "tflops_per_gpu", "mfu")):
                continue
            if ours and theirs and abs(theirs / ours - 1) < 0.1:
                continue
        yield f"{address} is {theirs}, honest is {ours}"


def unpacked(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}


def with_checksums(files: dict[str, bytes]) -> bytes:
    """package.json with new ones."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != str(CONTENTS)}
    return json.dumps(json.loads(files[str(CONTENTS)]) | {"files": sums}).encode()


class Bench:
    """An honest package, and what `verify` says about its forgeries."""

    def __init__(self, directory: Path) -> None:
        self.pristine = directory / "pristine"
        self.work = directory / "work"
        self.runs = self.work / RUNS
        self.package = directory / "package.tar.gz"
        self.pristine.mkdir()
        tampering.make_pristine(self.pristine)
        write_list(self.pristine, NAMES)
        self.restore()
        words = {"runs": [str(self.runs)], "baseline": "ddp", "allow": list(DIFFERENCES), "peak_tflops": None}
        self.arguments = argparse.Namespace(**words)
        content, comparison = pack(self.arguments)
        self.honest = unpacked(content)
        self.contents = decoded(CONTENTS, self.honest[str(CONTENTS)], Contents)
        self.figures = leaves(self.honest[FIGURES])
        self.problems = comparison.problems
        self.changed = NAMES[0]

    def restore(self, *names: str) -> None:
        """The honest runs, or those of these names."""
        if not names:
            shutil.rmtree(self.work, ignore_errors=True)
            shutil.copytree(self.pristine, self.runs)
        for name in {*names} | {path.name for path in self.runs.iterdir() if path.is_dir()} - {*NAMES}:
            shutil.rmtree(self.runs / name, ignore_errors=True)
        for name in names:
            shutil.copytree(self.pristine / name, self.runs / name)

    def verified(self, content: bytes) -> str:
        """What verify finds; "" for nothing."""
        self.package.write_bytes(content)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = verify.run(argparse.Namespace(package=self.package, sha256=""))
        return said.getvalue() if status else ""

    def damaged_package(self, rng: random.Random) -> tuple[str, bytes]:
        """One of its files is changed at random, as published; with new checksums of the package or not."""
        work = self.package.with_name("unpacked")
        shutil.rmtree(work, ignore_errors=True)
        for name, content in self.honest.items():
            write_file(work / name, content)
        directory = rng.choice([work, work / PUBLISHED, *(work / RUNS / name for name in NAMES)])
        what = f"{mutate(rng, directory, False)} in {directory.name}"
        files = {}
        for path in sorted(work.rglob("*")):
            is_small = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 24
            if is_small and os.access(path, os.R_OK):
                files[str(path.relative_to(work))] = path.read_bytes()
        if rng.random() < 0.7:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                files[str(CONTENTS)] = with_checksums(files)
                what += ", sealed again"
        return what, archive(files)

    def forge(self, rng: random.Random) -> str:
        """A run is changed and sealed again; what was done."""
        self.restore(self.changed)
        run = self.runs / rng.choice(NAMES)
        self.changed = run.name
        if rng.random() < 0.4:
            return f"{mutate(rng, run, True)} of {run.name}"
        forgery = rng.choice(FORGERIES)
        with contextlib.suppress(AssertionError, FileNotFoundError, LookupError):  # this run has no such thing
            forgery(rng, run)(run)
        with contextlib.suppress(Exception):
            seal(run)
        return f"{forgery.__name__} of {run.name}"

    def outcome(self, seed: int) -> tuple[str, str]:
        """What became of a mutation, and the sentences about it."""
        rng = random.Random(seed)
        if rng.random() < 0.3:
            what, content = self.damaged_package(rng)
            said = self.verified(content)
            figures = leaves(unpacked(content)[FIGURES]) if not said else {}
            return self.judged(what, said, figures, [])
        what = self.forge(rng)
        try:
            if seed % 10 == 0:  # the whole way
                said = self.verified(pack(self.arguments)[0])
            with working_in(str(self.work)):
                comparison, faults = publish(self.contents)  # what pack and verify do
                write(comparison, PUBLISHED)
                figures = leaves((self.work / FIGURES).read_bytes())
        except Problem as problem:
            return "refused", f"{what}: {problem}"
        if seed % 10 == 0:
            assert bool(said) == bool(faults), f"{what}: verify says {said}, and not {faults}"
        return self.judged(what, "\n".join(faults), figures, comparison.problems)

    def judged(self, what: str, said: str, figures: dict[str, Any], problems: Sequence[str]) -> tuple[str, str]:
        if UNFORESEEN in said:
            return "unforeseen", f"{what}\n{said}"
        if said:
            return "named", f"{what}\n{said}"
        silent = list(bound(self.figures, figures))
        if silent and set(problems) - set(self.problems):
            return "a problem of the table", what
        if silent:
            return "silent", f"{what}\n" + "\n".join(silent)
        return "nothing else tells it" if figures != self.figures else "no difference", what


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("packages"))


def once_for_each_content(function: Callable[..., Any], directory_of: Callable[[Any], Path]) -> Callable[..., Any]:
    """The function, which reads a run directory, with a memory: all but one of the runs are the honest ones."""
    known: dict[tuple[str, str], Any] = {}

    def remembered(argument: Any, **more: Any) -> Any:
        directory = directory_of(argument)
        paths = sorted(directory.iterdir())
        if any(path.is_symlink() or not path.is_file() or not os.access(path, os.R_OK) for path in paths):
            return function(argument, **more)
        digest = hashlib.sha256()
        for path in paths:
            size = path.stat().st_size
            if size > 1 << 24:
                return function(argument, **more)
            digest.update(f"{path.name} {size}\n".encode() + path.read_bytes())
        key = str(directory), digest.hexdigest()
        if key not in known:
            result = function(argument, **more)
            known[key] = list(result) if isinstance(result, Iterator) else result
        return known[key]

    return remembered


def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without curves, which take nine tenths of the time and which test_package.py changes, nor what is known."""
    monkeypatch.setattr(page, "drawings", lambda looks, figures: ["<svg/>" for _ in figures])
    monkeypatch.setattr(records, "load", once_for_each_content(records.load, Path))
    contradictions = once_for_each_content(packing.contradictions, lambda run: run.directory)
    monkeypatch.setattr(packing, "contradictions", contradictions)


def test_no_forgery_is_silent(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    faster(monkeypatch)
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + COUNT):
        try:
            result, said = bench.outcome(seed)
        except Exception as error:
            raise AssertionError(f"SEED={seed} MUTATIONS=1") from error
        counts[result] += 1
        assert result not in ("silent", "unforeseen"), f"SEED={seed} MUTATIONS=1: {said}"
    print(f"{COUNT} mutations: {dict(counts)}", file=sys.stderr)
