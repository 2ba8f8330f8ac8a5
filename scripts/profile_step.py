"""Runs a training script unchanged and profiles one of its iterations (a launcher's PROFILE_ITERATION).

    profile_step.py --iteration N --output FILE SCRIPT ARGUMENTS...

Optimizer steps tell the iterations: the profile goes from the end of iteration N - 1's step to the end of N's, so it
holds that iteration's log line, its forward and backward passes and its update. DeepSpeed's and PyTorch's
optimizers all are torch.optim.Optimizer. DeepSpeed steps once more before training, and ZeRO-3 for each group of
parameters: a step counts only where data was fetched since the one before.
Only the first rank writes; t5bench/profile.py says what.
"""

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from t5bench import profile


class OneIteration:
    """Counts iterations by fetched data and the optimizer step that follows, and profiles between two such steps."""

    def __init__(self, iteration: int, output: Path) -> None:
        self.iteration, self.output = iteration, output
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.fetched = False
        self.steps = 0
        self.begun = 0.0
        self.profiler: Any = None

    def watch(self) -> None:
        """Has DataLoader and Optimizer tell from now on."""
        iterate = DataLoader.__iter__

        def tell(loader: DataLoader) -> Iterator[Any]:
            for batch in iterate(loader):
                self.fetched = True
                yield batch

        DataLoader.__iter__ = tell
        register_optimizer_step_post_hook(self.after_step)

    def after_step(self, *_: Any) -> None:
        if not self.fetched:
            return
        self.fetched = False
        self.steps += 1
        if self.steps == self.iteration - 1:
            self.begin()
        elif self.steps == self.iteration:
            self.end()

    def synchronise(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        # Kernels alone on a GPU: the operators above them are ten times as many and slow down what they launch.
        activity = torch.profiler.ProfilerActivity
        self.profiler = torch.profiler.profile(activities=[activity.CUDA if self.device == "cuda" else activity.CPU])
        self.synchronise()
        self.profiler.__enter__()
        self.begun = time.perf_counter()

    def end(self) -> None:
        wall_ms = 1000 * (self.synchronise() - self.begun)
        self.profiler.__exit__(None, None, None)
        content = profile.summarise(self.profiler, wall_ms=wall_ms, iteration=self.iteration, device=self.device)
        self.output.write_text(json.dumps(content, indent=2) + "\n")
        self.profiler = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if os.environ.get("RANK", "0") == "0":
        OneIteration(arguments.iteration, arguments.output).watch()
    sys.argv = [arguments.script, *arguments.arguments]
    # As if Python had been given the script itself.
    sys.path[0] = str(Path(arguments.script).resolve().parent)
    runpy.run_path(arguments.script, run_name="__main__")


if __name__ == "__main__":
    main()
