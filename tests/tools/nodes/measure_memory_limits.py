"""Searches on two hosts of the lab whose control groups limit their memory, as a card's size does.

    python tests/tools/nodes/measure_memory_limits.py DIRECTORY

Run it as root on a machine that does nothing else. Short runs without a limit show what each kind of layout needs; then
scripts/search.sh searches under three limits, at which a quarter, half and three quarters of the layouts need more. It
leaves the runs in DIRECTORY, continues where it stopped, and writes DIRECTORY/searches.json.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(Path(__file__).parent)]

from cluster_lab import SYSTEM_PATH, Cluster, finished  # noqa: E402
from measure_choices import SETTINGS, Choice, prepare, runner_of  # noqa: E402

from t5bench.choose.search import command  # noqa: E402
from t5bench.choose.search.runs import STATE, name_of  # noqa: E402
from t5bench.choose.space import Candidate  # noqa: E402
from t5bench.control_groups import counters, groups, number  # noqa: E402

HOSTS = 2
# What a micro-batch keeps is more than what Python and its libraries take differs, and the largest are the fastest.
MODEL = {
    "ENCODER_NUM_LAYERS": "4", "DECODER_NUM_LAYERS": "4", "HIDDEN_SIZE": "128", "FFN_HIDDEN_SIZE": "512",
    "NUM_ATTENTION_HEADS": "2", "ENCODER_SEQ_LENGTH": "128", "DECODER_SEQ_LENGTH": "128", "TRAIN_ITERS": "26",
    "GLOBAL_BATCH_SIZE": "32",
}  # fmt: skip
SHARES = (0.25, 0.50, 0.75)
ITERATIONS = 3
"""Of a run that shows what a layout needs."""
RUNS = "10"
"""The budget of a search."""
EVERY = 0.05
"""Seconds between two looks at what a host uses."""
# On a host: its own control group, which hides behind the new /sys otherwise.
SEEN = """mount -t tmpfs tmpfs /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory &&
  mount -t cgroup -o memory cgroup /sys/fs/cgroup/memory
"""
PEAKS = "peaks.json"


class LimitedCluster(Cluster):
    """Each host has a control group of memory below this process's."""

    def __init__(self, directory: Path, count: int) -> None:
        super().__init__(directory, count)
        self.own = groups("memory")[0]

    def group(self, node: str) -> Path:
        return self.own / f"lab-{node}"

    def _boot(self, host: str) -> None:
        if host not in self.nodes:
            super()._boot(host)
            return
        self.group(host).mkdir(exist_ok=True)
        (self.group(host) / "cgroup.procs").write_text(str(os.getpid()))  # whom it starts begins there
        try:
            super()._boot(host)
        finally:
            (self.own / "cgroup.procs").write_text(str(os.getpid()))

    def up(self) -> None:
        super().up()
        for host in self.addresses:
            finished(self._inside(host, "-C", "-m", "--", "bash", "-c", SEEN))

    def limit(self, size: int) -> None:
        """Bytes of each host; -1 for no limit."""
        for node in self.nodes:
            (self.group(node) / "memory.limit_in_bytes").write_text(str(size))

    def down(self) -> None:
        super().down()
        for node in self.nodes:
            remove(self.group(node))


