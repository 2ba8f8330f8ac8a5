"""results.json, which holds every figure and continues anywhere, and README.md, which is made from it alone."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from t5bench import Problem
from t5bench.printed_table import text_table

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
OUT_OF_TIME = "out of time"
NOT_RUN = "not run"
FILE = "results.json"
# What the profiler calls the parts of PyTorch that compute attention, their kernels, and Megatron's softmax kernels.
ATTENTION = re.compile(
    r"aten::_scaled_dot_product|flash|fmha|cudnn.*sdpa|sdpa.*cudnn|efficient_attention|scaled_\w*softmax_warp"
)
LONGEST_NAME = 60


class StepResult(Struct):
    """How a step ended."""

    result: str
    # The number of the call that ran it, from 1.
    call: int
    status: int | None = None
    seconds: float = 0.0
    # Why it did not pass, or "".
    reason: str = ""
    # Clocks, temperature and what slowed the GPUs down meanwhile; empty without NVML.
    gpu: dict[str, Any] = {}
    # What was measured: each kind of step has its own.
    figures: Any = None


class CallRecord(Struct):
    """One call of scripts/gpu_acceptance.sh, and the machine that it found."""

    made: str
    facts: dict[str, Any]


class Results(Struct):
    """Everything that was measured on one kind of machine, in one or several calls."""

    rehearsal: bool
    # The names of the GPUs; none in a rehearsal.
    gpus: list[str]
    # Samples of an iteration in every measurement.
    batch: int
    calls: list[CallRecord] = []
    # By the name of the step, in the order in which they ran.
    steps: dict[str, StepResult] = {}

    def passed(self, name: str) -> bool:
        return name in self.steps and self.steps[name].result == PASSED

    def verdict(self) -> str:
        """One sentence for the terminal and the top of the summary."""
        counts = Counter(step.result for step in self.steps.values())
        passed = counts.pop(PASSED, 0)
        others = "".join(f", {count} {result}" for result, count in counts.items())
        return f"{passed} of {len(self.steps)} steps passed{others}."


def name_of(gpus: Sequence[str]) -> str:
    """A directory's name for the machine's devices, for example nvidia-h100-80gb-hbm3 or 2x-nvidia-h200."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower()).strip("-")
    return f"{len(gpus)}x-{slug}" if len(gpus) > 1 else slug


def attention_kernels(names: Iterable[str]) -> list[str]:
    """The names, of operators or kernels, that tell which attention ran."""
    return sorted({name.removeprefix("void ")[:LONGEST_NAME] for name in names if ATTENTION.search(name)})


def read(file: Path) -> Results:
    """Raises Problem."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Results)
    except (OSError, ValueError) as error:
        raise Problem(f"{file} cannot be continued: {error}", "Name the results.json of an earlier call") from error


def continued(files: Iterable[Path], new: Results) -> Results:
    """The results with most passed steps among these files, or the new ones. Raises Problem for another machine's."""
    results = new
    for file in files:
        earlier = read(file)
        asked = (new.rehearsal, new.gpus, new.batch)
        if (earlier.rehearsal, earlier.gpus, earlier.batch) != asked:
            described = f"{', '.join(earlier.gpus) or 'a rehearsal'} with {earlier.batch} samples an iteration"
            here = f"{', '.join(new.gpus) or 'a rehearsal'} with {new.batch}"
            remedy = "Choose another RESULTS_DIR, or the same machine and MICRO_BATCH_SIZES"
            raise Problem(f"{file} has the results of {described}, and this is {here}", remedy)
        if sum(map(earlier.passed, earlier.steps)) >= sum(map(results.passed, results.steps)):
            results = earlier
    return results


def encoded(results: Results) -> bytes:
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"


