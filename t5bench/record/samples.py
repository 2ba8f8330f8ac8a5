"""What the samplers saw of a training: bytes sent by each node, power and utilisation of GPUs."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from t5bench.record.run import Run

# A counter is read at any moment of an iteration, in which traffic comes in bursts. What lies between two samples may
# therefore be wrong by an iteration; a sample right after an iteration's line is as good as exact.
LARGEST_ERROR = 0.05  # of the bytes of an iteration
AT_A_LINE = 0.1  # of an iteration
LOOPBACK = "lo"
# These are virtual: their traffic is counted again by the interface below, or never leaves the node.
# Of a bond, only the bond is read, not its members.
_VIRTUAL = re.compile(r"(docker|veth|br-|virbr|cni|flannel|cali|tun|tap|dummy).*|.*[.@].*")
_IP_OVER_INFINIBAND = re.compile(r"ib[0-9a-z]*")


@dataclass(frozen=True)
class Traffic:
    """What one node sent over one interface between two of its samples."""

    node: int
    interface: str
    bytes_per_iteration: float
    bits_per_second: float
    link_bits_per_second: float | None
    """None for a link of unknown speed."""
    iterations: float
    """Between the two samples."""
    error: float
    """At most this share of bytes_per_iteration, because a sample may be taken in the middle of an iteration."""

    @property
    def share(self) -> float | None:
        """The share of the link that was used; None if its speed is not known."""
        return self.bits_per_second / self.link_bits_per_second if self.link_bits_per_second else None


@dataclass(frozen=True)
class Observations:
    """What the samplers saw of one run. None: not measured."""

    traffic: Sequence[Traffic] = ()
    why_not_sent: str = ""
    loopback: bool = False
    """The traffic never left the machine."""
    power_w: float | None = None
    """The median over the intervals that count, of the GPU that had the most."""
    utilization: float | None = None

    @property
    def sent_per_iteration(self) -> float | None:
        """Bytes that the busiest node sent per iteration, over all its interfaces."""
        by_node: dict[int, float] = {}
        for entry in self.traffic:
            by_node[entry.node] = by_node.get(entry.node, 0.0) + entry.bytes_per_iteration
        return max(by_node.values(), default=None)

    @property
    def busiest_link(self) -> Traffic | None:
        known = [entry for entry in self.traffic if entry.share is not None]
        return max(known, key=lambda entry: entry.share or 0.0, default=None)


@dataclass(frozen=True)
class _Lines:
    """When which iterations had ended."""

    times: np.ndarray
    iterations: np.ndarray

    def position(self, moment: float) -> tuple[float, float]:
        """How many iterations had ended at a moment between the first and the last line, and the possible error."""
        done = float(np.interp(moment, self.times, self.iterations))
        last = int(np.searchsorted(self.times, moment, side="right")) - 1
        into_the_next = done - float(self.iterations[last])
        return done, into_the_next if into_the_next <= AT_A_LINE else 1.0


def observe(run: Run, used: Sequence[int]) -> Observations:
    """Bytes between the first and the last iteration's line; power and utilisation while the iterations `used` ran.

    This assumes that the nodes' clocks agree. Of a resumed run only the samples since then count: what it sends while
    it starts again belongs to no iteration. Of a profiled run those before the profile or those after it, whichever are
    more: then it sends messages to measure the link.
    """
    if not used:
        return Observations(why_not_sent="no interval counts")
    began = run.iterations[-1].begin
    profiled = run.plan.number("PROFILE_ITERATION")
    timed = [line for line in run.iterations if line.time and line.begin == began]
    lines = max(
        [line for line in timed if line.iteration < profiled],
        [line for line in timed if line.iteration >= profiled],
        key=len,
    )
    if len(lines) < 2:
        return Observations(why_not_sent="fewer than two timed intervals")
    ended = _Lines(np.array([line.time for line in lines]), np.array([line.iteration for line in lines]))
    one_node = run.layout.nnodes == 1
    traffic: list[Traffic] = []
    reasons: list[str] = []
    for node in run.nodes:
        sent = list(_sent(node, run.samples[node["node"]], ended, one_node))
        if not sent:
            reasons.append(f"node {node['node']} has no network counter that covers that time")
        elif worst := next((entry for entry in sent if entry.error > LARGEST_ERROR), None):
            enough = math.ceil(worst.error * worst.iterations / LARGEST_ERROR)
            needs = f"{enough} are needed (SAMPLE_INTERVAL, TRAIN_ITERS)"
            between = (
                f"{worst.iterations:.3g} iteration(s) between the first and the last sample of node {node['node']}"
            )
            reasons.append(f"{between}, {needs}")
        traffic += sent
    power, utilization = (_highest_median(run, used, name) for name in ("power_w", "utilization"))
    return Observations([] if reasons else traffic, "; ".join(reasons), one_node, power, utilization)


def total_power(run: Run, used: Sequence[int]) -> float | None:
    """Watts of all GPUs together while the iterations `used` ran; None unless each GPU of the run has a figure."""
    medians = _medians(run, used, "power_w")
    expected = sum(len(node["devices"]) for node in run.nodes)
    return sum(medians) if medians and len(medians) == expected else None


def _highest_median(run: Run, used: Sequence[int], name: str) -> float | None:
    """Of a GPU's figure, while the iterations `used` ran; of the GPU that has the highest."""
    return max(_medians(run, used, name), default=None)


