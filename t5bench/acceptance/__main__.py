"""See scripts/gpu_acceptance.sh, which finds Python, packages and the engine, and then runs this."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.acceptance import plan as plans
from t5bench.acceptance import results, summary, toolkit
from t5bench.acceptance.machine import describe, name_of
from t5bench.acceptance.steps import EXIT_TIME, FAILED, PASSED, Runner, say
from t5bench.record.status import CONFIGURATION, EXIT_CODES

EXIT_FAILED = 1
# What the loop that is not compiled gets of its part's time; the compiled one has what the engines leave.
EAGER_SECONDS = 60.0


def look(engine: Path) -> dict:
    """acceptance.machine's answer, from a process that gives the GPU back."""
    command = [sys.executable, "-m", "acceptance.machine", str(engine)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def complete_toolkit(machine: dict, links: Path) -> None:
    """For all steps; what is set already wins, or stands behind. The headers of another CUDA would not do."""
    ours, theirs = ((version or "").split(".")[0] for version in (machine["nvcc"], machine["versions"]["cuda"]))
    if ours != theirs:
        return
    for name, value in toolkit.completions(links).items():
        if name == "CUDA_HOME":
            os.environ.setdefault(name, value)
        else:
            say(f"the CUDA toolkit here is a compiler alone: {name} adds what lies beside torch")
            os.environ[name] = os.pathsep.join(filter(None, (value, os.environ.get(name))))


def run_acceptance(plan: plans.Plan, runner: Runner) -> None:
    runner.run([plans.floor(plan), plans.data(plan)])
    checked_on_the_side = [*plans.compilations(plan), *plans.refusals(plan)]
    # The native engine needs nothing compiled, so it computes while the compilers do.
    native = [engine for engine in plan.engines if engine == plans.NATIVE]
    runner.run(
        [*checked_on_the_side, *(s for e in native for s in plans.parity(plan, e))], at_once=1 if plan.rehearsal else 6
    )
    runner.run(plans.large(plan))
    runner.run(plans.out_of_memory(plan))
    others = [engine for engine in plan.engines if engine != plans.NATIVE]
    runner.run([s for e in others for s in plans.parity(plan, e)], at_once=1 if plan.rehearsal else 2)


def run_throughput(plan: plans.Plan, runner: Runner) -> None:
    runner.run([plans.floor(plan), plans.data(plan)])
    runner.run([plans.baseline(plan, "eager", EAGER_SECONDS)])
    runner.run(plans.points(plan))
    runner.run([plans.baseline(plan, "compiled", runner.left() - 60)])


PARTS = {"acceptance": run_acceptance, "throughput": run_throughput}


def main() -> int:
    parser = argparse.ArgumentParser(prog="acceptance", description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--results", type=str, required=True, help="empty: docs/results/<device>")
    parser.add_argument("--engine-directory", type=Path, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="0 rehearses on the CPU")
    parser.add_argument("--minutes", type=float, required=True, help="of each part")
    parser.add_argument("--engines", required=True)
    parser.add_argument("--strategies", required=True)
    parser.add_argument("--micro-batch-sizes", required=True)
    parser.add_argument("--packed-at", default="", help="the commit that a bundle was packed at")
    parser.add_argument("parts", nargs="+", choices=PARTS)
    arguments = parser.parse_args()

    machine = look(arguments.engine_directory) | {"packed_at": arguments.packed_at}
    for what, value in describe(machine):
        say(f"{what:>24}: {value}")
    if arguments.gpus and not machine["torch_sees"]:
        versions = machine["versions"]
        say(
            f"error: nvidia-smi lists a GPU, and torch {versions['torch']} sees none\n"
            f"       it is built for CUDA {versions['cuda']}, and the driver serves up to {machine['driver_cuda']}"
        )
        return EXIT_CODES[CONFIGURATION]
    name = name_of(machine) if arguments.gpus else "rehearsal"
    work = arguments.work / name
    output = Path(arguments.results) if arguments.results else REPOSITORY / "docs" / "results" / name
    if not arguments.gpus and not arguments.results:
        output = work / "results"
    plan = plans.Plan(
        work=work,
        engine_directory=arguments.engine_directory,
        gpus=arguments.gpus,
        engines=arguments.engines.split(),
        strategies=arguments.strategies.split(),
        micro_batch_sizes=[int(size) for size in arguments.micro_batch_sizes.split()],
    )
    work.mkdir(parents=True, exist_ok=True)
    complete_toolkit(machine, work / "cuda-libraries")
    runner = Runner(work, 0.0)
    runner.end_on_signals()
    for part in arguments.parts:
        runner.deadline = time.monotonic() + 60 * arguments.minutes
        say(f"\n{part}, at most {arguments.minutes:g} minutes")
        PARTS[part](plan, runner)
        # After each part: what is known is kept whatever happens to the next.
        found = results.gather(plan, machine, runner.outcomes)
        summary.write(found, output)
        results.pack(plan, output / "records.tar.xz")
    say(f"\n{output / 'README.md'}")
    say(summary.verdict(found))
    if runner.interrupted:
        return 128 + runner.interrupted
    ends = {outcome.result for outcome in runner.outcomes.values()}
    if FAILED in ends or found["failed"]:
        return EXIT_FAILED
    return 0 if ends == {PASSED} else EXIT_TIME


if __name__ == "__main__":
    sys.exit(main())
