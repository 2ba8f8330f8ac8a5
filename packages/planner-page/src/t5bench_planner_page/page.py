"""The page of ``python -m t5bench layouts --page``: the planner in one file that needs no server and no Python.

Its formulas are t5bench/costmodel's own, translated to JavaScript when the page is made (javascript.py).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from t5bench.choose import space
from t5bench.choose.asked import SETTINGS_PRESETS, asked_model, default_batch
from t5bench.costmodel import schedule, time
from t5bench.costmodel.job import Architecture, FullySharded, Job, Parallel, Software, Zero
from t5bench.costmodel.machine import DEVICES, Machine
from t5bench.costmodel.prediction import machine_of
from t5bench.costmodel.presets import PRESETS
from t5bench.costmodel.traffic import Collective, collectives_of
from t5bench.costmodel.whole_training import WholeTraining
from t5bench.plan.forecast import GIGABITS
from t5bench_planner_page.javascript import RUNTIME, Program

HERE = Path(__file__).parent
OWN_SETTINGS = "the current settings"
ROOTS = (
    space.Space,
    space.Candidate,
    space.pareto,
    space.one_to_run,
    space.which_to_run,
    space.shown_first,
    space.losers,
    space.not_told_apart,
    machine_of,
    collectives_of,
    schedule.one_f_one_b,
    time.stage_seconds,
)
# Classes whose objects the page gets as values.
RECORDS = (
    Architecture,
    Collective,
    FullySharded,
    Job,
    Machine,
    Parallel,
    Software,
    Zero,
    space.EngineJob,
    WholeTraining,
)
# What page.js reads of them, besides fields.
MEMBERS = (
    "components", "figures", "fits", "kind", "limit", "memory", "memory_bytes", "memory_interval", "mfu", "missing",
    "node_bytes", "parts", "peak", "ranked", "seconds", "seconds_interval", "start", "tflops", "time", "title", "total",
)  # fmt: skip


def program(args: argparse.Namespace, gpus: int) -> str:
    """The JavaScript of the model with the models and GPUs to choose from. gpus: how many are chosen at first.

    Raises Problem and Untranslatable.
    """
    made = Program(set(MEMBERS))
    for root in (*ROOTS, *RECORDS):
        made.name_of(root)
    models = made.value(_models(args), "page.py")
    devices = made.value(DEVICES, "page.py")
    start = {
        "model": args.model or OWN_SETTINGS,
        "device": args.device or "h100",
        "gpus": gpus,
        "perNode": args.per_node,
        "link": args.link or GIGABITS,
        "batch": args.global_batch or max(default_batch(), gpus),
        "billions": (args.tokens or 0) / 1e9,
        "price": args.price or 0,
    }
    own = f"const MODELS = {models};\nconst DEVICES_BY_NAME = {devices};\nconst START = {json.dumps(start)};\n"
    return RUNTIME.read_text() + made.text() + own


def _models(args: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """By name: the engines' jobs, the settings that a run must have, and whether it can be run."""
    found: dict[str, tuple[Any, ...]] = {}
    for name in (None, *SETTINGS_PRESETS, *PRESETS):
        model = asked_model(argparse.Namespace(**vars(args) | {"model": name}))
        found[name or OWN_SETTINGS] = (list(model.engines), dict(model.given), model.is_launchable)
    return found


def text(args: argparse.Namespace, gpus: int) -> str:
    """The whole page. gpus: how many are chosen at first. Raises Problem and Untranslatable."""
    page = (HERE / "page.html").read_text()
    scripts = {"/* PROGRAM */": program(args, gpus), "/* PAGE */": (HERE / "page.js").read_text()}
    for place, script in scripts.items():
        page = page.replace(place, script.replace("</", "<\\/"))
    return page
