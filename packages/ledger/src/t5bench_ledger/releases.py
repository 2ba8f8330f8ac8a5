"""What is in data/releases.json: which releases train which strategy correctly.

``ledger --answer`` reads it (answer.py), and other projects may: verdicts.py writes it, and its schema from these
classes. Launchers have a shorter list of their own (gate.py).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from t5bench_ledger.spans import SPAN

Software = Literal["deepspeed", "torch", "transformers", "accelerate"]
Spans = Annotated[
    str,
    Meta(
        description=f"releases that were tried, separated by blanks; a{SPAN}b is every release of the software that was"
        " published from a to b (published.json), and each of them was tried"
    ),
]


Figure = Literal["operators", "bytes in collectives"]


class TrainedMode(msgspec.Struct):
    """A way of training in which releases were tried."""

    name: str
    precision: Literal["fp32", "bf16", "fp16"]
    micro_batches: Annotated[int, Meta(description="of a process and iteration")]
    clipping: Annotated[bool, Meta(description="whether DeepSpeed's JSON says at which norm gradients are clipped")]
    offload: Annotated[bool, Meta(description="of the optimizer's state to the CPU")]
    resumes: Annotated[bool, Meta(description="whether the training is saved and continued")]
    launchers: Annotated[bool, Meta(description="whether launchers of this project train so")]
    meaning: str


class MeasuredReleases(msgspec.Struct):
    """What was trained under releases of one library, and which were right."""

    software: Software
    torch: Annotated[str, Meta(description="PyTorch's release beside the library's; empty where software is torch")]
    releases: Annotated[list[str], Meta(description="the oldest first")]
    right: Annotated[
        dict[str, dict[str, Spans]],
        Meta(description="by strategy and mode; what is here and in no fault was not tried"),
    ]


class ReleaseFault(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Releases that are not right in the same way. A field that is left out is empty."""

    software: Software
    torch: Annotated[str, Meta(description="as in MeasuredReleases")] = ""
    releases: Spans
    strategy: str
    modes: list[str]
    verdict: Literal[
        "wrong",
        "does not run",
        "hangs",
        "rounds more than asked",
        "weighs a short last window by its share",
        "logs another loss",
    ]
    iteration: Annotated[int | None, Meta(description="the first that is wrong")] = None
    quantity: Annotated[str, Meta(description="what is wrong first: the loss or the gradient norm")] = ""
    off_by: Annotated[
        float | None, Meta(description="its largest relative difference; none of a wrong one: it is not a number")
    ] = None
    sentence: Annotated[str, Meta(description="with which it fails, or what is left without cancellation")] = ""
    where: Annotated[str, Meta(description="the step and module that differ first, if a trace showed it")] = ""
    upstream: Annotated[
        list[str], Meta(description="issues and pull requests that explain it; see upstream below")
    ] = []
    mended_in: Annotated[str, Meta(description="the first later release that is right, of those that were tried")] = ""


class ReleaseCost(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Releases of DeepSpeed in which an iteration costs at least a tenth more than in the one before them.

    Counted, not timed, in one process of two, on a CPU, with the native engine and a tiny T5.
    """

    strategy: str
    modes: list[str]
    figure: Annotated[
        Figure,
        Meta(description="operators that PyTorch runs, copies among them, or bytes that collectives are about"),
    ]
    times: Annotated[float, Meta(description="as many as in the release before; 1.36 is 36 % more")]
    before: Annotated[str, Meta(description="the last release without the increase, of those that were counted")]
    releases: Annotated[Spans, Meta(description="those that were counted with it")]
    mended_in: Annotated[str, Meta(description="the first later release without it, of those that were counted")] = ""
    upstream: Annotated[list[str], Meta(description="issues and pull requests that report it; see upstream below")] = []


class ReleaseVerdicts(msgspec.Struct):
    """Which releases of four libraries train which strategy correctly, measured on CPUs over gloo.

    A release is right in a mode if every loss and gradient norm equals those of DDP (DDP's: one process's) within the
    bounds of docs/parity.md.
    """

    format: str
    modes: list[TrainedMode]
    measured: list[MeasuredReleases]
    faults: list[ReleaseFault]
    costs: list[ReleaseCost]
    upstream: Annotated[
        dict[str, list[str]], Meta(description="of each issue or pull request its address, and what it says")
    ]
