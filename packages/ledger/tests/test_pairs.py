"""Pairs of settings: their draw, their smallest forms, what is kept of them, and some of them trained."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from t5bench import Interrupted, Problem
from t5bench_ledger.pairs import measure, page
from t5bench_ledger.pairs.settings import BASES_OF, SETTINGS, ZERO_STAGES, Case, drawn, possible, settings_of


@pytest.mark.parametrize("library", BASES_OF)
def test_a_seed_and_a_number_give_the_same_pair_everywhere(library: str):
    cases = [drawn(1, number, library) for number in range(300)]
    assert cases == [drawn(1, number, library) for number in range(300)]
    assert cases != [drawn(2, number, library) for number in range(300)]
    assert {case.base for case in cases} == set(BASES_OF[library])
    for case in cases:
        assert len(case.choices) == 2
        for name, value in case.choices.items():
            (setting,) = (each for each in settings_of(case.base) if each.name == name)
            assert value in setting.values
        assert Case(**json.loads(json.dumps(case.to_json()))) == case
    assert possible(library) > 1000


def test_deepspeed_knows_the_options():
    """DeepSpeed ignores what it does not know, so a misspelt option would be equal for ever."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    asked = {setting.place[1] for setting in SETTINGS if setting.place[:1] == ("zero_optimization",)}
    assert asked and asked <= known


@pytest.mark.parametrize(
    ("fault", "smallest"),
    [
        (lambda case: "tied" in case.choices and case.micro_batches > 1,
         Case("zero2", {"tied": True}, iterations=1, micro_batches=2, width=1)),
        (lambda case: {"tied", "overlap_comm"} <= case.choices.keys() and case.iterations > 2,
         Case("zero2", {"overlap_comm": True, "tied": True}, iterations=3, micro_batches=1, width=1)),
        (lambda case: True, Case("zero2", {}, iterations=1, micro_batches=1, width=1)),
        (lambda case: False, Case("zero2", {"overlap_comm": True, "tied": True})),
    ],
)  # fmt: skip
def test_a_finding_is_reduced_to_its_smallest_form(fault, smallest: Case):
    trials = []

    def attempt(case: Case) -> measure.Trial:
        trials.append(case)
        return measure.Trial("wrong" if fault(case) else "equal", "", 0.0)

    assert measure.smallest_form(Case("zero2", {"overlap_comm": True, "tied": True}), "wrong", attempt) == smallest
    assert len(trials) <= measure.MOST_TRIALS + 60


@pytest.mark.parametrize("error", [Interrupted(143), Problem("its process has ended", "")])
def test_a_reduction_that_is_interrupted_trains_nothing_more(error: BaseException):
    """Nor does it take the answers of what it left for those of what comes next."""
    trials = []

    def attempt(case: Case) -> measure.Trial:
        trials.append(case)
        if len(trials) == 2:
            raise error
        return measure.Trial("equal" if len(trials) == 1 else "wrong", "", 0.0)

    with pytest.raises(type(error)):
        measure.smallest_form(Case("zero2", {"overlap_comm": True, "tied": True}), "wrong", attempt)
    assert len(trials) == 2


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        ("ValueError: ZeRO-3 has no such option", "refused"),
        ("AssertionError: no_sync is not for ZeRO-2", "refused"),
        ("AssertionError", "crashes"),
        ("AttributeError: 'NoneType' object has no attribute 'grad'", "crashes"),
        ("KeyError: 6", "crashes"),
        ('RuntimeError: expect_autograd_hooks_ INTERNAL ASSERT FAILED at "reducer.cpp"', "crashes"),
    ],
)
def test_a_crash_is_no_refusal(error: str, verdict: str):
    assert (measure.CRASHES if measure._CRASH.match(error) else measure.REFUSED) == verdict


def made_pair(number: int, verdict: str, smallest: Case | None = None, release: str = "0.19.8") -> dict:
    case = drawn(1, number, "deepspeed")
    pair = measure.Pair(
        "deepspeed", release, "2.13.0+cpu", "3.11.0", 1, number, "code", case.to_json(), verdict, "loss of iteration 1",
        1.8, smallest.to_json() if smallest else None,
    )  # fmt: skip
    return asdict(pair)


def test_the_page_counts_every_pair_and_names_each_smallest_form_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    form = Case("zero2", {"tied": True}, iterations=1, micro_batches=2, width=1)
    pairs = [made_pair(number, "equal") for number in range(7)]
    pairs += [made_pair(7, "refused"), *(made_pair(number, "wrong", form) for number in (8, 9))]
    (entry,) = page.summary(pairs)
    assert (entry["pairs"], entry["verdicts"]) == (10, {"equal": 7, "refused": 1, "wrong": 2})
    assert [(found["pairs"], found["numbers"]) for found in entry["findings"]] == [(2, [8, 9])]
    assert page.an_hour(entry) == 2000
    monkeypatch.setattr(page, "SUMMARY", tmp_path / "pairs.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "pairs.md")
    page.write([entry])
    page.write(page.summary([made_pair(1, "equal", release="0.18.9")]))
    kept = json.loads((tmp_path / "pairs.json").read_text())
    assert [each["release"] for each in kept] == ["0.18.9", "0.19.8"]
    text = (tmp_path / "pairs.md").read_text()
    assert text.count("zero2, tied=True") == 1 and "8, 9" in text


def test_the_published_page_is_that_of_its_data():
    entries = json.loads(page.SUMMARY.read_text())
    assert page.PAGE.read_text() == page.markdown(entries)
    for entry in entries:
        assert sum(entry["verdicts"].values()) == entry["pairs"] <= entry["of"]
        for found in entry["findings"]:
            case = Case(**found["case"])
            assert all(case.base in setting.bases for setting in SETTINGS if setting.name in case.choices)


def trained(tmp_path: Path, count: int, releases: str) -> list[dict]:
    args = argparse.Namespace(output=tmp_path, seed=1, pairs=count, publish=False)
    assert measure.run(args, releases) == 0
    return [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_pairs_are_trained_and_the_same_command_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = trained(tmp_path, 2, "torch")
    assert [pair["number"] for pair in first] == [0, 1]
    assert {pair["verdict"] for pair in first} <= {"equal", "refused"}
    assert trained(tmp_path, 4, "torch")[:2] == first
    assert capsys.readouterr().err.count("[1/") == 1
    assert len(trained(tmp_path, 4, "torch")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("base", [*ZERO_STAGES, "ddp", "fsdp2"])
def test_what_is_left_at_its_defaults_is_equal_and_a_planted_mistake_is_not(tmp_path: Path, base: str, monkeypatch):
    subject = measure.Subject("deepspeed" if base in ZERO_STAGES else "torch", "")
    fuzzer = measure.Fuzzer(subject, tmp_path, [])
    try:
        assert fuzzer.attempt(Case(base)).verdict == "equal"
        program = measure.PROGRAM.read_text()
        planted = program.replace("total += loss.detach()", "total += 1.01 * loss.detach()")
        assert planted != program
        copy = tmp_path / "planted.py"
        copy.write_text(planted)
        monkeypatch.setattr(measure, "PROGRAM", copy)
        assert fuzzer.attempt(Case(base)).verdict == "wrong"
    finally:
        fuzzer.worker.end()
