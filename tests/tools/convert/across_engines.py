"""Runs of one engine that the other continues: trains the pairs, and compares the curves.

    PYTHONPATH=.:tests python tests/tools/convert/across_engines.py [--store FILE] [NUMBER...]

prints one JSON object: for each pair the ten losses and gradient norms after the change, and those of the run that was
not interrupted. NUMBER: of pairs, from 0; without any, all of them.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real_runs import EXACT, environment, train
from shared_fixtures import clone_engine, engine_checkout, prepare_sample
from support import REPO_ROOT

from t5bench.record.records import load
from t5bench.record.run import Run

SAVED = 10
RECIPE = EXACT | {"TRAIN_ITERS": "20", "SAVE_INTERVAL": str(SAVED)}


@dataclass(frozen=True)
class Side:
    engine: str
    strategy: str
    layout: str
    """In words."""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.engine} {self.layout}"


@dataclass(frozen=True)
class Pair:
    family: str
    before: Side
    after: Side
    tp: int = 1
    pp: int = 1

    @property
    def title(self) -> str:
        return f"{self.family}: {self.before.title} -> {self.after.title}"

    @property
    def reshaping(self) -> list[str]:
        """What `reshape` is told besides the directories."""
        if self.after.engine == "native":
            return ["--engine", "native"]
        sizes = (("--tp", self.tp), ("--pp", self.pp))
        return ["--engine", "megatron", *(word for name, size in sizes for word in (name, str(size)) if size > 1)]


EIGHT = {"NPROC_PER_NODE": "8"}
PAIRS = (
    Pair("t5", Side("native", "ddp", "DDP"), Side("megatron", "ddp", "DDP")),
    Pair("t5", Side("native", "fsdp2", "FSDP2"), Side("megatron", "pipeline", "PP 2"), pp=2),
    Pair("t5", Side("native", "pipeline", "PP 2"), Side("megatron", "ddp", "DDP")),
    Pair("t5", Side("native", "zero3", "ZeRO-3"), Side("megatron", "hybrid", "TP 2 x PP 2"), tp=2, pp=2),
    Pair("t5", Side("megatron", "zero1", "ZeRO-1"), Side("native", "tensor", "TP 2")),
    Pair("t5", Side("megatron", "hybrid", "TP 2 x PP 2 x DP 2", EIGHT), Side("native", "fsdp2", "FSDP2")),
    Pair("gpt", Side("native", "zero3", "ZeRO-3"), Side("megatron", "tensor", "TP 2"), tp=2),
    Pair("gpt", Side("native", "tensor", "TP 2"), Side("megatron", "hybrid", "TP 2 x PP 2"), tp=2, pp=2),
    Pair("gpt", Side("megatron", "pipeline", "PP 2"), Side("native", "zero2", "ZeRO-2")),
    Pair("gpt", Side("megatron", "3d", "3D", EIGHT), Side("native", "hybrid", "TP 2 x PP 2")),
)


@dataclass(frozen=True)
class Workplace:
    """Where the pairs train."""

    directory: Path

    def prepare(self) -> None:
        """Raises SystemExit without the engine."""
        checkout = engine_checkout()
        if not checkout:
            raise SystemExit("no checkout of Megatron-DeepSpeed: set MEGATRON_DIR")
        clone_engine(self.directory, checkout)
        for family in ("t5", "gpt"):
            (self.directory / family).mkdir()
            prepare_sample(self.directory / family, MODEL_FAMILY=family, MEGATRON_DIR=str(self.engine))

    @property
    def engine(self) -> Path:
        return self.directory / "Megatron-DeepSpeed"

    def settings(self, family: str, side: Side) -> dict[str, str]:
        place = {"MEGATRON_DIR": str(self.engine), "MEGATRON_DATA_DIR": str(self.directory / family)}
        return RECIPE | place | {"MODEL_FAMILY": family, "ENGINE": side.engine} | side.settings

    def uninterrupted(self, family: str, side: Side) -> Path:
        run = self.directory / f"{family} {side.title}"
        if not run.exists():
            train(side.strategy, run, **self.settings(family, side))
        return run

    def continued(self, pair: Pair) -> Run:
        run = self.uninterrupted(pair.family, pair.before)
        target = self.directory / pair.title.replace(" -> ", " to ").replace(":", "")
        words = ["reshape", str(run), "--iteration", str(SAVED), *pair.reshaping, "--output", str(target)]
        subprocess.run(
            [sys.executable, "-m", "t5bench", *words], cwd=REPO_ROOT, env=environment(), check=True, capture_output=True
        )
        return train(pair.after.strategy, target, **self.settings(pair.family, pair.after), RESUME="1")

    def compared(self, pair: Pair) -> dict[str, Any]:
        """The figures of a pair: (loss, norm) of each iteration after the change."""
        found = figures(self.continued(pair))
        expected = figures(load(self.uninterrupted(pair.family, pair.before)))
        assert len(found) == len(expected) == SAVED
        return {
            "reshape": shlex.join(["python", "-m", "t5bench", "reshape", "RUN", *pair.reshaping]),
            "continued": found,
            "uninterrupted": expected,
        }


def figures(run: Run) -> list[tuple[float, float]]:
    return [(line.lm_loss, line.grad_norm) for line in run.iterations if line.iteration > SAVED]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--store", type=Path, help="put the figures into this file, from which docs has a page")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Workplace(Path(directory))
        place.prepare()
        for number in arguments.numbers or range(len(PAIRS)):
            found[PAIRS[number].title] = place.compared(PAIRS[number])
            print(PAIRS[number].title, found[PAIRS[number].title], file=sys.stderr)
    print(json.dumps(found))
    if arguments.store:
        former = json.loads(arguments.store.read_text()) if arguments.store.is_file() else {}
        arguments.store.write_text(json.dumps(former | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
