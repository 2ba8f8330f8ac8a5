"""The summary of what was found, for people: README.md, results.json and a picture, in one directory."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from t5bench.acceptance.machine import describe
from t5bench.acceptance.plan import THROUGHPUT_BATCH, VOCABULARY
from t5bench.acceptance.results import not_run
from t5bench.record.status import COMPLETE

PICTURE = "throughput.png"


def write(found: Mapping[str, Any], directory: Path) -> None:
    """Writes the files; earlier ones are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    picture = draw(found, directory / PICTURE)
    (directory / "README.md").write_text(markdown(found, picture))


def verdict(found: Mapping[str, Any]) -> str:
    """One sentence for the terminal and the top of the summary."""
    passed = sum(check["result"] == "passed" for check in found["checks"])
    text = f"{passed} of {len(found['checks'])} checks passed"
    if found["failed"]:
        text += f"; failed: {', '.join(found['failed'])}"
    if missing := not_run(found):
        text += f"; not run to the end: {', '.join(missing)}"
    return text + "."


def markdown(found: Mapping[str, Any], picture: bool) -> str:
    gpus = [gpu["name"] for gpu in found["machine"]["gpus"]]
    kind = f"{len(gpus)} x {gpus[0]}" if gpus else "the CPU, a rehearsal"
    parts = [
        f"# T5-{found['preset'].capitalize()} on {kind}",
        f"Made by `bash scripts/gpu_acceptance.sh`, {found['made']}. {verdict(found)}",
    ]
    if found["rehearsal"]:
        parts.append(
            "**A rehearsal on the CPU at tiny size: it shows that the steps work. No figure here means anything.**"
        )
    parts += [
        "## What it was measured on",
        table(["what", "found"], describe(found["machine"])),
        *strategies(found),
        *agreement(found),
        *throughput(found, picture),
        *checks(found),
    ]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[int] = ()) -> str:
    align = ["right" if column in set(right) else "left" for column in range(len(header))]
    return tabulate(list(rows), header, tablefmt="github", colalign=align, disable_numparse=True)


# ---- sections --------------------------------------------------------------------------------------------------------


def strategies(found: Mapping[str, Any]) -> list[str]:
    rows = found["large"]
    if not rows:
        return []
    first = rows[0]
    count = found["processes"]
    said = [
        f"{count} process{'es' if count > 1 else ''}, one per device; micro-batch {first['micro_batch']}, global batch "
        f"{first['global_batch']}, {first['precision']}, dropout on, the bundled sample as data, its vocabulary "
        f"padded to {found['vocabulary']} (google-t5/t5-large: {VOCABULARY}). {window(rows)}"
    ]
    if count == 1:
        said.append("On one device nothing is divided: a ZeRO row shows what its machinery costs, not what it saves.")
    if found["too_large"]:
        said.append(f"Too few devices for {', '.join(found['too_large'])}: below is whether they train correctly.")
    header = ["strategy", "engine", "ms an iteration [95 %]", "samples/s", "TFLOP/s", "MFU",
              "of the rate measured here", "GPU MiB", "host MiB", "W", "GPU busy %", "loss"]  # fmt: skip
    body = []
    for row in rows:
        start = [row["strategy"], row["engine"]]
        if row["status"] != COMPLETE or "milliseconds" not in row:
            body.append([*start, f"{row['status']}: {row['reason']}".removesuffix(": "), *[""] * 9])
            continue
        body.append([
            *start, interval(row["milliseconds"]), number(row["samples_per_second"]), number(row["tflops"]),
            percent(row["mfu"]), percent(row["of_measured_rate"]), number(row["peak_mib"], ".0f"),
            number(row["peak_host_mib"], ".0f"), number(row["power_w"], ".0f"), number(row["utilization"], ".0f"),
            f"{row['first_loss']:.3f} → {row['last_loss']:.3f}",
        ])  # fmt: skip
    return ["## Every strategy", " ".join(said), table(header, body, range(2, 11))]


def agreement(found: Mapping[str, Any]) -> list[str]:
    if not found["parity"]:
        return []
    parts = [
        "## Whether they train the same model",
        "`scripts/check_parity.sh` on this device: tiny size, fp32, no dropout, the same weights and data. Where a "
        "strategy has more processes than there are devices they share one, over gloo.",
    ]
    for entry in found["parity"]:
        parts += [f"{entry['title']}: {entry['result']}", f"```\n{entry['text']}\n```"]
    return parts


