"""What the samplers saw during the iterations that count: bytes sent by each node, power and utilisation of GPUs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from t5bench.record.records import Run

FEWEST_SAMPLES = 3
LOOPBACK = "lo"
# These are virtual: their traffic is counted again by the interface below, or never leaves the node.
# Of a bond, only the bond is read, not its members.
_VIRTUAL = re.compile(r"(docker|veth|br-|virbr|cni|flannel|cali|tun|tap|dummy).*|.*[.@].*")
_IP_OVER_INFINIBAND = re.compile(r"ib[0-9a-z]*")


@dataclass(frozen=True)
class Traffic:
    """What one node sent over one interface. link_bits_per_second: None for a link of unknown speed."""

    node: int
    interface: str
    bytes_per_iteration: float
    bits_per_second: float
    link_bits_per_second: float | None

    @property
    def share(self) -> float | None:
        """The share of the link that was used; None if its speed is not known."""
        return self.bits_per_second / self.link_bits_per_second if self.link_bits_per_second else None


@dataclass(frozen=True)
class Observations:
    """Medians over the window, of the GPU that had the most; sent by the node that sent the most. None: not measured.

    loopback: the traffic never left the machine.
    """

    traffic: Sequence[Traffic] = ()
    why_not_sent: str = ""
    loopback: bool = False
    power_w: float | None = None
    utilization: float | None = None

    @property
    def sent_per_iteration(self) -> float | None:
        """Bytes that the busiest node sent per iteration, over all its interfaces."""
        nodes = {entry.node for entry in self.traffic}
        return max((sum(e.bytes_per_iteration for e in self.traffic if e.node == node) for node in nodes), default=None)

    @property
    def busiest_link(self) -> Traffic | None:
        known = [entry for entry in self.traffic if entry.share is not None]
        return max(known, key=lambda entry: entry.share or 0.0, default=None)


def observe(run: Run, used: Sequence[int]) -> Observations:
    """The samples from the first to the last of the iterations `used`; assumes that the nodes' clocks agree.

    Of a resumed run only those since then: what it sends while it starts again belongs to no iteration. Of a profiled
    run those before the profile or those after it, whichever are more: then it sends messages to measure the link.
    """
    began, profiled = run.iterations[-1].begin if used else 0, run.plan.number("PROFILE_ITERATION")
    since = [line for line in run.iterations if line.time and line.begin == began]
    lines = [line for line in since if used and used[0] <= line.iteration <= used[-1]]
    sides = ([line for line in lines if (line.iteration < profiled) == is_before] for is_before in (True, False))
    lines = max(sides, key=len)
    if len(lines) < 2:
        return Observations(why_not_sent="fewer than two timed intervals")
    ends, numbers = np.array([line.time for line in lines]), np.array([line.iteration for line in lines])
    traffic, reasons, one_node = [], [], run.layout.nnodes == 1
    medians: dict[str, list[float]] = {"power_w": [], "utilization": []}
    for node in run.nodes:
        samples = run.samples[node["node"]]
        within = [sample for sample in samples if ends[0] <= sample["time"] <= ends[-1]]
        for what, found in medians.items():
            known = [(gpu["index"], gpu[what]) for s in within for gpu in s["gpus"] if gpu[what] is not None]
            found += [median(value for i, value in known if i == index) for index in {index for index, _ in known}]
        # Beside a profile only whole samples count.
        sent = list(_sent(node, within if profiled else samples, ends, numbers, one_node))
        if len(within) < FEWEST_SAMPLES:
            reasons.append(f"{len(within)} sample(s) of node {node['node']} in that time, {FEWEST_SAMPLES} are needed")
        elif not sent:
            reasons.append(f"node {node['node']} has no network counter that covers that time")
        traffic += sent
    most = {what: max(found, default=None) for what, found in medians.items()}
    return Observations(() if reasons else traffic, "; ".join(reasons), one_node, **most)


def _counts(interface: str, interfaces: set[str], one_node: bool) -> bool:
    if one_node or interface == LOOPBACK:
        return one_node and interface == LOOPBACK
    is_over_ports = any(name.startswith("ib:") for name in interfaces) and _IP_OVER_INFINIBAND.fullmatch(interface)
    return interface.startswith("ib:") or not (_VIRTUAL.fullmatch(interface) or is_over_ports)


def _sent(
    node: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    ends: np.ndarray,
    numbers: np.ndarray,
    one_node: bool,
) -> Iterator[Traffic]:
    """By each interface that counts. ends: when the iterations `numbers` ended."""
    interfaces = {name for sample in samples for name in sample["network"]}
    for name in sorted(name for name in interfaces if _counts(name, interfaces, one_node)):
        counter = np.array([(s["time"], s["network"][name]["sent"]) for s in samples if name in s["network"]]).T
        # The sampler may begin after the first line or end before the last: nothing is extrapolated.
        first, last = float(max(ends[0], counter[0, 0])), float(min(ends[-1], counter[0, -1]))
        if first >= last or (np.diff(counter[1]) < 0).any():
            continue
        sent, iterations = (float(np.diff(np.interp((first, last), *of))[0]) for of in (counter, (ends, numbers)))
        if iterations > 0:
            speed = node["network"].get(name, {}).get("speed_mbit")
            link = speed * 1e6 if speed else None
            yield Traffic(node["node"], name, sent / iterations, 8 * sent / (last - first), link)
