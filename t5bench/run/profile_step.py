"""Runs a training program unchanged and profiles one of its iterations (a launcher's PROFILE_ITERATION).

    python -m t5bench.run.profile_step --iteration N --output FILE (-m MODULE | SCRIPT) ARGUMENTS...

Optimizer steps tell the iterations: the profile goes from the end of iteration N - 1's step to the end of N's, so it
holds that iteration's log line, its forward and backward passes and its update. DeepSpeed's and PyTorch's
optimizers all are torch.optim.Optimizer. DeepSpeed steps once more before training, and ZeRO-3 for each group of
parameters: a step counts only where data was fetched since the one before.
Only the first rank writes; t5bench/record/profile.py says what.
"""

import argparse
import json
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from t5bench.record import profile


class ProfiledStretch:
    """What a device ("cuda" or "cpu") does from begin() to end()."""

    def __init__(self, device: str) -> None:
        self.device, self.begun = device, 0.0
        self.profiler = self.make_profiler()

    def make_profiler(self) -> torch.profiler.profile:
        # Kernels alone on a GPU: the operators above them are ten times as many and slow down what they launch.
        activity = torch.profiler.ProfilerActivity
        return torch.profiler.profile(activities=[activity.CUDA if self.device == "cuda" else activity.CPU])

    def synchronise(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        if self.device == "cuda":
            # Loading CUDA's tracer takes a while, which is not the iteration's.
            with self.make_profiler():
                torch.zeros(1, device="cuda")
                self.synchronise()
        self.profiler.start()
        self.begun = self.synchronise()

    def end(self, iteration: int) -> dict[str, Any]:
        """The content of profile.json."""
        wall_ms = 1000 * (self.synchronise() - self.begun)
        self.profiler.stop()
        return profile.summary(self.spans(), wall_ms=wall_ms, iteration=iteration, device=self.device)

    def spans(self) -> list[profile.Span]:
        if self.device != "cuda":
            return [
                # A parent's time holds its children's.
                profile.Span(event.name, event.time_range.start, event.self_cpu_time_total)
                for event in self.profiler.events()
                if event.self_cpu_time_total > 0
            ]
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self.profiler.export_chrome_trace(str(path))
            return profile.device_spans(json.loads(path.read_text(errors="replace")))


class OneIteration:
    """Counts iterations by fetched data and the optimizer step that follows, and profiles between two such steps."""

    def __init__(self, iteration: int, output: Path) -> None:
        self.iteration, self.output = iteration, output
        self.fetched = False
        self.steps = 0
        self.stretch: ProfiledStretch | None = None

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
            self.stretch = ProfiledStretch("cuda" if torch.cuda.is_initialized() else "cpu")
            self.stretch.begin()
        elif self.stretch and self.steps == self.iteration:
            self.output.write_text(json.dumps(self.stretch.end(self.iteration), indent=2) + "\n")
            self.stretch = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, default=[], metavar="MODULE")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT")
    arguments = parser.parse_args()
    if os.environ.get("RANK", "0") == "0":
        OneIteration(arguments.iteration, arguments.output).watch()
    sys.argv = arguments.module or arguments.script
    if arguments.module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
