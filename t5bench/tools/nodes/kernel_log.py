"""What the kernel's log says about a node's hardware: errors of GPUs, memory, links, disks and file systems."""

import re
from dataclasses import dataclass

from t5bench.record.tools import ToolAnswer
from t5bench.text import visible
from t5bench.tools.nodes.findings import Fault, Finding, judged

HOUR = 3600.0
DAY = 24 * HOUR
LONGEST_LINE = 160
LOOP_DEVICE = r"\bloop\d+\b"  # a file that somebody has mounted, not a disk of the node
# Xid errors that a program causes, not the GPU: an exception or a page fault in a kernel, and the clean-up after it.
XIDS_OF_PROGRAMS = frozenset((13, 31, 32, 43, 45, 68, 69, 109))
XIDS = {
    48: "an ECC error that could not be corrected",
    61: "its microcontroller halted",
    62: "its microcontroller halted",
    63: "it replaces a damaged row of its memory at the next reset",
    64: "it could not replace a damaged row of its memory",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "many ECC errors were corrected",
    94: "an ECC error ended a program",
    95: "an ECC error ended all programs",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "an ECC error that could not be recovered",
}


@dataclass(frozen=True)
class Pattern:
    """A fault in the kernel's log."""

    expression: str
    """A group named ``part`` is what is affected."""
    meaning: str
    remedy: str
    seconds: float = DAY
    """How old it may be to count."""
    least: int = 1
    """How often it must occur, for each part."""


RESET = "Reset the GPU or reboot the node, and run the vendor's diagnosis (dcgmi diag -r 3)"
CABLE = "Check the cable, the transceiver and the switch port"
PATTERNS = (
    Pattern(r"(?P<part>GPU|NVRM)\b.*fallen off the bus", "a GPU has fallen off the bus", RESET),
    Pattern(
        r"EDAC (?P<part>\S+):.*\bUE\b|(?P<mce>\[Hardware Error\]).*\b(?:Uncorrected|[Ff]atal)|Memory failure: 0x",
        "an ECC or machine-check error of the host that could not be corrected",
        "Have the memory tested and replaced",
    ),
    Pattern(
        r"EDAC (?P<part>\S+):.*\bCE\b", "many corrected ECC errors of the host's memory", "Have it replaced", DAY, 10
    ),
    Pattern(
        r"(?P<part>\S+): (?:PCIe Bus Error: severity=Un\w+ \(|.*[Uu]ncorrectable \((?:Non-)?Fatal\))",
        "a PCIe error that could not be corrected",
        "Reseat or replace the card",
    ),
    Pattern(r"(?P<part>\S+): (?:NIC )?[Ll]ink is [Dd]own", "a network link goes up and down", CABLE, HOUR, 3),
    Pattern(
        r"(?P<part>mlx\S+ \S+?):? .*(?:health compromised|[Ll]ink down)", "a network card reports a fault", CABLE, HOUR
    ),
    Pattern(
        r"(?:I/O error, dev |Buffer I/O error on dev )(?P<part>\w+)",
        "a disk fails to read or write",
        "Replace the disk",
    ),
    Pattern(
        r"(?P<part>EXT4-fs error|XFS \(\S+\): .*(?:[Cc]orrupt|[Ss]hutdown))|[Rr]emounting filesystem read-only",
        "a file system is damaged",
        "Check the file system (fsck) and its disk",
    ),
    Pattern(r"nfs: server (?P<part>\S+) not responding", "a file server does not answer", "Check the server", HOUR / 6),
    Pattern(
        r"(?P<part>soft lockup|hard LOCKUP|blocked for more than \d+ seconds)",
        "processes or processors hang in the kernel",
        "Find what they wait for; often a disk or a driver",
        HOUR / 6,
    ),
    Pattern(
        r"(?P<part>CPU\d+): .*temperature above threshold", "a processor is too hot", "Check fans and dust", HOUR, 3
    ),
)


def _age(line: str, uptime: float) -> float:
    """Seconds since a line was written; 0 for a line without a time."""
    match = re.match(r"\[\s*(\d+\.\d+)\]", line)
    return uptime - float(match[1]) if match else 0.0


def _ago(seconds: float) -> str:
    if seconds < HOUR:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / HOUR:.0f} h ago"


def faults_in(log: str, uptime: float) -> list[Fault]:
    """Each fault once, with the last line that shows it. uptime: of the machine, in seconds."""
    faults: list[Fault] = []
    lines = [line for line in log.splitlines() if not re.search(LOOP_DEVICE, line)]
    gpu_errors: dict[tuple[str, int], str] = {}
    for line in lines:
        match = re.search(r"NVRM: Xid \(([^)]*)\): (\d+)", line)
        if match and int(match[2]) not in XIDS_OF_PROGRAMS and _age(line, uptime) < DAY:
            gpu_errors[match[1], int(match[2])] = line
    for (place, number), line in gpu_errors.items():
        meaning = XIDS.get(number, "see NVIDIA's list of Xid errors")
        faults.append((f"GPU {place}: {meaning} (Xid {number}, {_ago(_age(line, uptime))})", RESET))
    for pattern in PATTERNS:
        by_part: dict[str, list[str]] = {}
        for line in lines:
            match = re.search(pattern.expression, line)
            if match and "Xid" not in line and _age(line, uptime) < pattern.seconds:
                by_part.setdefault(match["part"] or "", []).append(line)
        shown = [occurrences[-1] for occurrences in by_part.values() if len(occurrences) >= pattern.least]
        if shown:
            text = visible(re.sub(r"^\[[^]]*\]\s*", "", shown[-1]))[:LONGEST_LINE]
            faults.append((f"{pattern.meaning} ({_ago(_age(shown[-1], uptime))}: {text})", pattern.remedy))
    return faults


def kernel_log(answer: ToolAnswer, uptime: float) -> Finding:
    """The row about the answer of dmesg. Where only root may read the log, that is no fault of the node."""
    if answer.fault:
        return Finding("not readable")
    faults = faults_in(answer.output, uptime)
    return judged("errors" if faults else "clean", faults)
