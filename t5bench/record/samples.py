"""What the samplers saw while the iterations that count ran: bytes sent by each node, power and utilisation of GPUs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from t5bench.record.records import Run

Point = tuple[float, float]
FEWEST_SAMPLES = 3
LOOPBACK = "lo"
# These carry nothing of their own: what they count is counted again by what they run over, or never leaves the node.
# Of a bond the sampler reads the bond alone, not its members.
_VIRTUAL = re.compile(r"(docker|veth|br-|virbr|cni|flannel|cali|tun|tap|dummy).*|.*[.@].*")
_IP_OVER_INFINIBAND = re.compile(r"ib[0-9a-z]*")


@dataclass(frozen=True)
class Traffic:
    """What one node sent by one interface; link_bits_per_second is None where the link's speed is not known."""

    node: int
    interface: str
    bytes_per_iteration: float
    bits_per_second: float
    link_bits_per_second: float | None

    @property
    def share(self) -> float | None:
        """Of the link, 0 to 1; None where its speed is not known."""
        return self.bits_per_second / self.link_bits_per_second if self.link_bits_per_second else None


@dataclass(frozen=True)
class Observations:
    """Medians over the window, of the GPU that had the most; sent by the node that sent the most. None: not measured.

    why_not_sent says why there is no traffic; loopback that it never left the machine.
    """

    traffic: Sequence[Traffic] = ()
    why_not_sent: str = ""
    loopback: bool = False
    power_w: float | None = None
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


def observe(run: Run, used: Sequence[int]) -> Observations:
    """What was sampled from the first to the last of the iterations `used`; supposes that the nodes' clocks agree."""
    timed = [(i.time, i.iteration) for i in run.iterations if i.time and used and used[0] <= i.iteration <= used[-1]]
    if len(timed) < 2:
        return Observations(why_not_sent="fewer than two timed intervals")
    traffic: list[Traffic] = []
    powers, utilizations, reasons = [], [], []
    one_node = run.layout.nnodes == 1
    for node in run.nodes:
        samples = run.samples[node["node"]]
        within = [sample for sample in samples if timed[0][0] <= sample["time"] <= timed[-1][0]]
        powers += _gpu_medians(within, "power_w")
        utilizations += _gpu_medians(within, "utilization")
        if len(within) < FEWEST_SAMPLES:
            reasons.append(f"{len(within)} sample(s) of node {node['node']} in that time, {FEWEST_SAMPLES} are needed")
        elif sent := list(_sent(node, samples, timed, one_node)):
            traffic += sent
        else:
            reasons.append(f"node {node['node']} has no network counter that runs through")
    return Observations(
        traffic=() if reasons else traffic,
        why_not_sent="; ".join(reasons),
        loopback=one_node,
        power_w=max(powers, default=None),
        utilization=max(utilizations, default=None),
    )


def _gpu_medians(samples: Sequence[Mapping[str, Any]], what: str) -> list[float]:
    by_gpu: dict[int, list[float]] = {}
    for gpu in (gpu for sample in samples for gpu in sample.get("gpus") or () if gpu.get(what) is not None):
        by_gpu.setdefault(gpu["index"], []).append(gpu[what])
    return [median(values) for values in by_gpu.values()]


def _counts(interface: str, interfaces: set[str], one_node: bool) -> bool:
    if one_node or interface == LOOPBACK:
        return one_node and interface == LOOPBACK
    if interface.startswith("ib:"):
        return True
    has_ports = any(name.startswith("ib:") for name in interfaces)
    return not _VIRTUAL.fullmatch(interface) and not (has_ports and _IP_OVER_INFINIBAND.fullmatch(interface))


def _sent(
    node: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], timed: Sequence[Point], one_node: bool
) -> Iterator[Traffic]:
    """By each interface that counts; timed: when which iteration ended."""
    interfaces = {name for sample in samples for name in sample.get("network") or ()}
    for interface in sorted(name for name in interfaces if _counts(name, interfaces, one_node)):
        counter = [
            (sample["time"], sample["network"][interface]["sent"])
            for sample in samples
            if interface in (sample.get("network") or ())
        ]
        # The sampler may begin after the first of the lines or end before the last: no value is made up out there.
        begin, end = max(timed[0][0], counter[0][0]), min(timed[-1][0], counter[-1][0])
        if begin >= end or any(later < earlier for (_, earlier), (_, later) in pairwise(counter)):
            continue
        sent = interpolate(counter, end) - interpolate(counter, begin)
        iterations = interpolate(timed, end) - interpolate(timed, begin)
        speed = (node.get("network") or {}).get(interface, {}).get("speed_mbit")
        if iterations > 0:
            link = speed * 1e6 if speed and speed > 0 else None
            yield Traffic(node["node"], interface, sent / iterations, 8 * sent / (end - begin), link)


def interpolate(points: Sequence[Point], at: float) -> float:
    """Linear between the points (x, y), which are in the order of x and reach around `at`."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= at <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    raise ValueError(f"{at} lies outside of {points[0][0]} to {points[-1][0]}")
