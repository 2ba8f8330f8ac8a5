"""The parts that profile.json divides a rank's iteration into (t5bench/run/timeline.py), and what they say."""

from collections.abc import Mapping
from typing import Any

# What is told of the time that a part takes.
HOST, FORWARD, BACKWARD, RECOMPUTATION = "host gaps", "forward", "backward", "recomputation"
STEP, DATA, LOGGING, SAVING = "optimizer and clipping", "data loading", "logging", "saving a checkpoint"
TRANSFER, BUBBLE, WAITING = "transfers between host and device", "pipeline bubble", "waiting for slower ranks"
AXES = ("data parallel", "tensor parallel", "pipeline parallel", "ZeRO's gathers", "all ranks")
SENDING = {axis: f"communication: {axis}" for axis in AXES}
DOING = {
    HOST: "between operators, where the device waits for Python",
    FORWARD: "in the forward pass",
    BACKWARD: "in the backward pass",
    RECOMPUTATION: "computing activations again",
    STEP: "in the optimizer and clipping",
    DATA: "waiting for data",
    LOGGING: "logging",
    SAVING: "saving a checkpoint",
    TRANSFER: "copying between host and device",
    BUBBLE: "in the pipeline bubble",
    WAITING: "waiting for slower ranks",
} | {sending: f"in {axis} communication" for axis, sending in SENDING.items()}
PARTS = tuple(DOING)
MOST_TOLD = 3


def shares(content: Mapping[str, Any]) -> dict[str, float]:
    """The parts of the profiled iteration, 0 to 1, as the mean of all ranks; the largest first."""
    ranks = content["ranks"]
    means = {part: sum(r["parts"].get(part, 0.0) / r["wall_ms"] for r in ranks) / len(ranks) for part in PARTS}
    return dict(sorted(means.items(), key=lambda mean: -mean[1]))


def limits(content: Mapping[str, Any], doing: Mapping[str, str] = DOING) -> str:
    """The largest parts in words."""
    largest = list(shares(content).items())[:MOST_TOLD]
    return ", ".join(f"{share:.0%} {doing[part]}" for part, share in largest if share)
