"""Runs that go on beyond their planned end, with another rate or with another batch, through the launchers."""

import re
import shutil
from pathlib import Path

import pytest
from real_runs import EXACT, finish, start, train

from t5bench.record.records import load
from t5bench.record.run import Run
from t5bench_verify.relations import contradictions

pytestmark = pytest.mark.slow
PLANNED = EXACT | {"ENGINE": "native", "TRAIN_ITERS": "8", "SAVE_INTERVAL": "4", "MIN_LR": "0.0001"}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, sample_data: Path) -> dict[str, str]:
    return PLANNED | {"MEGATRON_DATA_DIR": str(sample_data), "OUTPUT": str(tmp_path_factory.mktemp("longer"))}


def trained(planned: dict[str, str], strategy: str = "ddp", **changes: str) -> Path:
    """The run as it was planned, trained once."""
    directory = Path(planned["OUTPUT"], "-".join([strategy, *changes.values()]))
    if not directory.exists():
        train(strategy, directory, **planned | changes)
    return directory


def interrupted(run: Path, target: Path) -> Path:
    """As if it had ended after iteration 4."""
    shutil.copytree(run, target)
    shutil.rmtree(target / "checkpoints" / "iter_0000008")
    return target


def curve(run: Run) -> dict[int, tuple[float, float, float]]:
    return {line.iteration: (line.lm_loss, line.grad_norm, line.learning_rate) for line in run.iterations}


def contradictions_in(run: Run) -> list[str]:
    """Apart from the clock's, which so few and short iterations have on a busy machine."""
    return [each for each in contradictions(run) if "but their lines came" not in each]


def told_by_the_engine(run: Run) -> str:
    return re.search(r"native engine continues .*", (run.directory / "node0.log").read_text())[0]


def test_a_longer_run_is_refused_until_its_schedule_is_chosen(planned: dict[str, str], tmp_path: Path):
    run = shutil.copytree(trained(planned), tmp_path / "run")
    [launcher] = start("ddp", run, **planned | {"RESUME": "1", "TRAIN_ITERS": "12"})
    said = launcher.communicate(timeout=100)[1]
    assert launcher.returncode == 2
    assert "TRAIN_ITERS is '12' here and was '8'; LR_DECAY_ITERS is '12' here and was '8'" in said
    assert "RESUME_CHANGES='TRAIN_ITERS LR_DECAY_ITERS'; LR_DECAY_ITERS=8 keeps the learning rate" in said


def test_a_longer_run_keeps_its_plan_until_its_end(planned: dict[str, str], tmp_path: Path):
    """The schedule and the samples; then come the smallest rate, and another order of the samples."""
    before = trained(planned)
    longer = planned | {"RESUME": "1", "TRAIN_ITERS": "12", "LR_DECAY_ITERS": "8", "RESUME_CHANGES": "TRAIN_ITERS"}
    found = train("zero1", interrupted(before, tmp_path / "run"), **longer)
    expected = curve(load(before))
    assert list(curve(found)) == list(range(1, 13))
    for number, figures in curve(found).items():
        if number <= 8:
            assert figures == pytest.approx(expected[number], rel=5e-6)
        else:
            assert figures[2] == 0.0001
    assert told_by_the_engine(found).endswith("begins anew: the order of the samples, after sample 64")
    assert not contradictions_in(found)
    assert (found.plan.recipe_changed_at, found.plan.changed_at) == (4, 4)

    # It is one run: continued in the second order, nothing is begun anew.
    shutil.rmtree(found.directory / "checkpoints" / "iter_0000012")
    again = train("ddp", found.directory, **longer)
    assert told_by_the_engine(again).endswith("begins anew: nothing")
    assert curve(again) == pytest.approx(curve(found), rel=5e-6)


def test_a_longer_run_may_stretch_its_schedule(planned: dict[str, str], tmp_path: Path):
    run = shutil.copytree(trained(planned), tmp_path / "run")
    changes = {"TRAIN_ITERS": "12", "RESUME_CHANGES": "TRAIN_ITERS LR_DECAY_ITERS"}
    found = train("ddp", run, **planned | changes, RESUME="1")
    assert "the next learning rate is 3.250E-04, and would have been 1.000E-04" in told_by_the_engine(found)
    assert curve(found)[12][2] == 0.0001 < curve(found)[9][2]
    assert not contradictions_in(found)


def test_another_rate_counts_from_the_next_iteration(planned: dict[str, str], tmp_path: Path):
    run = interrupted(trained(planned), tmp_path / "run")
    [said] = finish(start("ddp", run, **planned, RESUME="1", LR="0.0005", RESUME_CHANGES="LR"))
    assert "resuming from the checkpoint of iteration 4: LR is '0.0005' here and was '0.001'" in said
    found = load(run)
    assert "the next learning rate is 3.000E-04, and would have been 5.500E-04; begins anew: nothing" in (
        told_by_the_engine(found)
    )
    expected = curve(load(trained(planned)))
    assert curve(found)[5][:2] == pytest.approx(expected[5][:2], rel=5e-6), "the rate shows after its first update"
    assert curve(found)[6][0] != pytest.approx(expected[6][0], rel=5e-6)
    assert not contradictions_in(found)


def test_another_batch_goes_on_with_the_next_sample(planned: dict[str, str], tmp_path: Path):
    run = interrupted(trained(planned), tmp_path / "run")
    changes = {"GLOBAL_BATCH_SIZE": "16", "RESUME_CHANGES": "GLOBAL_BATCH_SIZE"}
    found = train("ddp", run, **planned | changes, RESUME="1")
    counted = re.findall(r"iteration +(\d+)/.*consumed samples: +(\d+)", (run / "node0.log").read_text())
    assert [(int(number), int(samples)) for number, samples in counted] == [(5, 48), (6, 64), (7, 80), (8, 96)]
    assert told_by_the_engine(found).endswith("begins anew: the order of the samples, after sample 64")
    assert not contradictions_in(found)


def test_a_decoder_without_dropout_has_one_curve_with_any_micro_batch(planned, gpt: dict[str, str], tmp_path: Path):
    """It needs no permission; and so "on any number of processes" is true of it."""
    settings = planned | gpt | {"ENGINE": "native"}
    before = trained(settings, strategy="fsdp2", MODEL_FAMILY="gpt")
    more = {"NPROC_PER_NODE": "8", "MICRO_BATCH_SIZE": "1"}
    [said] = finish(start("ddp", interrupted(before, tmp_path / "run"), **settings | more, RESUME="1"))
    assert "MICRO_BATCH_SIZE is '1' here and was '2'" in said and "another curve" not in said
    found, expected = curve(load(tmp_path / "run")), curve(load(before))
    for number, figures in found.items():
        assert figures == pytest.approx(expected[number], rel=5e-6)


def test_an_encoder_decoder_s_micro_batch_changes_only_on_purpose(planned: dict[str, str], tmp_path: Path):
    run = interrupted(trained(planned), tmp_path / "run")
    other = planned | {"RESUME": "1", "MICRO_BATCH_SIZE": "1"}
    [launcher] = start("ddp", run, **other)
    assert "add RESUME_CHANGES='MICRO_BATCH_SIZE'" in launcher.communicate(timeout=100)[1]
    assert launcher.returncode == 2
    [said] = finish(start("ddp", run, **other, RESUME_CHANGES="MICRO_BATCH_SIZE"))
    assert "MICRO_BATCH_SIZE is '1' here and was '2' (another curve: each micro-batch has a mean" in said