def _medians(run: Run, used: Sequence[int], name: str) -> list[float]:
    """Each GPU's median of a figure while the iterations `used` ran."""
    times = [line.time for line in run.iterations if line.time and used[0] <= line.iteration <= used[-1]]
    if not times:
        return []
    medians: list[float] = []
    for samples in run.samples.values():
        by_gpu: dict[int, list[float]] = {}
        for sample in samples:
            if not times[0] <= sample["time"] <= times[-1]:
                continue
            for gpu in sample["gpus"]:
                if gpu[name] is not None:
                    by_gpu.setdefault(gpu["index"], []).append(gpu[name])
        medians += [median(values) for values in by_gpu.values()]
    return medians


def _counts(interface: str, interfaces: set[str], one_node: bool) -> bool:
    if one_node or interface == LOOPBACK:
        return one_node and interface == LOOPBACK
    is_over_ports = any(name.startswith("ib:") for name in interfaces) and _IP_OVER_INFINIBAND.fullmatch(interface)
    return interface.startswith("ib:") or not (_VIRTUAL.fullmatch(interface) or is_over_ports)


def _sent(
    node: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], ended: _Lines, one_node: bool
) -> Iterator[Traffic]:
    """By each interface that counts, from whole samples between the first and the last line: nothing is interpolated
    of a counter."""
    interfaces = {name for sample in samples for name in sample["network"]}
    for name in sorted(name for name in interfaces if _counts(name, interfaces, one_node)):
        counter = [(sample["time"], sample["network"][name]["sent"]) for sample in samples if name in sample["network"]]
        within = [entry for entry in counter if ended.times[0] <= entry[0] <= ended.times[-1]]
        runs_backwards = any(after < before for (_, before), (_, after) in pairwise(counter))
        if len(within) < 2 or runs_backwards:
            continue
        positions = [ended.position(moment) for moment, _ in within]
        at_lines = [number for number, (_, error) in enumerate(positions) if error <= AT_A_LINE]
        best: Traffic | None = None
        for first in {0, *at_lines[:1]}:
            for last in {len(within) - 1, *at_lines[-1:]}:
                iterations = positions[last][0] - positions[first][0]
                if iterations <= 0:
                    continue
                error = (positions[first][1] + positions[last][1]) / iterations
                if best is None or error < best.error:
                    best = _between(node, name, within[first], within[last], iterations, error)
        if best:
            yield best


def _between(
    node: Mapping[str, Any],
    name: str,
    first: tuple[float, float],
    last: tuple[float, float],
    iterations: float,
    error: float,
) -> Traffic:
    """Of an interface's samples (time, bytes sent so far)."""
    sent = last[1] - first[1]
    speed = node["network"].get(name, {}).get("speed_mbit")
    return Traffic(
        node=node["node"],
        interface=name,
        bytes_per_iteration=sent / iterations,
        bits_per_second=8 * sent / (last[0] - first[0]),
        link_bits_per_second=speed * 1e6 if speed else None,
        iterations=iterations,
        error=error,
    )
