"""Measures choices among layouts on the lab's hosts: each layout, and what scripts/search.sh finds with few runs.

    python tests/tools/nodes/measure_choices.py DIRECTORY [CHOICE...]

Run it as root on a machine that does nothing else; it takes some ten minutes a choice. It leaves the runs in DIRECTORY,
continues where it stopped, and writes what DIRECTORY holds into lab_choices.json and lab_model_choices.json of
packages/costmodel-evidence. GPT-2's tokenizer comes from the engine's checkout, MEGATRON_DIR. The hosts are
network namespaces that share this machine's cores.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(Path(__file__).parent)]

import msgspec  # noqa: E402
from cluster_lab import SYSTEM_PATH, Cluster  # noqa: E402

from t5bench.choose.asked import asked_model  # noqa: E402
from t5bench.choose.search import command  # noqa: E402
from t5bench.choose.search.runs import STATE, Runner, name_of, remembered  # noqa: E402
from t5bench.choose.space import Candidate  # noqa: E402
from t5bench.command_lines import search as search_arguments  # noqa: E402
from t5bench.plan.launchers import LAYOUT_SETTINGS  # noqa: E402

TABLE = REPOSITORY / "packages" / "costmodel-evidence" / "src" / "t5bench_evidence" / "lab_choices.json"
TABLE_OF_MODELS = TABLE.with_name("lab_model_choices.json")
"""Of MODEL's; the cost model was not developed with these."""
NEARLY_AS_FAST = 1.15
RUNS_OF_NEAR = 3
CPUSETS = Path("/sys/fs/cgroup/cpuset")
SETTINGS = {
    "ENGINE": "native", "LAUNCH": "ssh", "DEVICE": "cpu", "NPROC_PER_NODE": "1", "MODEL_PRESET": "tiny",
    "PRECISION_FLAG": "", "DROPOUT": "0", "GLOBAL_BATCH_SIZE": "4", "OMP_NUM_THREADS": "1", "RETRIES": "0",
    "WANDB_MODE": "disabled",
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """Hosts, their links and a model."""

    hosts: int
    rate: str
    """Of each host's link, as tc writes it."""
    family: str
    core: int | None = None
    """The one core that all hosts share, which slows each of them down; None: all of this machine's."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of a model of MODEL, beside SETTINGS."""


# Small samples and short runs, because its iterations take long on two cores.
LLAMA = {"MODEL": "stories15m", "SEQ_LENGTH": "32", "GLOBAL_BATCH_SIZE": "2", "TRAIN_ITERS": "25"}
CHOICES = {
    "two hosts, 1 Gbit/s, T5": Choice(2, "1000mbit", "t5"),
    "two hosts, 100 Mbit/s, T5": Choice(2, "100mbit", "t5"),
    "two hosts on one core, 1 Gbit/s, GPT-2": Choice(2, "1000mbit", "gpt", core=1),
    "four hosts, 1 Gbit/s, T5": Choice(4, "1000mbit", "t5"),
    "four hosts, 100 Mbit/s, GPT-2": Choice(4, "100mbit", "gpt"),
    "two hosts, 1 Gbit/s, Llama of 15 million": Choice(2, "1000mbit", "gpt", settings=LLAMA),
}


def prepare(choice: Choice, data: Path) -> None:
    """The bundled sample, if it is not there."""
    if not data.exists():
        settings = {"MODEL_FAMILY": choice.family, "SAMPLE": "1", "MEGATRON_DATA_DIR": str(data)}
        settings |= {"TOKENIZER_MODEL": "", "MODEL": choice.settings.get("MODEL", "")}
        script = ["bash", "scripts/prepare_xsum_megatron.sh"]
        environment = os.environ | settings | {"PYTHON": sys.executable}
        subprocess.run(script, cwd=REPOSITORY, env=environment, check=True)


def put_on_core(cluster: Cluster, core: int) -> Path:
    """All that runs on the nodes, and what they start later. Returns the control group."""
    group = CPUSETS / f"t5bench-{os.getpid()}"
    group.mkdir()
    (group / "cpuset.mems").write_text("0")
    (group / "cpuset.cpus").write_text(str(core))
    processes = [cluster.first_process(node) for node in cluster.nodes]
    while processes:
        process = processes.pop()
        (group / "cgroup.procs").write_text(str(process))
        for task in Path(f"/proc/{process}/task").iterdir():
            processes += [int(child) for child in (task / "children").read_text().split()]
    return group


def measure(choice: Choice, directory: Path, data: Path) -> None:
    """The network, the hosts, every layout, and a search that knows the first two."""
    directory.mkdir(parents=True, exist_ok=True)
    network = directory / "network.json"
    host = directory / "host.json"
    group = None
    with TemporaryDirectory() as lab:
        cluster = Cluster(Path(lab) / "lab", choice.hosts)
        try:
            cluster.up()
            for node in cluster.nodes:
                cluster.shape(node, choice.rate)
            if choice.core is not None:
                group = put_on_core(cluster, choice.core)
            environment = (
                SETTINGS
                | choice.settings
                | {
                    "MODEL_FAMILY": choice.family,
                    "MEGATRON_DATA_DIR": str(data),
                    "HOSTS": " ".join(cluster.nodes),
                    "PYTHON": sys.executable,
                    "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
                }
            )

            def run(*words: str, **settings: str) -> None:
                line = cluster.on("login", *words, env=environment | settings, cwd=REPOSITORY)
                with (directory / "log").open("a") as log:
                    done = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
                if done.returncode not in (0, command.EXIT_NOT_CERTAIN):
                    raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: see {directory / 'log'}")

            if not (network.exists() and host.exists()):
                run("bash", "scripts/check_cluster.sh", "--network", str(network), "--host", str(host))
            run(
                "bash",
                "scripts/search.sh",
                RUNS_DIR=str(directory / "search"),
                NETWORK=str(network),
                HOST_COST=str(host),
            )
            run(sys.executable, __file__, "--every-layout", str(directory / "every"), str(network), str(host))
        finally:
            cluster.down()
            if group:
                group.rmdir()


def runner_of(directory: Path, network: str, host: str) -> tuple[Runner, list[Candidate]]:
    """On a host of the lab: what makes runs in a directory, and all layouts that the launchers can start."""
    for name in LAYOUT_SETTINGS:
        os.environ.pop(name, None)
    parser = argparse.ArgumentParser()
    search_arguments(parser)
    words = ["--runs-dir", str(directory), "--launch", "ssh", "--network", network, "--host", host]
    iterations = os.environ.get("TRAIN_ITERS", "")
    args = parser.parse_args([*words, *(["--iterations", iterations] if iterations else [])])
    directory.mkdir(parents=True, exist_ok=True)
    planned = command.plan_of_hosts(args)
    candidates = command.without_needless_recomputation(command.launchable(args, planned, None, None))
    memory = remembered(directory, command.question(args, planned, candidates[0]))
    return Runner(directory, over_ssh=True, iterations=args.iterations, memory=memory), candidates


def measure_every_layout(directory: Path, network: str, host: str) -> None:
    """On a host of the lab: one run of each layout that the launchers can start, whatever is predicted of it.

    Those that are nearly as fast as the fastest run three times, in turn.
    """
    runner, candidates = runner_of(directory, network, host)
    memory = runner.memory
    for candidate in candidates:
        name = name_of(candidate)
        if name not in memory.outcomes and name not in memory.failed:
            runner.measure(name, candidate)
    fastest = min(outcome.seconds for outcome in memory.outcomes.values())
    near = {name for name, outcome in memory.outcomes.items() if outcome.seconds <= NEARLY_AS_FAST * fastest}
    for repeats in range(2, RUNS_OF_NEAR + 1):
        for candidate in candidates:
            name = name_of(candidate)
            if name in near and memory.outcomes[name].repeats < repeats:
                runner.measure(name, candidate)


def row(name: str, choice: Choice, directory: Path, data: Path) -> dict[str, object]:
    """A choice in the table."""
    every = json.loads((directory / "every" / STATE).read_text())
    search = json.loads((directory / "search" / STATE).read_text())
    settings = SETTINGS | choice.settings | {"MODEL_FAMILY": choice.family, "MEGATRON_DATA_DIR": str(data)}
    os.environ |= settings
    model = asked_model(argparse.Namespace(model=None, vocabulary=None))
    last = search["moments"][-1]
    return {
        "name": name,
        "hosts": choice.hosts,
        "global_batch": int((SETTINGS | choice.settings)["GLOBAL_BATCH_SIZE"]),
        "engine_job": msgspec.to_builtins(model.engines[0]),
        "network": json.loads((directory / "network.json").read_text()),
        "host_cost": json.loads((directory / "host.json").read_text()),
        "iterations": int(every["question"]["iterations"]),
        "seconds": {layout: outcome["seconds"] for layout, outcome in every["outcomes"].items()},
        "failed": every["failed"],
        "search": {
            "named": last["named"],
            "start": search["parity"][-1],
            "possible_regret": last["possible_regret"],
            "runs": sum(max(1, len(outcome["times"])) for outcome in search["outcomes"].values()),
            "minutes": search["seconds"] / 60,
            "seconds": {layout: outcome["seconds"] for layout, outcome in search["outcomes"].items()},
        },
    }


def folder(directory: Path, name: str) -> Path:
    return directory / name.lower().replace(",", "").replace("/", "-").replace(" ", "-")


def data_of(choice: Choice, directory: Path) -> Path:
    """Of a described model with the sample's tokenizer."""
    return directory / (f"{choice.family}-sample-data" if choice.settings else f"{choice.family}-data")


def main() -> None:
    if sys.argv[1] == "--every-layout":
        measure_every_layout(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
        return
    directory = Path(sys.argv[1]).absolute()
    for name in sys.argv[2:] or CHOICES:
        choice = CHOICES[name]
        prepare(choice, data_of(choice, directory))
        measure(choice, folder(directory, name), data_of(choice, directory))
    for table, has_model in ((TABLE, False), (TABLE_OF_MODELS, True)):
        rows = [
            row(name, choice, folder(directory, name), data_of(choice, directory))
            for name, choice in CHOICES.items()
            if bool(choice.settings) == has_model and (folder(directory, name) / "every" / STATE).exists()
        ]
        if rows:
            table.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
