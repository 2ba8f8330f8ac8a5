"""Draws docs/T5-Parallelism.pdf from docs/slides.md: python -m docs.make_slides [output.pdf]

Lengths are in units of 6 points: a slide is 160 wide and 90 high. t5bench/costmodel computes every number.
A text that runs off its page or touches another one is an error.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import StrictUndefined, Template
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from t5bench import REPOSITORY
from t5bench.costmodel import flops, schedule, traffic
from t5bench.costmodel.job import Architecture, Job, Parallel, Zero
from t5bench.costmodel.memory import (
    FP32_GRADIENTS,
    activation_bytes,
    logits_bytes,
    model_states,
    states_of,
    transient_states,
)
from t5bench.costmodel.parameters import components, parameters
from t5bench.plan.launchers import declarations
from t5bench.record.plan import Strategy

INK, MUTED, LINE, PAPER, WIRE, MONO = "#1f2a37", "#5f6b7a", "#d3dae2", "#eef1f4", "#c2364b", "DejaVu Sans Mono"
COLOURS = {"encoder": "#2f6db5", "decoder": "#dd7440", "paper": PAPER, "muted": MUTED, "wire": WIRE}
COLOURS |= {"parameters": "#2a8c82", "gradients": "#e3ae3d", "optimizer states": "#76609f"}
COLOURS |= {"gathered": "#9fcfc9", "activations": "#aab4c0"}
# Words with the same colour in every row of boxes.
MEANINGS = COLOURS | {r"F\d": "#d9dfe6", r"B\d": "#aab4c0", "update.*": "#76609f", "all-reduce": WIRE}
MEANINGS |= {"<.*>": INK, r"\*.*\*": "#e3ae3d", "\N{MULTIPLICATION SIGN}.*": PAPER}
DARK = {INK, MUTED, WIRE, "#2f6db5", "#dd7440", "#2a8c82", "#76609f"}  # white text is on these
mpl.rcParams.update({"font.family": "DejaVu Sans", "pdf.fonttype": 42, "hatch.linewidth": 0.5, "hatch.color": LINE})

MODEL, BATCH = Architecture(24, 24, 1024, 16, 64, 2816, 512, 128, 32128), 16
MACS, PART, P = flops.multiply_adds(MODEL), components(MODEL), parameters(MODEL)
SHARES = MACS["encoder"] / sum(MACS.values()), 1 - MACS["encoder"] / sum(MACS.values())
EMBEDDING = PART["encoder"] / P, (PART["encoder"] + PART["embedding"]) / P  # where it is in a model from 0 to 1


def training(strategy: Strategy) -> Job:
    """The benchmark's job under a strategy on two GPUs; the hybrid on four."""
    file = REPOSITORY / "ds_configs" / strategy.ds_config
    zero = Zero.of_config(json.loads(file.read_text()) if strategy.ds_config else None)
    ranks = strategy.tp * strategy.pp
    return Job(MODEL, Parallel(strategy.tp, strategy.pp, max(1, 2 // ranks)), global_batch=BATCH, zero=zero)


TITLES = {strategy.name: strategy.title.partition(":")[0] for strategy in declarations()}
TRAININGS = {strategy.name: training(strategy) for strategy in declarations()}
GATHERED_AGAIN = max(0.0, 1 - TRAININGS["zero3"].zero.reuse_distance / (2 * P))
ON_CPUS = sum(model_states(TRAININGS["zero3_offload"], P)[1].values())
KEPT = activation_bytes(TRAININGS["ddp"]) | {"head": logits_bytes(TRAININGS["ddp"])[0]}
EVIDENCE = (REPOSITORY / "packages/costmodel-evidence/EVIDENCE.md").read_text()
TABLE = re.search(r"\| Strategy \| predicted, native .*\n\|-.*\n((?:\|.*\n)+)", EVIDENCE)
MEASURED = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE[1].splitlines()] if TABLE else []
BODY, HEAD, SMALL = 16, 19, 13  # sizes of text in points, to be read from the back row


def states(job: Job) -> dict[str, tuple[float, float]]:
    """During the update, the bytes per parameter on every data-parallel rank, and those divided among them, by kind."""
    weights, (whole, divided), optimizer = states_of(job).values()
    gradients = whole, divided + FP32_GRADIENTS * bool(job.zero.stage)
    return {"parameters": weights, "gradients": gradients, "optimizer states": optimizer}


def memory_bytes(job: Job, stage: int = 0) -> dict[str, float]:
    """What a GPU holds, by kind, without buckets, workspaces and the allocator's rounding."""
    count, n = parameters(MODEL, job.parallel, stage), job.parallel.data
    sizes = {kind: count * (whole + divided / n) for kind, (whole, divided) in states(job).items()}
    found = {} if job.zero.offload_parameters else sizes
    if window := transient_states(job, count)["forward"]:
        found["gathered"] = window["gathered parameters"]
    return found | {"activations": sum(activation_bytes(job, stage).values()) + logits_bytes(job, stage)[0]}


def sent_bytes(job: Job, stage: int = 0) -> dict[str, float]:
    """What a GPU sends in an iteration, by kind."""
    kinds = {"tensor": "layers", "pipeline": "stages", "embedding": "tied embedding", "position": "tied embedding"}
    found: dict[str, float] = {}
    for row in traffic.collectives_of(job):
        kind = kinds.get(row.group, "gradients" if row.what == "gradients" else "gathered")
        size = {"tensor": job.parallel.tensor, "data": job.parallel.data}.get(row.group, job.parallel.pipeline)
        if stage in row.stages:
            kind = "masks" if row.what == "batch" else kind
            found[kind] = found.get(kind, 0.0) + row.count * traffic.ring_bytes(row, size, "nccl")
    return found


def most(name: str, cost: Callable[[Job, int], dict[str, float]]) -> dict[str, float]:
    """A cost by kind, in bytes, on the pipeline stage where it is highest."""
    stages = (cost(TRAININGS[name], stage) for stage in range(TRAININGS[name].parallel.pipeline))
    return max(stages, key=lambda kinds: sum(kinds.values()))


def slots(micro_batches: int) -> list[schedule.Slot]:
    """1F1B on two stages, in proportion to their FLOPs; a backward takes as long as two forwards."""
    return schedule.one_f_one_b(SHARES, [2 * share for share in SHARES], micro_batches)


def si(number: float, unit: str = "GB") -> str:
    number /= {"GB": 1e9, "M": 1e6, "TFLOP": 1e12}[unit]
    return f"{number:.{1 if number > 1 else 2}f} {unit}"


def pieces(start: float, end: float, cuts: int, parts: int, rank: int) -> list[tuple[float, float]]:
    """(start, width) of part `rank` of `parts` in each of `cuts` equal pieces of a stretch."""
    step = (end - start) / cuts
    return [(start + (cut + rank / parts) * step, step / parts) for cut in range(cuts)]


class Slide:
    """A page that is filled downwards from (x, y). The charts in slides.md are its methods."""

    def __init__(self, number: int, page: str) -> None:
        """A page of slides.md: title, subtitle and perhaps a source, an empty line, what is drawn."""
        heading, lines = page.replace("\n  ", " ").strip().split("\n\n", 1)
        title, subtitle, *source = heading.splitlines()
        self.figure = Figure(figsize=(160 / 12, 90 / 12), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, 160), ylim=(0, 90))
        self.axes.set_axis_off()
        self.x, self.y, self.width, self.columns = 10.0, 68.0, 140.0, (0.0, 0.42, 0.82)
        self.text(10, 82.5, title, 30 if number > 1 else 42, weight="bold")
        self.text(10, 75.5, subtitle, BODY, MUTED)
        self.text(150, 3, "    ".join([*source, str(number)]), 10, MUTED, ha="right")
        for line in lines.splitlines():
            self.add(line)
        self.check()

    def add(self, line: str) -> None:
        """Draws a line of slides.md: a place, a chart, a command, a row of a table, or a paragraph."""
        if place := re.fullmatch(r"<!-- (\S+) (\S+) (\S+)(?: (\S+) (\S+))? -->", line):
            self.x, self.y, self.width = map(float, place.groups()[:3])
            self.columns = (0.0, *map(float, place.groups()[3:])) if place[4] else self.columns
        elif chart := re.fullmatch(r"!\[(.*)\]\((\w+)(.*)\)", line):
            getattr(self, chart[2])(chart[1], *map(float, chart[3].split()))
        elif line.startswith("`"):
            self.box(self.x, self.y - 5, self.width, 5, INK)
            self.text(self.x + 3, self.y - 2.5, line.strip("`"), 15, "white", family=MONO)
            self.y -= 5
        elif line.startswith("|"):
            for share, cell, colour in zip(self.columns, line.split("|")[1:-1], (INK, MUTED, INK), strict=False):
                self.text(self.x + share * self.width, self.y, cell.strip(), 14.5, colour)
            self.box(self.x, self.y - 3.1, self.width, 0.12, LINE)
            self.y -= 6.2
        else:
            head, body = re.fullmatch(r"(?:\*\*(.*?)\*\*)? ?(.*)", line).groups("")
            lines = textwrap.wrap(body, int(0.72 * self.width))
            self.text(self.x, self.y, head, HEAD, weight="bold")
            self.text(self.x, self.y - (2.8 if head else 0), "\n".join(lines), va="top")
            self.y -= 3.9 * len(lines) + (7 if head else 4)

    def text(self, x: float, y: float, content: str, size: float = BODY, colour: str = INK, **options: Any) -> float:
        """Returns where the text ends on the right."""
        options = {"va": "center", "linespacing": 1.45, "parse_math": False, **options}
        text = self.axes.text(x, y, content, size=size, color=colour, **options)
        return text.get_window_extent().transformed(self.axes.transData.inverted()).x1

    def box(self, x: float, y: float, w: float, h: float, fill: str, **style: Any) -> None:
        self.axes.add_patch(Rectangle((x, y), w, h, **{"facecolor": fill, "zorder": 1, **style}))

    def cell(self, x: float, y: float, word: str, fill: str, w: float = 0, h: float = 5.6, alpha: float = 1) -> float:
        """A word, with `~` for a blank, in a box of the word's or the given width. Returns where the box ends."""
        content = word.replace("~", " ")
        fill = next((own for pattern, own in MEANINGS.items() if re.fullmatch(pattern, content)), fill)
        style = {"colour": "white" if fill in DARK and alpha == 1 else INK, "va": "center_baseline"}
        if w:
            self.text(x + w / 2, y + h / 2, content, SMALL, ha="center", **style)
        else:
            w = self.text(x + 1, y + h / 2, content.strip("*"), 14, **style) + 1.1 - x
        self.box(x, y, w, h, fill, alpha=alpha)
        return x + w

    def row(self, words: str) -> None:
        """Words side by side. The first names the colour of those that have none of their own."""
        x, (colour, *rest) = self.x, words.split()
        for word in rest:
            x = self.cell(x, self.y - 4.6, word, COLOURS[colour]) + 0.5
        self.y -= 8.4

    def arrow(self, start: tuple[float, float], end: tuple[float, float], style: str = "<|-|>") -> None:
        looks = {"arrowstyle": style, "color": WIRE, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", end, start, arrowprops=looks)

    def gpus(self, name: str, w: float, h: float, limit: float = 4) -> None:
        """What at most `limit` GPUs, or their nodes' CPUs, hold during the update; large ones with what travels."""
        job, step = TRAININGS[name], 1.2 * w
        count = min(int(limit), job.parallel.world)
        for gpu in range(count):
            x, y = self.x + gpu % 2 * step, self.y - h - gpu // 2 * (h + 8)
            self.gpu(job, gpu, x, y, w, h)
            if w > 15:
                self.text(x, y - 3, f"{'CPU of node' if job.zero.offload_parameters else 'GPU'} {gpu}", SMALL, MUTED)
            if w > 15 and gpu % 2:
                heights = {"gathered": 0.05, "gradients": 0.2, "layers": 0.5, "stages": 0.5}
                for level in {y + heights[kind] * h for kind in heights.keys() & sent_bytes(job)}:
                    self.arrow((x - 0.2 * w + 0.5, level), (x - 0.5, level))
            if w > 15 and gpu > 1:
                self.arrow((x + w / 2, y + h + 0.5), (x + w / 2, y + h + 6.5))
        self.y -= (count + 1) // 2 * (h + 8)

    def gpu(self, job: Job, gpu: int, x: float, y: float, w: float, h: float) -> None:
        """From left to right the model's parameters, upwards the bytes of each: area is memory."""
        tp, pp, dp = job.parallel.tensor, job.parallel.pipeline, job.parallel.data
        stage, rank = divmod(gpu, dp * tp)
        stretch = (0.0, 1.0) if pp == 1 else ((0.0, EMBEDDING[1]), (EMBEDDING[0], 1.0))[stage]
        own = pieces(*stretch, 12 // pp if tp > 1 else 1, tp, rank % tp)
        share = pieces(*stretch, 1, dp, rank // tp)
        self.box(x, y, w, h, PAPER)
        self.box(x, y - 1.1, EMBEDDING[0] * w, 0.8, COLOURS["encoder"])
        self.box(x + EMBEDDING[1] * w, y - 1.1, (1 - EMBEDDING[1]) * w, 0.8, COLOURS["decoder"])
        scale = h / sum(whole + divided for whole, divided in states(job).values())
        for kind, (whole, divided) in states(job).items():
            for height, spans in ((whole * scale, own), (divided * scale, share)):
                label = f"{height / scale:.0f} B" if w > 15 and len(spans) == 1 and height > 2.4 else ""
                for start, width in spans if height else ():
                    alpha = 0.4 if job.zero.offload_parameters else 1
                    self.cell(x + start * w, y, label, COLOURS[kind], width * w, height, alpha)
                y += height

    def prediction(self, name: str) -> None:
        """Bars by kind: memory of the fullest GPU, and what a GPU sends."""
        self.text(self.x, self.y, TITLES[name], BODY)
        for x, kinds in ((52, most(name, memory_bytes)), (108, most(name, sent_bytes))):
            for kind, size in kinds.items():
                self.box(x, self.y - 1.8, size * 2.8e-9, 3.6, COLOURS.get(kind, WIRE))
                x += size * 2.8e-9
            self.text(x + 1.2, self.y, si(sum(kinds.values())))
        self.y -= 7.2

    def schedule(self, micro_batches: str) -> None:
        """1F1B on two stages, in proportion to their FLOPs; hatched where a GPU waits."""
        jobs = slots(int(micro_batches))
        left, unit = self.x + 11, (self.width - 11) / max(slot.end for slot in jobs)
        for gpu in (0, 1):
            self.text(self.x, self.y - 3 - 9 * gpu, f"GPU {gpu}", SMALL, MUTED)
            self.box(left, self.y - 6 - 9 * gpu, self.width - 11, 6, "white", hatch="////", edgecolor=LINE)
        for slot in jobs:
            x, y, width = left + slot.start * unit, self.y - 6 - 9 * slot.stage, (slot.end - slot.start) * unit
            self.cell(x, y, f"{slot.way}{slot.micro_batch + 1}", PAPER, width - 0.2, 6)
            if slot.way == "FB"[slot.stage]:
                ends = (x + width, self.y - 6.2), (x + width, self.y - 8.8)
                self.arrow(ends[slot.stage], ends[1 - slot.stage], "-|>")
        self.y -= 19

    def check(self) -> None:
        """Raises ValueError if a text runs off the page or overlaps another."""
        page, texts = self.figure.bbox.padded(-8), [text for text in self.axes.texts if text.get_text()]
        boxes = [(text.get_text(), text.get_window_extent().padded(-0.5)) for text in texts]
        for text, box in boxes:
            if not (page.contains(*box.min) and page.contains(*box.max)):
                raise ValueError(f"a text leaves the page: {text!r}")
        for (one, a), (two, b) in combinations(boxes, 2):
            if Bbox.intersection(a, b):
                raise ValueError(f"texts overlap: {one!r} and {two!r}")


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "docs/T5-Parallelism.pdf"
    words = Template((REPOSITORY / "docs/slides.md").read_text(), undefined=StrictUndefined).render(globals())
    slides = [Slide(number, page) for number, page in enumerate(re.split(r"(?m)^# ", words)[1:], 1)]
    with PdfPages(output, metadata={"Title": "T5-Parallelism", "CreationDate": None}) as pdf:
        for slide in slides:
            pdf.savefig(slide.figure)


if __name__ == "__main__":
    main()
