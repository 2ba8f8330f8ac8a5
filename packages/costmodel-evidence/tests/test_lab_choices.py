"""Searches on the hosts of this project's lab, of which every layout was measured, too."""

from functools import partial
from math import exp, log
from statistics import mean

import pytest

from t5bench.choose.calibration import Calibrated, MeasuredTime, calibrate
from t5bench.choose.search import command
from t5bench.choose.search.next_run import Option
from t5bench.choose.search.runs import name_of
from t5bench.costmodel.intervals import Shift
from t5bench_evidence import lab, replay
from t5bench_evidence.lab import LabChoice
from t5bench_evidence.replay import NEAR, Replayed


def replayed(choice: LabChoice) -> Replayed:
    candidates = command.that_may_be_fastest(choice.candidates())
    options = [Option(name_of(each), each.job, each.machine, "gloo") for each in candidates]
    return replay.replay_options(options, choice.seconds)


CHOICES = lab.choices()
OF_MODELS = lab.choices(lab.TABLE_OF_MODELS)
each_choice = partial(pytest.mark.parametrize, "choice", CHOICES, ids=[choice.name for choice in CHOICES])


@each_choice()
def test_every_layout_was_measured(choice: LabChoice):
    assert choice.seconds.keys() == {name_of(candidate) for candidate in choice.candidates()} and not choice.failed


@each_choice()
def test_a_replayed_search_ends_near_the_fastest(choice: LabChoice):
    found = replayed(choice)
    print(f"{choice.name}: {found.runs} of {found.options} layouts, regret {found.regrets[-1]:.1%}")
    assert found.regrets[-1] <= NEAR and found.runs < found.options


@each_choice()
def test_the_live_search_named_a_layout_near_the_fastest(choice: LabChoice):
    regret = choice.regret(choice.search.named)
    print(f"{choice.name}: {choice.search.runs} runs, {choice.search.minutes:.1f} min, regret {regret:.1%}")
    assert regret <= choice.search.possible_regret + NEAR


@pytest.mark.parametrize("choice", OF_MODELS, ids=[choice.name for choice in OF_MODELS])
def test_the_search_for_a_described_model_starts_a_layout_near_the_fastest(choice: LabChoice):
    assert choice.seconds.keys() == {name_of(candidate) for candidate in choice.candidates()} and not choice.failed
    assert choice.regret(choice.search.start) <= choice.search.possible_regret + NEAR


def mean_error(choice: LabChoice, known: Calibrated) -> float:
    """Of the predicted times, as a natural logarithm."""
    return mean(
        abs(log(known.seconds(each.job, each.machine, "gloo") / choice.seconds[name_of(each)]))
        for each in choice.candidates()
    )


def after_one_run(choice: LabChoice) -> Calibrated:
    """Of DDP with its fastest micro-batch."""
    ddp = [each for each in choice.candidates() if each.kind == "DDP"]
    run = min(ddp, key=lambda each: choice.seconds[name_of(each)])
    return calibrate([MeasuredTime(run.job, run.machine, choice.seconds[name_of(run)], "gloo")])


def test_predictions_with_a_measured_network_and_host():
    """Hosts that share a core help each other's pipelines, which the model does not know."""
    before = [mean_error(choice, Calibrated(Shift(), ())) for choice in CHOICES]
    after = [mean_error(choice, after_one_run(choice)) for choice in CHOICES]
    for choice, error, calibrated in zip(CHOICES, before, after, strict=True):
        print(f"{choice.name}: mean error {exp(error) - 1:.1%}, after a run of DDP {exp(calibrated) - 1:.1%}")
    assert mean(before) < 0.16 and mean(after) < 0.15
