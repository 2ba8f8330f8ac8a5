"""Pairs of settings: their draw, their smallest forms, what is kept of them, and some of them trained."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from t5bench import Interrupted, Problem
from t5bench_ledger.judge import BY_ITS_SHARE
from t5bench_ledger.pairs import measure, page, reference, settings
from t5bench_ledger.pairs.settings import BASES_OF, SETTINGS, Case, Setting, drawn, possible, settings_of


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
    ("statement", "error", "is_refusal"),
    [
        ("raise ValueError(", "ValueError: ZeRO-3 has no such option", True),
        ("assert not is_sharded, f'{name} is not for ZeRO-2'", "AssertionError: no_sync is not for ZeRO-2", True),
        ("assert is_sharded", "AssertionError", False),
        ("assert param.is_ready, param.summary()", "AssertionError: {'id': 0, 'status': 'NOT_AVAILABLE'}", False),
        ("raise AttributeError(name)", "AttributeError: 'NoneType' object has no attribute 'grad'", False),
        ("value = found[6]", "KeyError: 6", False),
        ("work.wait()", "RuntimeError: Output 0 of Split is a view and is being modified inplace.", False),
        ("_engine_run_backward(", "RuntimeError: expect_autograd_hooks_ INTERNAL ASSERT FAILED at x", False),
        ("self.config = Config(", "ValidationError: 1 validation error for DeepSpeedZeroConfig", True),
        ("self.reducer.prepare()", "RuntimeError: Expected to have finished reduction in the prior iteration", True),
    ],
)
def test_a_refusal_is_raised_on_purpose(statement: str, error: str, is_refusal: bool):
    traceback = (
        f'  File "train.py", line 1, in main\n    assert train()\n  File "a.py", line 2, in b\n    {statement}\n'
    )
    printed = ["it trains\n", f"Traceback (most recent call last):\n{traceback}{error}\n"]
    assert measure.is_refusal(error, printed) == is_refusal


@pytest.mark.parametrize("library", BASES_OF)
def test_the_code_of_a_pair_is_that_of_its_library(library: str, monkeypatch: pytest.MonkeyPatch):
    before = measure.code_digest(library)
    measure.code_digest.cache_clear()
    assert measure.code_digest(library) == before
    added = Setting("a new one", BASES_OF[library][:1], (1,))
    monkeypatch.setattr(settings, "SETTINGS", (*SETTINGS, added))
    measure.code_digest.cache_clear()
    others = [each for each in BASES_OF if each != library]
    changed = {each: measure.code_digest(each) for each in BASES_OF}
    monkeypatch.undo()
    measure.code_digest.cache_clear()
    assert changed[library] != before
    assert all(changed[each] == measure.code_digest(each) for each in others)


def test_a_finding_that_is_not_found_again_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    worker = SimpleNamespace(versions={"deepspeed": "0.19.8", "torch": "2.13.0", "python": "3.11"})
    monkeypatch.setattr(measure, "Worker", lambda *_: worker)
    answers = iter([measure.Trial("wrong", "loss of iteration 5", 1.0), measure.Trial("equal", "", 1.0)])
    monkeypatch.setattr(measure.Fuzzer, "attempt", lambda self, case: next(answers))
    pair = measure.Fuzzer(measure.Subject("deepspeed", ""), tmp_path, []).pair(1, 0, "code")
    assert (pair.verdict, pair.said) == ("wrong", "loss of iteration 5; not in a second try")
    assert Case(**pair.smallest) == drawn(1, 0, "deepspeed")


def test_releases_are_named_by_their_library():
    named = measure.subjects("0.18.6,torch,transformers==5.24.0")
    assert [subject.name for subject in named] == ["deepspeed 0.18.6", "torch", "transformers 5.24.0"]
    for unknown in ("numpy==2.0.0", "transformers", "five"):
        with pytest.raises(Problem, match="pairs are tried of"):
            measure.subjects(unknown)


PLAN = reference.Plan(micro_batches=2, samples=8, at_once=4, drops=False)


@pytest.mark.parametrize(
    ("planned", "taken", "steps", "said"),
    [
        (PLAN, [[0, 1, 2, 3, 4, 5, 6, 7]], 1, ""),
        (PLAN, [[0, 1, 2, 3, 4, 5, 6, 6]], 1, "left out 1 samples, and took one 2 times"),
        (PLAN, [[0, 1, 2, 3, 4, 5, 6]], 1, "left out 1 samples"),
        (PLAN, [[0, 1, 2, 3, 4, 5, 6, 7]], 2, "it made 2 steps of 1"),
        (replace(PLAN, samples=7), [[0, 1, 2, 3, 4, 5, 6, 0]], 1, ""),
        (replace(PLAN, samples=7), [[0, 1, 2, 0, 4, 5, 6, 0]], 1, "left out 1 samples, and took one 3 times"),
        (replace(PLAN, samples=7, drops=True), [[0, 1, 2, 6]], 1, ""),
        (replace(PLAN, samples=7, drops=True), [[0, 1, 2]], 1, "left out 4 samples"),
    ],
)
def test_each_sample_is_taken_once_an_epoch(planned, taken: list[list[int]], steps: int, said: str):
    if not said:
        reference.check(planned, taken, steps, 1, ends_whole=True)
        return
    with pytest.raises(reference.SamplesError, match=said):
        reference.check(planned, taken, steps, 1, ends_whole=True)


def test_a_plan_divides_the_data_as_the_case_says():
    whole = reference.plan(Case("trainer", {}), 2, drops=False)
    assert (whole.samples, whole.steps, whole.epochs) == (32, 4, 1)
    short = reference.plan(Case("trainer", {"data": "short last window"}), 2, drops=False)
    assert (short.samples, short.steps, short.epochs) == (12, 2, 2)
    split = reference.plan(Case("trainer", {"split_batches": True, "data": "short last batch"}), 2, drops=True)
    assert (split.samples, split.at_once, split.steps) == (7, 2, 2)


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
    assert "| loss of iteration 1 | 1 | 7 |" in text  # the words of the refusal


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


def fuzzer_of(base: str, output: Path) -> measure.Fuzzer:
    library = next(each for each, bases in BASES_OF.items() if base in bases)
    release = {"transformers": "5.24.0", "accelerate": "1.15.0"}.get(library, "")
    return measure.Fuzzer(measure.Subject(library, release), output, [])


PLANTED = {
    "train.py": ("total += loss.detach()", "total += 1.01 * loss.detach()"),
    "by_trainer.py": ("own.losses.append(", "own.losses.append(1.01 * "),
    "by_accelerate.py": ("self.accelerator.backward(loss)", "self.accelerator.backward(1.01 * loss)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("base", [base for bases in BASES_OF.values() for base in bases])
def test_what_is_left_at_its_defaults_is_equal_and_a_planted_mistake_is_not(tmp_path: Path, base: str):
    fuzzer = fuzzer_of(base, tmp_path)
    try:
        assert fuzzer.attempt(Case(base)).verdict == "equal"
        program = fuzzer.program.read_text()
        planted = program.replace(*PLANTED[fuzzer.program.name])
        assert planted != program
        fuzzer.program = tmp_path / "planted.py"
        fuzzer.program.write_text(planted)
        assert fuzzer.attempt(Case(base)).verdict == "wrong"
    finally:
        fuzzer.worker.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        (Case("trainer", {"model": "t5"}), "wrong"),
        (Case("trainer", {"model": "t5", "accepts_loss_kwargs": False}), "equal"),
        (Case("trainer", {"targets": "unequal", "average_tokens_across_devices": False}), "equal"),
        (Case("accelerate", {"data": "short last window"}), BY_ITS_SHARE),
    ],
    ids=lambda each: each if isinstance(each, str) else each.words,
)
def test_the_faults_that_are_known_are_found(tmp_path: Path, case: Case, verdict: str):
    fuzzer = fuzzer_of(case.base, tmp_path)
    try:
        assert fuzzer.attempt(case).verdict == verdict
    finally:
        fuzzer.worker.end()
