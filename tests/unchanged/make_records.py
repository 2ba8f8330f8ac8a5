"""Makes run directories for the part ``records`` with the makers of a checkout's tests, which must be on the path.

python make_records.py DIRECTORY; python make_records.py --forge PACKAGE makes changed copies of a package beside it
"""

import io
import json
import random
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from made_runs import COLOURS, LARGE, RTX_5000_ADA, START, make_run, seal

TESTS = Path(sys.modules["made_runs"].__file__).parent
GPUS = {"gpu": RTX_5000_ADA, "nodes": 2, "padded_vocab_size": 32128, "sent_per_iteration": 1e6}
DAY_SECONDS = 86_400.0
LOSSES = (8.0, 7.9, 7.6, 7.5)
NORMS = (2.0, 1.5, 1.0, 0.8)


def times(milliseconds: float, seed: int, count: int = 40) -> list[float]:
    noise = random.Random(seed)
    return [round(milliseconds * (1 + noise.uniform(-0.01, 0.01)), 1) for _ in range(count)]


def strategies(place: Path) -> None:
    """All strategies on GPUs of two nodes, of which one failed, another number of processes and another method."""
    for number, name in enumerate(COLOURS):
        failed = {"status": "crashed", "reason": "rank 1: RuntimeError: broken"} if name == "zero3" else {}
        make_run(place / name, name, elapsed_ms=times(500 - 20 * number, number), settings=LARGE, **GPUS, **failed)
    make_run(place / "ddp-4", elapsed_ms=times(300, 8), world_size=4, settings=LARGE, **GPUS)
    other = LARGE | {"FLASH_ATTENTION": "off"}
    make_run(place / "flash", "zero1", elapsed_ms=times(600, 9), settings=other, **GPUS)


def repeats(place: Path, day: int = 0, slower: float = 1.0) -> None:
    """Three strategies, three times each, on CPUs."""
    versions = {"python": "3.11.2", "torch": "2.13.0", "deepspeed": f"0.19.{7 + day}"}
    for repeat in range(3):
        for number, name in enumerate(("ddp", "zero1", "pipeline")):
            elapsed = times(slower * (100 + 10 * number), 10 * repeat + number + day)
            start = START + day * DAY_SECONDS + 100 * repeat + 10 * number
            directory = place / f"repeat{repeat + 1}" / name
            make_run(directory, name, elapsed_ms=elapsed, start=start, versions=versions, sent_per_iteration=1e6)


def parity(place: Path) -> None:
    """Runs that train as DDP does, and four that do not."""

    def run(name: str, strategy: str, losses: tuple = LOSSES, norms: tuple = NORMS, **options: object) -> None:
        settings = {"TRAIN_ITERS": "4", "CLIP_GRAD": "1.1"}
        elapsed = [100.0] * len(losses)
        make_run(place / name, strategy, elapsed_ms=elapsed, losses=losses, norms=norms, settings=settings, **options)

    run("ddp", "ddp")
    run("zero2", "zero2")
    run("tensor-loss", "tensor", losses=(8.0, 7.9, 7.62, 7.5))
    run("hybrid-norm", "hybrid", norms=(2.0, 1.5, 1.1, 0.8))
    run("pipeline-nan", "pipeline", losses=(8.0, None, 7.6, 7.5))
    run("zero3-short", "zero3", losses=LOSSES[:3], norms=NORMS[:3])
    run("native", "ddp", engine="native")


def families(place: Path) -> None:
    """Models that must not be compared."""
    make_run(place / "t5")
    make_run(place / "gpt", family="gpt")
    make_run(place / "unknown", "zero1", padded_vocab_size=None)


def ends(place: Path) -> None:
    """Every way in which a run ends without success, or has not ended."""
    reasons = {
        "out-of-memory": "rank 0: the GPU's memory is full",
        "diverged": "the loss is not a number at iteration 5",
        "timeout": "rank 1 is stuck",
        "network": "the connection was lost",
        "incomplete": "it ended early",
        "cancelled": "INT received",
    }
    make_run(place / "ddp")
    for number, (status, reason) in enumerate(reasons.items()):
        options = {"settings": {"TRAIN_ITERS": "30"}, "status": status, "reason": reason}
        make_run(place / status, list(COLOURS)[number + 1], elapsed_ms=times(90, number, 9), **options)


def real(place: Path) -> None:
    """Two real runs, and one whose profile shows a slower rank."""
    shutil.copytree(TESTS / "data" / "runs", place)
    (profile,) = TESTS.rglob("profile.json")
    shutil.copy(profile, place / "native-zero2" / "profile.json")
    profiled = {"PROFILE_ITERATION": "6"}
    made = make_run(place / "ddp", "ddp", engine="native", elapsed_ms=times(4900, 3), settings=profiled)
    content = json.loads(profile.read_text())
    slower = content["ranks"][1]
    slower["parts"]["forward"] += slower["parts"].pop("waiting for slower ranks")
    slower["waited_for"] = {}
    (made / "profile.json").write_text(json.dumps(content))
    for directory in (place / "native-zero2", made):
        seal(directory)


def forge(package: Path) -> None:
    """Copies of a package with a changed log, figures, page and list, and one that was cut off."""
    with tarfile.open(package) as tar:
        files = {entry.name: tar.extractfile(entry).read() for entry in tar}
    log = next(name for name in files if name.endswith("zero1/node0.log"))
    changes: dict[str, Callable[[dict[str, bytes]], object]] = {
        "log": lambda files: files.update({log: files[log].replace(b"(ms): 11", b"(ms): 10")}),
        "figures": lambda files: files.update(
            {name: text.replace(b"1", b"2") for name, text in files.items() if name.endswith("comparison.json")}
        ),
        "page": lambda files: files.update(
            {name: text.replace(b"ddp", b"DDP") for name, text in files.items() if name.endswith("index.html")}
        ),
        "missing": lambda files: files.pop(log),
    }
    for change, apply in changes.items():
        changed = dict(files)
        apply(changed)
        with tarfile.open(package.with_name(f"forged-{change}.tar.gz"), "w:gz") as tar:
            for name, content in changed.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    package.with_name("forged-cut.tar.gz").write_bytes(package.read_bytes()[:-2000])


def main(words: list[str]) -> None:
    if words[0] == "--forge":
        forge(Path(words[1]))
        return
    directory = Path(words[0])
    for make in (strategies, repeats, parity, families, ends, real):
        make(directory / make.__name__)
    repeats(directory / "later", day=1, slower=1.3)


if __name__ == "__main__":
    main(sys.argv[1:])