def remove(group: Path) -> None:
    """A control group whose last processes are about to end."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


@contextmanager
def watched(parent: Path, found: list[int]) -> Iterator[None]:
    """Appends the most that any host used meanwhile, in bytes: what no file holds, so the kernel cannot drop it."""
    most = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY):
            for group in parent.glob("lab-*"):
                read = counters(group / "memory.stat")
                files = read.get("total_active_file", 0) + read.get("total_inactive_file", 0)
                most[0] = max(most[0], (number(group / "memory.usage_in_bytes") or 0) - files)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        found.append(most[0])


def measure_peaks(directory: Path, network: str, host: str) -> None:
    """On the login host: what each layout's fullest host uses, in bytes.

    The largest micro-batch of each kind runs for a few iterations; others differ from it as they are predicted to.
    """
    runner, candidates = runner_of(directory, network, host)
    path = directory / PEAKS
    measured = json.loads(path.read_text()) if path.exists() else {}
    kinds: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda each: -each.job.micro_batch):
        kinds.setdefault(f"{candidate.kind} {candidate.job.parallel}", []).append(candidate)
    for largest, *others in kinds.values():
        name = name_of(largest)
        if name not in measured:
            found: list[int] = []
            settings = largest.settings() | {"TRAIN_ITERS": str(ITERATIONS), "LOG_INTERVAL": "1"}
            with watched(Path("/sys/fs/cgroup/memory"), found):
                fault = runner.train(directory / "runs" / name, largest.strategy, HOSTS, settings)
            if fault:
                raise SystemExit(f"{name}: {fault}")
            measured[name] = {"bytes": found[0], "predicted": needed(largest), "measured": True}
        for other in others:
            size = measured[name]["bytes"] + needed(other) - needed(largest)
            measured[name_of(other)] = {"bytes": int(size), "predicted": needed(other), "measured": False}
        path.write_text(json.dumps(measured, indent=1))


def needed(candidate: Candidate) -> float:
    return command.option_of("", candidate).needed


def limits_of(peaks: Mapping[str, Mapping[str, int]]) -> dict[float, int]:
    """By the share of layouts that need more, the limit halfway between two of them."""
    sizes = sorted((each["bytes"] for each in peaks.values()), reverse=True)
    found = {}
    for share in SHARES:
        failing = round(share * len(sizes))
        found[share] = (sizes[failing - 1] + sizes[failing]) // 2
    return found


def main(directory: Path) -> None:
    data = directory / "t5-data"
    prepare(Choice(HOSTS, "", "t5"), data)
    network = directory / "network.json"
    host = directory / "host.json"
    with TemporaryDirectory() as lab:
        cluster = LimitedCluster(Path(lab) / "lab", HOSTS)
        try:
            cluster.up()
            environment = (
                SETTINGS
                | MODEL
                | {
                    "MODEL_FAMILY": "t5",
                    "MEGATRON_DATA_DIR": str(data),
                    "HOSTS": " ".join(cluster.nodes),
                    "PYTHON": sys.executable,
                    "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
                }
            )

            def run(words: Sequence[str], log: Path, **settings: str) -> None:
                line = cluster.on("login", *words, env=environment | settings, cwd=REPOSITORY)
                with log.open("a") as file:
                    done = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False)
                if done.returncode not in (0, command.EXIT_NOT_CERTAIN):
                    raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: see {log}")

            log = directory / "log"
            if not (network.exists() and host.exists()):
                run(("bash", "scripts/check_cluster.sh", "--network", str(network), "--host", str(host)), log)
            every = directory / "every"
            run((sys.executable, __file__, "--peaks", str(every), str(network), str(host)), log)
            peaks = json.loads((every / PEAKS).read_text())
            for share, limit in limits_of(peaks).items():
                cluster.limit(limit)
                place = folder(directory, share)
                place.mkdir(exist_ok=True)
                settings = {"RUNS_DIR": str(place), "NETWORK": str(network), "HOST_COST": str(host), "RUNS": RUNS}
                run(("bash", "scripts/search.sh"), place / "log", **settings)
                cluster.limit(-1)
        finally:
            cluster.down()
    report(directory)


def report(directory: Path) -> None:
    """What the searches did, beside what every layout needs."""
    peaks = json.loads((directory / "every" / PEAKS).read_text())
    rows = []
    for share, limit in limits_of(peaks).items():
        state = json.loads((folder(directory, share) / STATE).read_text())
        last = state["moments"][-1] if state["moments"] else {}
        rows.append(
            {
                "share of layouts that need more": share,
                "limit in MiB": round(limit / 2**20),
                "ran": {name: each["seconds"] for name, each in state["outcomes"].items()},
                "runs": sum(max(1, len(each["times"])) for each in state["outcomes"].values()),
                "ran out": state["ran_out"],
                "failed otherwise": {
                    name: why for name, why in state["failed"].items() if name not in state["ran_out"]
                },
                "would run out": [name for name, each in peaks.items() if each["bytes"] > limit],
                "last": last,
                "minutes": state["seconds"] / 60,
            }
        )
    (directory / "searches.json").write_text(json.dumps({"peaks": peaks, "searches": rows}, indent=1))
    print(json.dumps(rows, indent=1))


def folder(directory: Path, share: float) -> Path:
    return directory / f"search-{round(100 * share)}"


if __name__ == "__main__":
    if sys.argv[1] == "--peaks":
        measure_peaks(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        main(Path(sys.argv[1]).absolute())
