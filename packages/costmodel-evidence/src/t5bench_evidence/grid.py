"""``python -m t5bench predict --choice``: is the layout that the model names the fastest one measured?

a100_grid.csv holds facts from VIA-Research/vTrain at f8dda84 (2024-09-26, MIT licence), data/ground_truth_single.csv:
its 720 iteration times of GPTs with 12 and 20 layers, measured with Megatron-DeepSpeed on the A100-80GB of one node,
for every TP x DP x PP of 2, 4 and 8 GPUs. They ran in fp16 with full recomputation and unfused attention. These 720 set
the host's cost and a layout's own error (machine.py, intervals.py); its other times, of 16 and 24 layers and of several
nodes, are kept apart to judge them.
"""

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import mean

from t5bench.choose.calibration import Calibrated, MeasuredTime, calibrate
from t5bench.costmodel import intervals
from t5bench.costmodel.intervals import Shift
from t5bench.costmodel.job import Architecture, Job, Parallel, padded
from t5bench.costmodel.machine import DEVICES, Link, Machine
from t5bench.printed_table import table

FILE = Path(__file__).with_name("a100_grid.csv")
VOCABULARY = 50257
BETWEEN = Link(100e9, 15e-6)  # four links of 200 Gbit/s, as the source says of its nodes


@dataclass(frozen=True)
class GridPoint:
    """A measured iteration."""

    job: Job
    machine: Machine
    seconds: float

    @property
    def choice(self) -> tuple[int, int, int, int]:
        """What two cells share between which one would choose: GPUs, samples and the model."""
        model = self.job.architecture
        return self.job.parallel.world, self.job.global_batch, model.hidden, model.decoder_layers

    @property
    def model(self) -> tuple[int, int, int]:
        """GPUs and the model."""
        model = self.job.architecture
        return self.job.parallel.world, model.hidden, model.decoder_layers


def read(path: Path = FILE) -> list[GridPoint]:
    """A file with the columns of a100_grid.csv."""
    with path.open() as lines:
        return [_cell({name: float(value) for name, value in row.items()}) for row in csv.DictReader(lines)]


def _cell(row: Mapping[str, float]) -> GridPoint:
    def whole(name: str) -> int:
        return int(row[name])

    hidden = whole("hidden")
    architecture = Architecture(
        encoder_layers=0,
        decoder_layers=whole("layers"),
        hidden=hidden,
        heads=whole("heads"),
        head_size=hidden // whole("heads"),
        ffn=4 * hidden,
        kv_heads=whole("heads"),
        encoder_length=0,
        decoder_length=whole("sequence_length"),
        padded_vocabulary=padded(VOCABULARY, 128, whole("tp")),
        family="gpt",
    )
    per_node = min(8, whole("gpus"))
    device = DEVICES["a100"]
    return GridPoint(
        job=Job(
            architecture,
            Parallel(whole("tp"), whole("pp"), whole("dp"), devices_per_node=per_node),
            micro_batch=whole("micro_batch"),
            global_batch=whole("global_batch"),
            precision="fp16",
            recompute="full",
        ),
        machine=Machine(device, Link(device.nvlink, 10e-6), BETWEEN, per_node),
        seconds=row["iteration_ms"] / 1e3,
    )


@dataclass(frozen=True)
class PredictedPoint:
    """A cell with its prediction."""

    cell: GridPoint
    seconds: float
    responses: Sequence[tuple[float, float]]
    own: float = intervals.LAYOUT
    """The standard deviation of the layout's error, beside what it shares with others."""

    @property
    def error(self) -> float:
        return self.seconds / self.cell.seconds - 1

    @cached_property
    def is_held(self) -> bool:
        """Whether the 90 % interval holds what was measured."""
        down, up = intervals.factors(self.responses, self.own)
        return self.seconds / down <= self.cell.seconds <= self.seconds * up


NOTHING_KNOWN = Calibrated(Shift(), ())


def predict(cells: Iterable[GridPoint], known: Calibrated = NOTHING_KNOWN) -> list[PredictedPoint]:
    """known: what runs on the machine have shown."""
    judged = []
    for cell in cells:
        seconds = known.seconds(cell.job, cell.machine)
        responses = known.responses(cell.job, cell.machine)
        judged.append(PredictedPoint(cell, seconds, responses, known.own(cell.job, cell.machine)))
    return judged


def calibrated_by_one(cells: Iterable[GridPoint], number: int = 0) -> list[PredictedPoint]:
    """Every model on every number of GPUs, after one of its runs. number: which one; it goes round."""
    groups: dict[tuple[int, int, int], list[GridPoint]] = {}
    for cell in cells:
        groups.setdefault(cell.model, []).append(cell)
    judged: list[PredictedPoint] = []
    for group in groups.values():
        run = group[number * 7 % len(group)]
        known = calibrate([MeasuredTime(run.job, run.machine, run.seconds)])
        judged += predict(group, known)
    return judged


