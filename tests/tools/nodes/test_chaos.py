"""Random faults at random moments against runs on two hosts that are started again until they are complete.

    CHAOS_FAULTS=100 CHAOS_SEED=7 python -m pytest -s -n0 --timeout=0 tests/tools/nodes/test_chaos.py

as root, for as long as the faults take. The native engine trains a tiny model and saves checkpoints. Every attempt must
end by itself, leave no process and no torn file, and say how it ended; a run that is complete must have the losses of
an undisturbed one, digit by digit. The same seed plays the same faults, as far as the machine's own timing allows.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cluster_lab import NATIVE, PROCESSES, Cluster, Terminal, losses
from support import Project, wait_for

from t5bench.record import status
from t5bench.record.records import load

FAULTS, SEED = int(os.environ.get("CHAOS_FAULTS", "4")), int(os.environ.get("CHAOS_SEED", "1"))
NODES = ("node0", "node1")
MOST_ATTEMPTS, LONGEST_SECONDS = 12, 240
SETTINGS = NATIVE | {"TRAIN_ITERS": "100", "SAVE_INTERVAL": "20", "HOSTS": " ".join(NODES)}
SETTINGS |= {"DISTRIBUTED_TIMEOUT_MINUTES": "1", "WATCHDOG_SECONDS": "90"}
# Every Python of a host believes the time that is written in the host's own /run.
CLOCK = """
import time
real = time.time
def skewed():
    try:
        with open("/run/skew") as file: return real() + float(file.read())
    except (OSError, ValueError): return real()
time.time = skewed
"""


class Chaos:
    """Two hosts, and what is played on them."""

    def __init__(self, cluster: Cluster, project: Project) -> None:
        self.cluster, self.project, self.random = cluster, project, random.Random(SEED)
        self.played: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()

    def play(self) -> None:
        node, cluster = self.random.choice(NODES), self.cluster
        pids = cluster.pids(node, PROCESSES[self.random.choice(list(PROCESSES))])[:1]
        clock, rate = self.random.choice([-86400, -5, 0, 5, 3600, 86400]), self.random.choice(["2mbit", "20mbit"])
        skew = f"echo {clock} >/run/skew.new && mv /run/skew.new /run/skew"

        def signalled(name: str) -> None:
            cluster.kill(node, *pids, by=name)

        # How often, for how many seconds at most, what begins it, and what ends it, given what that returned.
        faults: dict[str, tuple[int, float, Callable, Callable]] = {
            "slow": (4, 2, lambda: cluster.shape(node, rate), lambda _: cluster.shape(node, "off")),
            "skew": (4, 0, lambda: cluster.run(node, "bash", "-c", skew), lambda _: None),
            "stop": (4, 3, lambda: signalled("STOP"), lambda _: signalled("CONT")),
            "cut": (4, 4, lambda: cluster.link(node, "down"), lambda _: cluster.link(node, "up")),
            "damage": (4, 3, lambda: cluster.spoil_cable(node, 2, 1, 5), lambda mend: mend()),
            "kill": (2, 0, lambda: signalled("KILL"), lambda _: None),
        }
        (name,) = self.random.choices(list(faults), [weight for weight, *_ in faults.values()])
        _, longest, begin, end = faults[name]
        begun = begin()
        time.sleep(self.random.uniform(min(0.3, longest), longest))
        end(begun)
        self.played[name] += 1

    def attempt(self, directory: Path, resume: bool, faults: int = 0) -> int:
        """From the start to the end of both launchers, with at most so many faults; the larger exit status."""
        place = {"OUTPUT_DIR": str(directory), "MASTER_PORT": str(self.random.randrange(21000, 25000))}
        environment = self.project.environment | SETTINGS | place | {"RESUME": str(int(resume))}
        place = {"env": environment, "cwd": self.project.root}
        words = ("bash", "scripts/run_megatron_t5_ddp.sh")
        self.terminals = [Terminal(self.cluster.start(node, *words, **place)) for node in NODES]
        deadline, last = time.monotonic() + LONGEST_SECONDS, sum(self.played.values()) + faults
        while any(not terminal.ended_at for terminal in self.terminals):
            assert time.monotonic() < deadline, [terminal.text for terminal in self.terminals]
            time.sleep(min(self.random.expovariate(1 / 1.5), 6) if faults else 0.1)
            if sum(self.played.values()) < last and any(not terminal.ended_at for terminal in self.terminals):
                self.play()
                for terminal in self.terminals:
                    # What stops a launcher stops nsenter too, which is not on the node and not continued there.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(terminal.process.pid, signal.SIGCONT)
        for terminal in self.terminals:
            self._said_how_it_ended(terminal.exit_code, terminal.text)
        wait_for(lambda: not self.cluster.left_of(self.project), 20)
        return max(terminal.exit_code for terminal in self.terminals)

    def _said_how_it_ended(self, code: int, text: str) -> None:
        names = "|".join([*status.EXIT_CODES, status.CANCELLED])
        run, refused = rf"^error: ddp on node \d+: ({names}): \S", r"^error: (?!ddp on node)(.{1,100})"
        said = re.findall(rf"{run}|{refused}|^ddp: (complete);", text, re.MULTILINE)
        words = [word for found in said for word in found if word]
        self.ends[words[-1] if words else f"signal {code - 128}"] += 1
        # A launcher that was killed, or ended while it planned, says nothing.
        assert words or code > 128, f"exit status {code}, and not a word: {text}"
        assert (words[-1:] == ["complete"]) == (code == 0), f"exit status {code}: {text}"
        # worker.py starts the engine, and is therefore in all of its tracebacks.
        assert not re.search(r'^ *File "[^"]*/t5bench/(?!run/worker\.py)', text, re.MULTILINE), text

    def run(self, directory: Path) -> str:
        """Attempts until one is complete, or none can be; every file of each record can be read to its end."""
        refused = False
        for _ in range(MOST_ATTEMPTS):
            resume = any((directory / "checkpoints").glob("iter_*/")) and not refused
            refused = self.attempt(directory, resume, FAULTS - sum(self.played.values())) == 2 and resume
            for path in directory.glob("*.json"):
                json.loads(path.read_text())
            for path in directory.glob("*.jsonl"):
                [json.loads(line) for line in path.read_text().splitlines()]
            if (directory / "run.json").exists() and load(directory).status == status.COMPLETE:
                return "complete"
        return "ended"


def test_chaos(cluster: Cluster, project: Project, tmp_path: Path, sample_data: Path):
    project.environment |= {"PYTHONPATH": str(tmp_path / "clock"), "MEGATRON_DATA_DIR": str(sample_data)}
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK)
    chaos, undisturbed = Chaos(cluster, project), tmp_path / "undisturbed"
    assert chaos.attempt(undisturbed, resume=False) == 0, [terminal.text for terminal in chaos.terminals]
    digits, runs = losses(undisturbed), Counter[str]()
    assert len(digits) == int(SETTINGS["TRAIN_ITERS"])
    while sum(chaos.played.values()) < FAULTS:
        directory = tmp_path / f"run{sum(runs.values())}"
        ended = chaos.run(directory)
        assert ended != "complete" or losses(directory) == digits
        runs[ended] += 1
        shutil.rmtree(directory)
        print(f"\nseed {SEED}: faults {dict(chaos.played)}, runs {dict(runs)}, ends {dict(chaos.ends)}", flush=True)
    assert runs["complete"]
