"""The same rows over commits and releases, how they scale, and what they cost."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from made_runs import RTX_5000_ADA, START, make_run

from t5bench.__main__ import main

VERSIONS = {"python": "3.11.2", "torch": "2.13.0", "deepspeed": "0.19.8"}
DAY = 86_400.0


def sweep(
    directory: Path,
    milliseconds: float,
    *,
    day: int = 0,
    deepspeed: str = "0.19.8",
    repeats: int = 3,
    strategies: Sequence[str] = ("ddp",),
    **fields: object,
) -> Path:
    """Repeats of these strategies, whose iterations take about as long."""
    noise = random.Random(day)
    for repeat in range(repeats):
        for number, strategy in enumerate(strategies):
            times = [milliseconds * (1 + noise.uniform(-0.01, 0.01)) for _ in range(60)]
            start = START + day * DAY + 100 * repeat + 10 * number
            versions = {**VERSIONS, "deepspeed": deepspeed}
            path = directory / f"repeat{repeat}" / strategy
            make_run(path, strategy, elapsed_ms=times, start=start, versions=versions, **fields)
    return directory


def history(*words: object) -> int:
    return main(["history", *map(str, words)])


def histories(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, list[dict]]:
    """By row, from what it prints for programs."""
    assert history(*words, "--json") == 0
    return {entry["row"]: entry["points"] for entry in json.loads(capsys.readouterr().out)["histories"]}


def test_the_same_package_twice_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = sweep(tmp_path / "a", 100.0, repeats=1)
    copy = tmp_path / "copy"
    shutil.copytree(first, copy)
    later = sweep(tmp_path / "b", 130.0, day=1, repeats=1)
    assert history(first, copy, first, later, "--json") == 0
    shown = capsys.readouterr()
    (points,) = [entry["points"] for entry in json.loads(shown.out)["histories"]]
    assert [point["place"] for point in points] == [str(first), str(later)]
    for again in (copy, first):
        assert f"warning: {again} holds the same runs as {first}; they count once" in shown.err


def test_a_slower_release_is_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = sweep(tmp_path / "a", 100.0, deepspeed="0.19.7")
    slower = sweep(tmp_path / "b", 130.0, day=1)
    same = sweep(tmp_path / "c", 130.5, day=2)
    points = histories(capsys, same, before, slower)["ddp, 2 processes"]
    assert [point["verdict"] for point in points] == [None, "slower", "no clear change"]
    assert [point["deepspeed"] for point in points] == ["0.19.7", "0.19.8", "0.19.8"]
    ratio = points[1]["ratio_to_the_one_before"]
    assert ratio["low"] < ratio["median"] < ratio["high"] < 1
    assert ratio["median"] == pytest.approx(100 / 130, rel=0.01)
    history(before, slower)
    shown = capsys.readouterr().out
    assert "0.19.7" in shown and "slower" in shown and "nccl" not in shown


def test_too_few_repeats_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sweep(tmp_path / "a", 100.0, repeats=1)
    sweep(tmp_path / "b", 130.0, day=1, repeats=1)
    assert history(tmp_path / "a", tmp_path / "b") == 0
    shown = capsys.readouterr().out
    assert "\N{DAGGER} fewer than 3 repeats: what changed may be the machine's state" in shown


def test_another_job_is_another_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sweep(tmp_path / "a", 100.0)
    sweep(tmp_path / "b", 130.0, day=1, settings={"MICRO_BATCH_SIZE": "2"})
    assert history(tmp_path / "a", tmp_path / "b", "--json") == 0
    found = json.loads(capsys.readouterr().out)["histories"]
    assert [len(entry["points"]) for entry in found] == [1, 1]


def test_a_package_gives_what_its_runs_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = sweep(tmp_path / "a", 100.0, strategies=("ddp", "zero1"))
    assert main(["pack", str(runs), "-o", str(tmp_path / "a.tar.gz")]) == 0
    capsys.readouterr()
    of_runs = histories(capsys, runs)
    of_package = histories(capsys, tmp_path / "a.tar.gz")
    for points in (*of_runs.values(), *of_package.values()):
        for point in points:
            del point["place"]
    assert of_package == of_runs and of_runs.keys() == {"ddp, 2 processes", "zero1, 2 processes"}


def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Four processes take the same batch 1.6 times as fast, and twice the batch in 1.1 times the time."""
    two = sweep(tmp_path / "two", 100.0)
    four = sweep(tmp_path / "four", 62.5, world_size=4)
    larger = sweep(tmp_path / "larger", 110.0, world_size=4, settings={"GLOBAL_BATCH_SIZE": "32"})
    assert history(two, four, larger, "--json") == 0
    curves = {curve["kind"]: curve["points"] for curve in json.loads(capsys.readouterr().out)["scaling"]}
    assert [point["processes"] for point in curves["strong"]] == [2, 4]
    assert curves["strong"][1]["efficiency"] == pytest.approx(0.8, rel=0.01)
    assert [point["global_batch"] for point in curves["weak"]] == [16, 32]
    assert curves["weak"][1]["efficiency"] == pytest.approx(1 / 1.1, rel=0.01)


def test_energy_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two GPUs draw 200 W each and train 160 samples a second."""
    runs = sweep(tmp_path / "a", 100.0, gpu=RTX_5000_ADA, sent_per_iteration=1e6, sample_seconds=1.0)
    (point,) = histories(capsys, runs, "--price", "1.8")["ddp, 2 processes"]
    assert point["joules_per_sample"] == pytest.approx(400 / 160, rel=0.01)
    assert point["cost_of_a_million_samples"] == pytest.approx(2 * 1.8 * 1e6 / 160 / 3600, rel=0.01)
    (on_cpu,) = histories(capsys, sweep(tmp_path / "b", 100.0))["ddp, 2 processes"]
    assert on_cpu["joules_per_sample"] is None and on_cpu["cost_of_a_million_samples"] is None


def test_the_page_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = sweep(tmp_path / "a", 100.0)
    after = sweep(tmp_path / "b", 80.0, day=1)
    four = sweep(tmp_path / "four", 62.5, world_size=4)
    page = tmp_path / "pages" / "history.html"
    assert history(before, after, four, "--output", page) == 0
    text = page.read_text()
    assert text.count("<svg") == 2 and 'class="faster"' in text and "strong scaling" in text
    assert "src=" not in text and "<script" not in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "there is no package or directory nowhere"),
        (["runs", "--price", "0"], "--price: must be at least"),
        (["runs", "--output", "history.pdf"], "--output must be a .html file"),
        (["none"], "holds no run"),
        (["not-a-package"], "not-a-package cannot be read"),
    ],
)
def test_bad_requests(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
):
    sweep(tmp_path / "runs", 100.0, repeats=1)
    (tmp_path / "none").mkdir()
    (tmp_path / "not-a-package").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert history(*words) == 2
    assert sentence in capsys.readouterr().err
