"""Honest runs; docs/parity_evidence.md shows their largest differences from a run of one process:

    [MODEL_FAMILY=gpt] python tests/native/honest_runs.py DATA [fp32|bf16] [number of runs]

Layouts of 1 to 8 processes, with different seeds and batches. A run of the native engine takes some seconds for each
process. A GPT is trained by Megatron-DeepSpeed in MEGATRON_DIR, by 1, 2 and 4 processes.
"""

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[level]) for level in (1, 2))
from real_runs import GATE, train

from t5bench.compare.parity import curve as curve_of
from t5bench.printed_table import text_table
from t5bench.sweep.parity_check import ARGUMENTS
from training_comparison.curves import TOLERANCE, difference

ZERO = ("zero1", "zero2", "zero3", "zero3_offload")
FIELDS = ("lm_loss", "grad_norm")
IS_GPT = os.environ.get("MODEL_FAMILY") == "gpt"


def layouts() -> Iterator[tuple[str, int, int]]:
    """Strategy, tensor-parallel size and processes."""
    for processes in (1, 2, 4) if IS_GPT else range(1, 9):
        yield "ddp", 1, processes
        yield from ((strategy, 1, processes) for strategy in ZERO if processes > 1)
        yield from (("tensor", tp, processes) for tp in (2, 4) if processes % tp == 0)
        yield from (("pipeline", 1, processes) for _ in range(processes % 2 == 0))
        yield from (("hybrid", tp, processes) for tp in (2, 4) if processes % (2 * tp) == 0)
        yield from (("3d", tp, processes) for tp in (1, 2) if IS_GPT and processes % (2 * tp) == 0)


@cache
def curves(strategy: str, tp: int, processes: int, batch: int, precision: str, data: str, seed: int) -> list[dict]:
    """The loss and the gradient norm by iteration."""
    settings = GATE | {"MEGATRON_DATA_DIR": data, "TENSOR_PARALLEL_SIZE": str(tp)}
    settings |= {"ENGINE": "megatron" if IS_GPT else "native"}
    settings |= {"NPROC_PER_NODE": str(processes), "GLOBAL_BATCH_SIZE": str(batch), "OMP_NUM_THREADS": "1"}
    settings |= {"PRECISION_FLAG": "" if precision == "fp32" else f"--{precision}"}
    arguments = ("--", *ARGUMENTS, "--num-workers", "0", "--seed", str(seed))
    with tempfile.TemporaryDirectory() as directory:
        run = train(strategy, Path(directory), arguments=arguments, **settings)
    return [curve_of(run, field) for field in FIELDS]


def main(data: str, precision: str = "fp32", runs: str = "100") -> int:
    largest = {}
    alarms = 0
    allowed = TOLERANCE[precision]
    for number, (strategy, tp, processes) in enumerate(itertools.islice(itertools.cycle(layouts()), int(runs))):
        pp = 2 if strategy in ("pipeline", "hybrid", "3d") else 1
        size = (4 * processes // (tp * pp), precision, data, 1000 + number // 4)
        pairs = zip(curves(strategy, tp, processes, *size), curves("ddp", 1, 1, *size), strict=True)
        loss, norm = (difference("", ours, theirs, 0.0).largest for ours, theirs in pairs)
        alarms += loss > allowed.loss or norm > allowed.norm
        sizes, count, most_loss, most_norm = largest.get((strategy, tp, pp), (set(), 0, 0.0, 0.0))
        largest[strategy, tp, pp] = sizes | {processes}, count + 1, max(most_loss, loss), max(most_norm, norm)
        print(f"{number + 1}: {strategy} TP {tp}, {processes} processes: {loss:.1e} {norm:.1e}", file=sys.stderr)
    rows = [
        [strategy, precision, tp, pp, ", ".join(map(str, sorted(sizes))), *found]
        for (strategy, tp, pp), (sizes, *found) in largest.items()
    ]
    header = ["strategy", "precision", "TP", "PP", "processes", "runs", "loss", "gradient norm"]
    cells = [[f"{cell:.1e}" if isinstance(cell, float) else cell for cell in row] for row in rows]
    print(text_table(cells, header, is_markdown=True))
    print(f"{runs} runs, {alarms} beyond {allowed}")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