# ---- README.md -----------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    cells = [[_cell(value) for value in row] for row in rows]
    return text_table(cells, header, is_markdown=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(results: Results) -> str:
    """README.md."""
    return "\n\n".join(filter(None, _paragraphs(results))) + "\n"


def _paragraphs(results: Results) -> Iterable[str]:
    yield "# A rehearsal on the CPU" if results.rehearsal else f"# T5-Large on {', '.join(results.gpus)}"
    made = ", ".join(call.made for call in results.calls)
    yield f"Made by `bash scripts/gpu_acceptance.sh` in {len(results.calls)} call(s): {made}. {results.verdict()}"
    if results.rehearsal:
        yield "**At tiny size: this shows that the steps work; the figures mean nothing.**"
    yield _side_by_side({f"call {number}": call.facts for number, call in enumerate(results.calls, 1)})
    yield from _device(results.steps)
    yield from _measurements(results)
    yield from _parity(results.steps)
    yield "## Steps"
    rows = []
    for name, step in results.steps.items():
        rows.append([name, step.result, step.call, step.seconds, step.reason])
    yield table(["step", "result", "call", "seconds", "reason"], rows)
    yield "`results.json` has all figures, `records-N.tar.gz` the records, outputs and profiles of call N."


def _side_by_side(facts_of: Mapping[str, Mapping[str, Any]]) -> str:
    """A table with a column for each of these, and a line for each fact that one of them has."""
    names: list[str] = []
    for facts in facts_of.values():
        names += facts
    rows = []
    for name in dict.fromkeys(names):
        rows.append([name, *(facts.get(name) for facts in facts_of.values())])
    return table(["", *facts_of], rows)


def _device(steps: Mapping[str, StepResult]) -> Iterable[str]:
    measured: dict[str, dict[str, Any]] = {}
    for name in ("device", "device-after"):
        if name in steps and steps[name].figures:
            measured[name] = steps[name].figures
    rates = {name: figures.get("rates", {}) for name, figures in measured.items()}
    if not any(rates.values()):
        return
    yield "## The device at its best"
    yield _side_by_side(rates)
    attention = [figures["attention"] for figures in measured.values() if figures.get("attention")]
    if attention:
        yield "What PyTorch's attention runs here, at T5-Large's sizes:"
        yield _attention_table(attention[0])


def _attention_table(probes: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for probe in probes:
        kernels = ", ".join(probe["kernels"]) or probe["error"]
        rows.append([probe["precision"], probe["mask"], probe["dropout"], kernels, probe["mean"]])
    return table(["precision", "mask", "dropout", "kernels", "mean over ones (1 is right)"], rows)


def _measurements(results: Results) -> Iterable[str]:
    rows: list[dict[str, Any]] = []
    for step in results.steps.values():
        points = step.figures if isinstance(step.figures, list) else []
        rows += [_measurement(point, step.gpu) for point in points]
    if rows:
        yield "## The tiny T5" if results.rehearsal else "## T5-Large"
        yield (
            f"{results.batch} samples an iteration in every row, including AdamW's update; bf16, with dropout "
            "unless the row says otherwise. Peak memory is what PyTorch allocated from the first iteration on."
        )
        yield table(list(rows[0]), [row.values() for row in rows])


def _measurement(point: Mapping[str, Any], gpu: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the table, by the columns' names."""
    clocks = gpu.get("sm_mhz")
    row = {
        "what": point["what"],
        "micro-batch": point["micro_batch"],
        "ms/iteration": point["status"],
        "95 %": None,
        "samples/s": None,
        "TFLOP/s": None,
        "MFU": None,
        "GPU MiB": None,
        "SM MHz": f"{clocks['lowest']}-{clocks['highest']}" if clocks else None,
        "\u00b0C": gpu.get("temperature_c"),
        "slowed by": ", ".join(gpu.get("slowed_by", ())),
        "attention": "",
        "what limits it": point["reason"],
    }
    time = point.get("milliseconds_per_iteration")
    if not time:
        return row
    interval = "" if time["low"] is None else f"{time['low']:.1f} to {time['high']:.1f}"
    return row | {
        "ms/iteration": f"{time['median']:.1f}",
        "95 %": interval,
        "samples/s": point["samples_per_second"]["median"],
        "TFLOP/s": point["tflops_per_gpu"],
        "MFU": point["mfu"],
        "GPU MiB": max(point["peak_memory_mib"].values(), default=None),
        "attention": ", ".join(point["attention"]),
        "what limits it": point["limits"],
    }


def _parity(steps: Mapping[str, StepResult]) -> Iterable[str]:
    noise = {name: step.figures for name, step in steps.items() if name.startswith("noise") and step.figures}
    checks = {name: step.figures for name, step in steps.items() if name.startswith("parity") and step.figures}
    if noise or checks:
        yield "## Do they train the same model?"
        yield (
            "In fp32 without dropout, at tiny size. A strategy with more processes than devices shares one, over "
            "gloo. The noise is the largest relative difference of two runs of the same DDP."
        )
    if noise:
        rows = [[name, figures["loss"], figures["norm"]] for name, figures in noise.items()]
        yield table(["noise", "loss", "gradient norm"], rows)
    for text in checks.values():
        yield f"```\n{text.strip()}\n```"
