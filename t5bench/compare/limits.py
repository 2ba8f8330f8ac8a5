"""What limits a row, judged by its measurements."""

from t5bench.compare.rows import Row
from t5bench.record.samples import Observations


def limits(row: Row) -> str:
    """What limits the row, and what was not measured and why, in sentences; "" for a row without figures."""
    if not row.milliseconds:
        return ""
    observed = row.measured[0].observed
    seen = []
    if row.on_gpu and observed.utilization is not None:
        seen.append(f"a kernel ran {observed.utilization:.0f} % of the time on the busiest GPU")
    if row.on_gpu and observed.power_w is not None:
        seen.append(f"it drew {observed.power_w:.0f} W")
    why = "there are no samples" if row.on_gpu else "there is no GPU"
    peak = f"share of the GPU's peak: unknown, {row.mfu_missing}"
    if row.mfu is not None:
        peak = f"the arithmetic takes {row.mfu:.1%} of the GPU's peak"
    if row.mfu is not None and (again := row.hardware_tflops):
        peak += f", {row.mfu * again / row.tflops:.1%} with recomputation"
    parts = [_network(observed), ", ".join(seen) or f"GPU utilisation and power: not measured, {why}", peak]
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def _network(observed: Observations) -> str:
    sent, busiest = observed.sent_per_iteration, observed.busiest_link
    if sent is None:
        return f"network: not measured, {observed.why_not_sent}"
    if observed.loopback:
        return f"network: one node, {bytes_text(sent)} per iteration over the loopback, including other programs'"
    if not busiest:
        return f"network: {bytes_text(sent)} per iteration and node; the link's speed is not known"
    return (
        f"network: {bytes_text(busiest.bytes_per_iteration)} per iteration over {busiest.interface} of node "
        f"{busiest.node}; at the link's {busiest.link_bits_per_second / 1e9:g} Gbit/s that alone takes "
        f"{busiest.share:.0%} of the time"
    )


def bytes_text(count: float) -> str:
    """A number of bytes in decimal units, as networks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # a number that rounds to 1000 gets the next unit
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
