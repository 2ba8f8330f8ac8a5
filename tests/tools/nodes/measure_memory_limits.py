"""Searches on two hosts of the lab whose control groups limit their memory, as a card's size does.

    python tests/tools/nodes/measure_memory_limits.py DIRECTORY

Run it as root on a machine that does nothing else. Every layout runs once without a limit, and what its fullest host
used is recorded; then scripts/search.sh searches under three limits, at which a quarter, half and three quarters of the
layouts need more. It leaves the runs in DIRECTORY, continues where it stopped, and writes DIRECTORY/searches.json.
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

from cluster_lab import SYSTEM_PATH, Cluster  # noqa: E402
from measure_choices import SETTINGS, prepare, runner_of  # noqa: E402

from t5bench.choose.search import command  # noqa: E402
from t5bench.choose.search.runs import STATE, name_of  # noqa: E402
from t5bench.control_groups import counters, groups  # noqa: E402

HOSTS = 2
RATE = "1000mbit"
# Large enough for layouts to differ by more than Python and its libraries take.
MODEL = {
    "ENCODER_NUM_LAYERS": "4", "DECODER_NUM_LAYERS": "4", "HIDDEN_SIZE": "384", "FFN_HIDDEN_SIZE": "1536",
    "NUM_ATTENTION_HEADS": "4", "TRAIN_ITERS": "26",
}  # fmt: skip
SHARES = (0.25, 0.50, 0.75)
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
            self.run(host, "bash", "-c", SEEN)

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
                used = counters(group / "memory.stat")
                most[0] = max(most[0], used.get("total_rss", 0) + used.get("total_shmem", 0))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        found.append(most[0])


def measure_peaks(directory: Path, network: str, host: str) -> None:
    """On the login host: runs every layout that the launchers can start, and writes what its fullest host used."""
    runner, candidates = runner_of(directory, network, host)
    path = directory / PEAKS
    peaks = json.loads(path.read_text()) if path.exists() else {}
    for candidate in candidates:
        name = name_of(candidate)
        if name in peaks:
            continue
        found: list[int] = []
        with watched(Path("/sys/fs/cgroup/memory"), found):
            runner.measure(name, candidate)
        option = command.option_of(name, candidate)
        peaks[name] = {"bytes": found[0], "predicted": option.needed, "failed": runner.memory.failed.get(name, "")}
        path.write_text(json.dumps(peaks, indent=1))


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
    prepare("t5", data)
    network = directory / "network.json"
    host = directory / "host.json"
    with TemporaryDirectory() as lab:
        cluster = LimitedCluster(Path(lab) / "lab", HOSTS)
        try:
            cluster.up()
            for node in cluster.nodes:
                cluster.shape(node, RATE)
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
                place = directory / f"search-{share:.0%}".replace("%", "")
                place.mkdir(exist_ok=True)
                settings = {"RUNS_DIR": str(place), "NETWORK": str(network), "HOST_COST": str(host)}
                run(("bash", "scripts/search.sh"), place / "log", **settings)
                cluster.limit(-1)
        finally:
            cluster.down()
    report(directory)


def report(directory: Path) -> None:
    """What the searches found, beside what every layout needs and takes."""
    every = directory / "every"
    peaks = json.loads((every / PEAKS).read_text())
    seconds = {name: each["seconds"] for name, each in json.loads((every / STATE).read_text())["outcomes"].items()}
    rows = []
    for share, limit in limits_of(peaks).items():
        state = json.loads((directory / f"search-{share:.0%}".replace("%", "") / STATE).read_text())
        fitting = {name: seconds[name] for name, each in peaks.items() if each["bytes"] <= limit and name in seconds}
        fastest = min(fitting, key=lambda name: fitting[name])
        named = state["moments"][-1]["named"]
        rows.append(
            {
                "share of layouts that need more": share,
                "limit in MiB": limit / 2**20,
                "layouts": len(peaks),
                "runs": sum(max(1, len(each["times"])) for each in state["outcomes"].values()),
                "ran out": state["ran_out"],
                "failed otherwise": {
                    name: why for name, why in state["failed"].items() if name not in state["ran_out"]
                },
                "named": named,
                "named needs MiB": peaks[named]["bytes"] / 2**20,
                "regret": seconds[named] / seconds[fastest] - 1,
                "fastest that fits": fastest,
                "possible regret": state["moments"][-1]["possible_regret"],
                "minutes": state["seconds"] / 60,
            }
        )
    (directory / "searches.json").write_text(
        json.dumps({"peaks": peaks, "seconds": seconds, "searches": rows}, indent=1)
    )
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "--peaks":
        measure_peaks(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        main(Path(sys.argv[1]).absolute())