CLASSES: Mapping[str, Callable[[Job], bool]] = {
    "all": lambda job: True,
    "micro-batch 1": lambda job: job.micro_batch == 1,
    "micro-batch 2 to 4": lambda job: job.micro_batch in (2, 4),
    "micro-batch 8": lambda job: job.micro_batch == 8,
    "TP > 1": lambda job: job.parallel.tensor > 1,
    "PP > 1": lambda job: job.parallel.pipeline > 1,
}


@dataclass(frozen=True)
class GridErrors:
    """What cells say of the model."""

    mean_error: float
    """Of the times, as a share of what was measured."""
    worst_error: float
    coverage: Mapping[str, float]
    """By class, the share of times that the 90 % intervals hold."""
    choices: int
    regret: float
    """The mean of how much longer than the fastest the layout takes that the model names."""
    regret_90: float
    """Its 90th percentile."""
    worst_regret: float
    named_the_fastest: int
    kendall_tau: float
    """Of pairs that one would choose between: the share in the right order, less the share in the wrong one."""
    pairs: int
    sure_pairs: int
    """Of which the model is sure that one is slower."""
    sure_and_wrong: float
    """The share of these in which it is not."""


def verdict(judged: Sequence[PredictedPoint]) -> GridErrors:
    choices: dict[tuple[int, int, int, int], list[PredictedPoint]] = {}
    for each in judged:
        choices.setdefault(each.cell.choice, []).append(each)
    regrets = []
    pairs = right = sure = wrong = 0
    for group in choices.values():
        fastest = min(each.cell.seconds for each in group)
        named = min(group, key=lambda each: each.seconds)
        regrets.append(named.cell.seconds / fastest - 1)
        for pair in combinations(group, 2):
            fast, slow = sorted(pair, key=lambda each: each.seconds)
            is_right = slow.cell.seconds >= fast.cell.seconds
            pairs += 1
            right += is_right
            if intervals.surely_slower(slow.seconds / fast.seconds, slow.responses, fast.responses, intervals.LAYOUT):
                sure += 1
                wrong += not is_right
    regrets.sort()
    coverage = {}
    for name, belongs in CLASSES.items():
        of_class = [each.is_held for each in judged if belongs(each.cell.job)]
        if of_class:
            coverage[name] = mean(of_class)
    return GridErrors(
        mean_error=mean(abs(each.error) for each in judged),
        worst_error=max(abs(each.error) for each in judged),
        coverage=coverage,
        choices=len(regrets),
        regret=mean(regrets),
        regret_90=regrets[int(0.9 * len(regrets))],
        worst_regret=regrets[-1],
        named_the_fastest=sum(regret == 0 for regret in regrets),
        kendall_tau=2 * right / pairs - 1 if pairs else 1.0,
        pairs=pairs,
        sure_pairs=sure,
        sure_and_wrong=wrong / sure if sure else 0.0,
    )


def own_error(judged: Sequence[PredictedPoint]) -> float:
    """The standard deviation of the logarithms of measured / predicted: of what layouts do not share."""
    logarithms = [log(each.cell.seconds / each.seconds) for each in judged]
    middle = mean(logarithms)
    return mean((each - middle) ** 2 for each in logarithms) ** 0.5


def run(path: Path, as_json: bool) -> int:
    cells = read(path)
    found = {
        "nothing measured": verdict(predict(cells)),
        "one run of each model and number of GPUs": verdict(calibrated_by_one(cells)),
    }
    if as_json:
        print(json.dumps({name: asdict(each) for name, each in found.items()}, indent=2))
        return 0
    rows = []
    for name, each in found.items():
        rows.append(
            {
                "": name,
                "mean error": f"{each.mean_error:.1%}",
                "worst": f"{each.worst_error:.0%}",
                "regret": f"{each.regret:.1%}",
                "90th": f"{each.regret_90:.1%}",
                "worst regret": f"{each.worst_regret:.0%}",
                "fastest named": f"{each.named_the_fastest} of {each.choices}",
                "Kendall tau": f"{each.kendall_tau:.2f}",
                "sure": f"{each.sure_pairs} of {each.pairs}",
                "of these wrong": f"{each.sure_and_wrong:.1%}",
            }
        )
    print(table(rows))
    held = [
        {"90 % interval holds": name} | {key: f"{share:.0%}" for key, share in each.coverage.items()}
        for name, each in found.items()
    ]
    print("\n" + table(held))
    typical = exp(own_error(predict(cells))) - 1
    print(f"\n{len(cells)} times; a layout's own error, standard deviation: {typical:.1%} (intervals.LAYOUT)")
    return 0
