"""The simulators in a checkout of eth-easl/sailor (SOSP 2025): its own, and those of planners that it compares with.

Its authors took each planner's model of time out of its program, and measured on their GPUs what it asks for. So they
know two models on their own GPUs, whose trainings are the set sailor-gh200, and no other. Sailor calls a checkout by
its path, so a directory is made in which it lies as sailor.
"""

import contextlib
import io
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from t5bench_evidence.layout_bench.cases import SAILOR, Case
from t5bench_evidence.layout_bench.peers.checkout import imported_from
from t5bench_evidence.layout_bench.planners import Answer, Inexpressible

GPU = "GH-96"
PLANS = "simulations/validation/clariden"
BASELINES = "sailor.Planner.baselines"
MODELS = {"OPT-350": "training_config_opt_350.json", "GPT-Neo-2.7": "training_config_gpt_neo27.json"}
"""By Sailor's name, the file of what is trained."""


@dataclass(frozen=True)
class Simulator:
    """A module of peers: what stored.py asks of one."""

    NAME: str
    ABOUT: str
    module: str
    kind: str
    """The class in that module."""
    profile: str
    """What was measured for it, from sailor/Planner, with {model}."""
    takes_layouts: bool = False
    """Whether it is told the tensor-parallel group of each replica."""
    knows: tuple[str, ...] = tuple(MODELS)

    def fault(self, case: Case) -> str:
        """What of a case it cannot express; "" if it can express all."""
        if not case.name.startswith(SAILOR):
            return "a model and GPU that Sailor has not measured for it"
        return "" if _model_of(case) in self.knows else "a model that was not measured for it"

    def answer(self, case: Case, checkout: Path) -> Answer:
        """Of a case without a fault. Raises Inexpressible where the program refuses it."""
        planner = checkout / "sailor" / "Planner"
        name = case.name.removeprefix(SAILOR)
        plan = json.loads((planner / PLANS / f"{name}.json").read_text())
        model = _model_of(case)
        training = json.loads((planner / "simulations" / "configs" / MODELS[model]).read_text())
        training["global_batch_size"] = plan["gbs"]
        profile = planner / self.profile.format(model=model)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), _elsewhere():
            warnings.simplefilter("ignore")
            try:
                seconds = self._seconds(plan, training, profile, checkout)
            except (AssertionError, IndexError, KeyError, ValueError, ZeroDivisionError) as error:
                raise Inexpressible(f"a layout that it refuses: {error!r}") from error
        return Answer(float(seconds))

    def _seconds(self, plan: Mapping[str, Any], training: Any, profile: Path, checkout: Path) -> float:
        kind = getattr(_imported(self.module, checkout), self.kind)
        if self.module.endswith("runtime_simulator"):
            planner = checkout / "sailor" / "Planner"
            sizes = json.loads((planner / "llm_info.json").read_text())
            measured = json.loads(profile.read_text())
            simulator = kind(os.environ["SAILOR_PATH"], training, sizes, False, measured, plan["zone"])
            found, _, _ = simulator.simulate_iteration_time(plan)
            return found
        pipeline = plan["pipeline_list"][0]
        groups = pipeline["tmp_per_stage"]
        layers = pipeline["layers_per_stage"]
        sizes = (groups[0][0][1], pipeline["dp"][0], pipeline["num_stages"], plan["mbs"])
        machine = _machine(checkout, sizes[1] * sizes[2], self.takes_layouts)
        simulator = kind(str(profile), machine, training)
        if self.takes_layouts:
            return simulator.get_time(*sizes, groups, layers)
        return simulator.get_time(*sizes, layers)


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """Piper's writes a file into the working directory; the programs that it and Varuna's start print much."""
    before = Path.cwd()
    output = os.dup(1)
    with tempfile.TemporaryDirectory(prefix="sailor.") as directory, Path(os.devnull).open("w") as nothing:
        os.chdir(directory)
        os.dup2(nothing.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(output, 1)
            os.close(output)
            os.chdir(before)


def _model_of(case: Case) -> str:
    return "OPT-350" if case.name.startswith(f"{SAILOR}OPT") else "GPT-Neo-2.7"


def _machine(checkout: Path, nodes: int, has_kinds: bool) -> dict[str, Any]:
    """As sailor/Planner/simulations/validation/validate.py describes the nodes to the simulators."""
    file = checkout / "sailor" / "Planner" / "simulations" / "configs" / "basic_cluster_config.json"
    content = json.loads(file.read_text())
    node = content[GPU] | {"num_nodes": nodes}
    if has_kinds:
        return {GPU: node, "zone": content["zone"]}
    return node | {"gpu_type": GPU, "zone": content["zone"]}


@cache
def _imported(module: str, checkout: Path) -> Any:
    home = Path(tempfile.mkdtemp(prefix="sailor."))
    (home / "sailor").symlink_to(checkout)
    os.environ["SAILOR_PATH"] = str(home)
    return imported_from(checkout, module)


def _planner(name: str, about: str, folder: str, profile: str, **more: Any) -> Simulator:
    module = f"{BASELINES}.{folder}.{folder.lower()}_simulator"
    return Simulator(name, about, module, f"{folder}Simulator", f"baselines/{folder}/{profile}", **more)


SIMULATORS = {
    "sailor": Simulator(
        "Sailor",
        "times and memory of pipelines on unequal GPUs, from layers that it measures",
        "sailor.Planner.simulations.runtime_simulator",
        "Simulator",
        "simulations/profiles_tmp.json",
    ),
    "piper": _planner("Piper, in Sailor", "", "Piper", f"profiles/{{model}}/{GPU}/profile.json"),
    "varuna": _planner("Varuna, in Sailor", "", "Varuna", f"profiles/{{model}}/{GPU}/profile_4.json"),
    "galvatron": _planner("Galvatron, in Sailor", "", "Galvatron", f"profiles/{{model}}/{GPU}", knows=("OPT-350",)),
    "amp": _planner("AMP, in Sailor", "", "AMP", "profiles/{model}", takes_layouts=True),
    "metis": _planner("Metis, in Sailor", "", "Metis", "profiles/{model}", takes_layouts=True),
    "flashflex": _planner("FlashFlex, in Sailor", "", "FlashFlex", "src/machine_amounts.json", takes_layouts=True),
}
"""By the names of --peer."""
