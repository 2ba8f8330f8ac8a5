"""Honest runs of the native engine, whose largest differences from one process docs/parity.md tells:

    python tests/native/honest_runs.py DATA [fp32|bf16] [number of runs]

Layouts of 1 to 8 processes, each with seeds and a batch of its own. Processes are forked from one that has imported
everything, so that a run takes seconds.
"""

import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from real_runs import GATE, GATE_ARGUMENTS, environment
from tabulate import tabulate

from t5bench.compare.parity import TOLERANCE, relative_difference
from t5bench.plan.launchers import ask
from t5bench.plan.ports import free_port
from t5bench.record.log import iterations
from t5bench.record.plan import Plan

Curve = list[tuple[float, float]]
ZERO = ("zero1", "zero2", "zero3", "zero3_offload")


def layouts() -> Iterator[tuple[str, int, int]]:
    """Strategy, tensor-parallel size and processes."""
    for processes in range(1, 9):
        yield "ddp", 1, processes
        yield from ((strategy, 1, processes) for strategy in ZERO if processes > 1)
        yield from (("tensor", tp, processes) for tp in (2, 4) if processes % tp == 0)
        yield from (("pipeline", 1, processes) for _ in range(processes % 2 == 0))
        yield from (("hybrid", tp, processes) for tp in (2, 4) if processes % (2 * tp) == 0)


@cache
def plan_of(strategy: str, tp: int, processes: int, batch: int, precision: str, data: str) -> Plan:
    chosen = GATE | {"ENGINE": "native", "NPROC_PER_NODE": str(processes), "GLOBAL_BATCH_SIZE": str(batch)}
    chosen |= {"TENSOR_PARALLEL_SIZE": str(tp), "MEGATRON_DATA_DIR": data, "OUTPUT_DIR": tempfile.mkdtemp()}
    chosen |= {"PRECISION_FLAG": "" if precision == "fp32" else f"--{precision}"}
    plan = ask(strategy, ["--", *GATE_ARGUMENTS, "--num-workers", "0"], environment(**chosen))
    assert plan.layout, plan.obstacles
    if plan.ds_config:
        (Path(plan.output_dir) / "ds_config.json").write_text(json.dumps(plan.ds_config))
    return plan


@cache
def train(strategy: str, tp: int, processes: int, batch: int, precision: str, data: str, seed: int) -> Curve:
    """The loss and gradient norm of each iteration. Raises RuntimeError where a process fails."""
    from native import arguments
    from native import train as engine

    plan = plan_of(strategy, tp, processes, batch, precision, data)
    port, size = free_port(), plan.layout.world_size
    with tempfile.TemporaryFile("w+") as log:
        children = []
        for rank in range(size):
            if not (child := os.fork()):
                with contextlib.suppress(BaseException):
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
                    os.environ.update({name: str(value) for name, value in names.items()})
                    os.environ["MASTER_ADDR"] = "127.0.0.1"
                    engine.run(arguments.parse([*plan.arguments.words, "--seed", str(seed)]))
                    os._exit(0)
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            children.append(child)
        failed = [child for child in children if os.waitpid(child, 0)[1]]
        log.seek(0)
        text = log.read()
    if failed:
        raise RuntimeError(text[-3000:])
    return [(line.lm_loss, line.grad_norm) for line in iterations(text.splitlines())]


def main(data: str, precision: str = "fp32", runs: str = "100") -> int:
    import deepspeed  # noqa: F401
    import torch

    from native import data as native_data

    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    vocabulary = native_data.Vocabulary.load(f"{data}/tokenizer")
    native_data.Vocabulary.load = staticmethod(lambda _: vocabulary)
    largest, alarms = {}, 0
    for number, (strategy, tp, processes) in enumerate(itertools.islice(itertools.cycle(layouts()), int(runs))):
        pp = 2 if strategy in ("pipeline", "hybrid") else 1
        batch, seed = 4 * processes // (tp * pp), 1000 + number // 4
        reference = train("ddp", 1, 1, batch, precision, data, seed)
        curve = train(strategy, tp, processes, batch, precision, data, seed)
        assert len(curve) == len(reference) == int(GATE["TRAIN_ITERS"])
        pairs = [zip(ours, theirs, strict=True) for ours, theirs in zip(curve, reference, strict=True)]
        differences = [
            max(values) for values in zip(*([relative_difference(*p) for p in pair] for pair in pairs), strict=True)
        ]
        allowed = TOLERANCE[precision]
        alarms += differences[0] > allowed.loss or differences[1] > allowed.norm
        key = strategy, tp, pp
        count, sizes, loss, norm = largest.get(key, (0, set(), 0.0, 0.0))
        largest[key] = count + 1, sizes | {processes}, max(loss, differences[0]), max(norm, differences[1])
        print(f"{number + 1}: {strategy} TP {tp}, {processes} processes, seed {seed}: {differences}", file=sys.stderr)
    print(report(largest, precision))
    print(f"{runs} runs, {alarms} beyond {TOLERANCE[precision]}")
    return int(alarms > 0)


def report(largest: dict[tuple[str, int, int], Sequence], precision: str) -> str:
    header = ["strategy", "precision", "TP", "PP", "processes", "runs", "loss", "gradient norm"]
    rows = [
        [strategy, precision, tp, pp, ", ".join(map(str, sorted(sizes))), count, f"{loss:.1e}", f"{norm:.1e}"]
        for (strategy, tp, pp), (count, sizes, loss, norm) in largest.items()
    ]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