def throughput(found: Mapping[str, Any], picture: bool) -> list[str]:
    floor, points, baseline = found["floor"], found["points"], found["baseline"]
    if not floor and not points and not baseline:
        return []
    parts = ["## Throughput of one device"]
    if floor:
        shapes = ", ".join(f"{shape['name']} {number(shape['tflops'])}" for shape in floor.get("matmul_shapes") or ())
        parts.append(
            f"Measured here: bf16 matrix products {number(floor['matmul_tflops'])} TFLOP/s"
            + (f" (at this model's own shapes: {shapes})" if shapes else "")
            + f"; copies on the device {number(floor['copy_gb_per_s'])} GB/s, read and written"
            + (f"; from pinned host memory {number(floor['host_to_device_gb_per_s'])} GB/s"
               if floor.get("host_to_device_gb_per_s") else "")
            + "."
        )  # fmt: skip
    if picture:
        parts.append(f"![Samples per second by micro-batch size]({PICTURE})")
    rows = [point_row(f"{row['engine']} engine", row) for row in points]
    rows += [point_row(baseline_name(row), row) for row in baseline]
    if rows:
        header = ["what", "micro-batch", "ms an iteration [95 %]", "floor ms", "samples/s", "TFLOP/s", "MFU",
                  "of the rate measured here", "GPU MiB", "what limits it"]  # fmt: skip
        parts += [
            f"{THROUGHPUT_BATCH} samples an iteration in every row, AdamW's update included; bf16, dropout on. "
            + window([row for row in points if "milliseconds" in row])
            + " TFLOP/s and MFU count an encoder-decoder's matrix products, nothing twice. The floor is the larger of "
            "two times: matrix products at the rate above, and what must be read and written at the bandwidth above.",
            table(header, rows, range(1, 9)),
        ]
    return parts


def point_row(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["status"] != COMPLETE or not row.get("milliseconds"):
        reason = row.get("reason") or ""
        return [name, str(row["micro_batch"]), row["status"], "", "", "", "", "", "", reason]
    return [
        name, str(row["micro_batch"]), interval(row["milliseconds"]),
        number(max(row["floor_ms"]) if row["floor_ms"] else None, ".1f"), number(row["samples_per_second"]),
        number(row["tflops"]), percent(row.get("mfu")), percent(row["of_measured_rate"]),
        number(row.get("peak_mib") or row.get("peak_allocated_mib"), ".0f"), row["limits"],
    ]  # fmt: skip


def baseline_name(row: Mapping[str, Any]) -> str:
    return "Hugging Face, " + (f"torch.compile ({row['compile']})" if row["compile"] else "eager")


def checks(found: Mapping[str, Any]) -> list[str]:
    rows = [(check["title"], check["result"], check["detail"]) for check in found["checks"]]
    return [
        "## Checks",
        table(["check", "result", ""], rows),
        "The records and outputs of all runs are in `records.tar.xz`, all figures in `results.json`.",
    ]


# ---- words and numbers -----------------------------------------------------------------------------------------------


def window(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which iterations the medians are of; runs of one length agree, and the first speaks."""
    used = next((row["iterations"] for row in rows if row.get("iterations")), None)
    return f"Medians of iterations {used[0]} to {used[-1]}." if used else ""


def number(value: float | None, form: str = ".4g") -> str:
    return "" if value is None else format(value, form)


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def interval(estimate: Mapping[str, float | None]) -> str:
    text = f"{estimate['median']:.1f}"
    return text if estimate.get("low") is None else f"{text} [{estimate['low']:.1f}, {estimate['high']:.1f}]"


# ---- picture ---------------------------------------------------------------------------------------------------------


def draw(found: Mapping[str, Any], path: Path) -> bool:
    """Samples/s against the micro-batch size, with the rate at which matrix products alone would go; False where there
    is nothing to draw, or nothing to draw it with."""
    curves: dict[str, list[tuple[int, float]]] = {}
    name_of: Callable[[Mapping[str, Any]], str]
    for rows, name_of in ((found["points"], lambda row: f"{row['engine']} engine"), (found["baseline"], baseline_name)):
        for row in rows:
            if row.get("samples_per_second"):
                curves.setdefault(name_of(row), []).append((row["micro_batch"], row["samples_per_second"]))
    if not curves:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, curve in curves.items():
        axes.plot(*zip(*sorted(curve), strict=True), marker="o", label=name)
    sizes = sorted({size for curve in curves.values() for size, _ in curve})
    row = next((row for row in found["points"] if row.get("tflops") and row.get("samples_per_second")), None)
    if row and found["floor"]:
        ceiling = row["samples_per_second"] * found["floor"]["matmul_tflops"] / row["tflops"]
        axes.axhline(ceiling, color="grey", linestyle="--", label="matrix products alone, at the rate measured here")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("micro-batch size (samples)")
    axes.set_ylabel("samples per second")
    axes.set_ylim(bottom=0)
    label = "rehearsal on the CPU, tiny" if found["rehearsal"] else found["machine"]["gpus"][0]["name"]
    axes.set_title(f"One process, {THROUGHPUT_BATCH} samples an iteration: {label}")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
