"""The parts that profile.json divides a rank's iteration into (t5bench/run/timeline.py), and what they say."""

from collections.abc import Mapping
from typing import Any

# What is told of the time that a part takes.
HOST, FORWARD, BACKWARD, RECOMPUTATION = "host gaps", "forward", "backward", "recomputation"
STEP, DATA, LOGGING = "optimizer and clipping", "data loading", "logging"
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
    TRANSFER: "copying between host and device",
    BUBBLE: "in the pipeline bubble",
    WAITING: "waiting for slower ranks",
} | {sending: f"in {axis} communication" for axis, sending in SENDING.items()}
PARTS = tuple(DOING)
MOST_TOLD = 3


def limits(content: Mapping[str, Any]) -> str:
    """The largest parts of the profiled iteration, as the mean of all ranks."""
    ranks = content["ranks"]
    means = {part: sum(r["parts"].get(part, 0.0) / r["wall_ms"] for r in ranks) / len(ranks) for part in PARTS}
    largest = sorted(PARTS, key=means.__getitem__, reverse=True)[:MOST_TOLD]
    return ", ".join(f"{means[part]:.0%} {DOING[part]}" for part in largest if means[part])
