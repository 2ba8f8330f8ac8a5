"""The ledger: its verdicts, its table, what launchers read in it, and real trainings of the installed release."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from math import nan
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ledger_runs import run_ledger
from support import REPO_ROOT

from t5bench import Problem
from t5bench.__main__ import main
from t5bench.plan.releases import ask_ledger
from t5bench.record.ledger import UNKNOWN, VERDICTS, LedgerAnswer, look_up
from t5bench_ledger import answer, changes, command, costs, gate, measure, pictures, tables, verdicts
from t5bench_ledger.answer import NoAnswer
from t5bench_ledger.changes import CHANGES, is_withdrawn, standing
from t5bench_ledger.costs import Cost
from t5bench_ledger.counts import LiveStorages
from t5bench_ledger.judge import BY_ITS_SHARE, DOES_NOT_RUN, LOGS, RIGHT, ROUNDS, WRONG, CellVerdict, judge, noted, why
from t5bench_ledger.modes import MODES, RELEASES, RELEASES_OF, STRATEGIES, deepspeed_json, library_of
from t5bench_ledger.spans import published, releases_in, spans_of
from t5bench_ledger.words import size_in_words
from training_comparison.curves import Curves

MODE = {mode.name: mode for mode in MODES}
REFERENCE = Curves({1: 8.0, 2: 7.0}, {1: 2.0, 2: 1.5})


@pytest.mark.parametrize(
    ("losses", "norms", "precision", "expected"),
    [
        ({1: 8.0, 2: 7.0}, {1: 2.0, 2: 1.5}, "fp32", (RIGHT, None, "")),
        ({1: 8.0, 2: 7.00001}, {1: 2.0, 2: 1.5}, "fp32", (RIGHT, None, "")),
        # Adam and clipping can hide a wrong scale in the loss, but not in the norm.
        ({1: 8.0, 2: 7.0}, {1: 1.0, 2: 1.5}, "fp32", (WRONG, 1, "gradient norm")),
        ({1: 8.0, 2: 7.1}, {1: 2.0, 2: 1.5}, "fp32", (WRONG, 2, "loss")),
        ({1: 8.0, 2: 7.01}, {1: 2.0, 2: 1.5}, "bf16", (RIGHT, None, "")),
        ({1: 8.0, 2: nan}, {1: 2.0, 2: 1.5}, "bf16", (WRONG, 2, "loss")),
        ({1: 8.0}, {1: 2.0}, "fp32", (DOES_NOT_RUN, None, "")),
        # What is logged of the initial weights is another's, and no gradient ever is.
        ({1: 32.0, 2: 28.0}, {1: 2.0, 2: 1.5}, "fp32", (LOGS, 1, "loss")),
        ({1: 32.0, 2: 28.0}, {1: 2.0, 2: 1.6}, "fp32", (WRONG, 1, "loss")),
        ({1: 32.0, 2: 28.0}, {1: 2.0}, "fp32", (WRONG, 1, "loss")),
        ({1: 32.0, 2: 28.0}, {}, "fp32", (WRONG, 1, "loss")),
    ],
)
def test_the_verdict_names_the_first_iteration_and_quantity(losses, norms, precision, expected):
    verdict = judge(Curves(losses, norms), REFERENCE, precision)
    assert (verdict.verdict, verdict.iteration, verdict.quantity) == expected


def test_what_a_test_magnifies_is_no_other_model():
    wrong = judge(Curves(REFERENCE.loss, {1: 1.0, 2: 1.5}), REFERENCE, "fp32")
    same = (REFERENCE, REFERENCE)
    assert noted(wrong, {BY_ITS_SHARE: same}, "fp32").verdict == BY_ITS_SHARE
    other = (Curves({1: 8.1, 2: 7.0}, {}), REFERENCE)
    assert noted(wrong, {ROUNDS: other}, "fp32") == wrong
    right = judge(*same, "fp32")
    assert noted(right, {ROUNDS: other}, "fp32") == right
    cells = [cell("1.15.0", BY_ITS_SHARE, "accelerate", "last window", iteration=2, quantity="loss", times=9.0)]
    (fault,) = tables.release_faults(tables.sections([one | {"beside": ""} for one in cells])[0])
    assert tables.what_happens(fault).startswith("weighs a short last window by its share: loss off by")


def test_how_many_times_the_bound():
    half = judge(Curves(REFERENCE.loss, {1: 1.0, 2: 1.5}), REFERENCE, "fp32")
    assert half.times == pytest.approx(0.5 / 5e-6)
    assert judge(Curves({1: 8.0, 2: nan}, {}), REFERENCE, "fp32").times is None


def test_the_sentence_of_a_failure_is_its_cause_not_a_peers():
    peer = "Traceback (most recent call last):\nRuntimeError: [gloo/pair.cc] Connection closed by peer\n"
    cause = "Traceback (most recent call last):\n  File x\ntorch.cuda.OutOfMemoryError: Output 0 of Split is a view\n"
    assert why([peer, cause]) == why([cause, peer]) == "OutOfMemoryError: Output 0 of Split is a view"
    assert why([peer]).startswith("RuntimeError: [gloo")
    assert why([""]) == "it ended without an error message"


def test_the_sentence_of_a_failure_names_no_folder_and_no_port_of_this_machine():
    said = "ImportError: no 'x' from 'torch.y' (/home/me/.venv/lib/python3.11/site-packages/torch/y.py)"
    assert why([said]) == "ImportError: no 'x' from 'torch.y' (y.py)"
    address = "RuntimeError: see https://pytorch.org/docs/stable/x.html or torch/nn/y"
    assert why([address]) == address
    assert (
        why(["ValueError: two options, \\x1b[1mdo this\\x1b[0m, or \x1b[1mthat"])
        == "ValueError: two options, do this, or that"
    )


@pytest.mark.parametrize(
    ("release", "strategy", "mode", "pulls"),
    [
        ("0.18.2", "zero2", "fp32", {7718, 7724, 7829}),
        ("0.18.2", "zero2", "one micro-batch", {7829}),
        ("0.17.5", "zero2", "fp32", {7724, 7829}),
        ("0.18.9", "zero1", "fp32 accumulation", {7985}),
        ("0.18.9", "zero1", "bf16", set()),
        ("0.19.3", "zero1", "clipping unset", {8068}),
        ("0.19.2", "deepspeed-pipeline", "fp32", {8154}),
        ("0.19.8", "zero3", "fp32", set()),
    ],
)
def test_which_change_upstream_explains_a_cell(release, strategy, mode, pulls):
    explaining = [change for change in CHANGES if change.concerns(release, strategy, MODE[mode])]
    assert {pull for change in explaining for pull in change.pulls} == pulls


def test_every_mode_of_a_strategy_changes_its_json():
    config = {"zero_optimization": {"stage": 2}}
    others = ("pipeline clipping", "fp16 overflow")  # small programs train these, without the JSON
    modes = [mode for mode in MODES if not mode.resumes and not mode.shape and mode.name not in others]
    made = {mode.name: json.dumps(deepspeed_json(config, "zero2", mode)) for mode in modes}
    assert len(set(made.values())) == len(made)
    assert config == {"zero_optimization": {"stage": 2}}
    assert "gradient_clipping" not in json.loads(made["clipping unset"])


def cell(release: str, verdict: str, strategy: str = "zero2", mode: str = "fp32", **fields: object) -> dict:
    empty = {"iteration": None, "quantity": "", "times": None, "sentence": ""}
    made = {"release": release, "strategy": strategy, "mode": mode, "verdict": verdict, "torch": "2.13.0+cpu"}
    return empty | made | {"python": "3.11.7", "seconds": 1.0, "code": "c"} | fields


CELLS = [
    cell("0.18.0", WRONG, iteration=1, quantity="gradient norm", times=70000.0),
    cell("0.18.2", WRONG, iteration=1, quantity="gradient norm", times=70000.0),
    cell("0.18.2", RIGHT, mode="one micro-batch"),
    cell("0.18.2", RIGHT, mode="bf16"),
    cell("0.18.3", RIGHT),
    cell("0.18.9", DOES_NOT_RUN, sentence="RuntimeError: Output 0 of <Split> is a view"),
]


@pytest.fixture
def all_is_shown(monkeypatch):
    """As if a file had shown every wrong cell."""
    monkeypatch.setattr(changes, "is_shown", lambda *_: True)


@pytest.mark.usefixtures("all_is_shown")
def test_a_wrong_cell_says_where_it_first_differs(tmp_path):
    place = "first in iteration 1, gradient reduced over the ranks, lm_head.bias, ranks 0, 1"
    wrong = {"iteration": 1, "quantity": "gradient norm", "times": 70000.0}
    located = [cell(release, WRONG, **wrong, where=place) for release in ("0.18.1", "0.18.2")]
    measured = "gradient norm off by 35 % from iteration 1 on"
    tables.write_pages(tmp_path, [*located, cell("0.18.3", WRONG, **wrong), cell("0.18.4", RIGHT)])
    text = (tmp_path / "ledger.md").read_text()
    assert f"| ZeRO-2 | fp32 | 0.18.1..0.18.3 | {measured}; {place} | 0.18.4 |" in text
    untraced = [one | {"where": "it cannot be traced: an error"} for one in located]
    tables.write_pages(tmp_path, untraced)
    assert f"| {measured} | no later release that was tried |" in (tmp_path / "ledger.md").read_text()


def asked(cells: list[dict], library: str, release: str, strategy: str, path, **run: object) -> LedgerAnswer:
    """What a launcher is told, by these cells."""
    path.write_text(gate.in_lines(cells))
    return look_up(library, release, strategy, **run, path=path)


def test_cells_that_are_not_measured_again_stay(tmp_path):
    path = tmp_path / "cells.json"
    tables.write_cells(path, CELLS)
    assert tables.read(path) == CELLS
    again = cell("0.18.3", WRONG, iteration=1, quantity="loss", times=9.0)
    assert tables.merged(CELLS, [again]) == [*CELLS[:4], again, CELLS[5]]
    path.write_text("[1]")
    with pytest.raises(Problem, match="is no ledger"):
        tables.read(path)


def test_launchers_and_the_picture_leave_out_options_that_no_launcher_sets(tmp_path):
    option = cell("0.18.2", WRONG, "zero3", "all-reduce fetch", iteration=1, quantity="loss", times=9.0)
    cells = [option, cell("0.18.2", RIGHT, "zero3")]
    tables.write_pages(tmp_path, cells)
    told = asked(cells, "deepspeed", "0.18.2", "zero3", tmp_path / "list", precision="fp32", micro_batches=8)
    assert told.verdict == RIGHT
    picture = (tmp_path / "ledger.svg").read_text()
    partly = f'fill="{pictures.COLOURS[pictures.PARTLY_TRIED]}"><title>0.18.2: 1 of 7 modes right, 6 not tried or not'
    assert partly in picture and pictures.COLOURS[WRONG] not in picture
    assert "<title>0.18.3: not tried</title>" in picture and pictures.NOT_TRIED in picture


@pytest.mark.usefixtures("all_is_shown")
def test_a_picture_shows_each_way_in_which_the_trainer_was_tried(tmp_path):
    """What stands on no file of plain PyTorch is not shown, like what was not tried."""
    fields = {"iteration": 1, "quantity": "gradient norm", "times": 9.0, "beside": "accelerate 1.15.0"}
    wrong = cell("5.2.0", WRONG, "trainer", "equal targets", **fields)
    share = cell("5.2.0", BY_ITS_SHARE, "trainer", "last window", **fields)
    failed = cell("5.3.0", DOES_NOT_RUN, "trainer", "bart", sentence="an error", beside="accelerate 1.15.0")
    tables.write_pages(tmp_path, [wrong, share, failed])
    picture = (tmp_path / "trainer.svg").read_text()
    for verdict, title in (
        (WRONG, "equal targets in 5.2.0: wrong"),
        (RIGHT, f"last window in 5.2.0: {BY_ITS_SHARE}"),
        (DOES_NOT_RUN, "bart in 5.3.0: does not run"),
    ):
        assert f'fill="{pictures.COLOURS[verdict]}"><title>{title}</title>' in picture
    assert f'fill="{pictures.NOT_TRIED}"><title>equal targets in 5.3.0: not tried</title>' in picture
    assert not (tmp_path / "ledger.svg").exists()


@pytest.mark.usefixtures("all_is_shown")
def test_the_page(tmp_path):
    tables.write_pages(tmp_path, CELLS)
    text = (tmp_path / "ledger.md").read_text()
    assert "gradient norm off by 35 % from iteration 1 on" in text and "DeepSpeed/issues/7718" in text
    assert "| 0.18.0 0.18.2 |" in text, "0.18.1 was not tried"
    assert "Tried: 0.18.0 0.18.2..0.18.3 0.18.9." in text


@pytest.mark.parametrize(
    ("release", "micro_batches", "precision", "verdict"),
    [
        ("0.18.2", 8, "fp32", WRONG),
        ("0.18.2+cu124", 8, "fp16", WRONG),
        ("0.18.2", 1, "fp32", RIGHT),
        ("0.18.2", 8, "bf16", RIGHT),
        ("0.18.1", 8, "fp32", WRONG),  # between two that are wrong
        ("0.18.3", 8, "fp32", RIGHT),
        ("0.18.4", 8, "fp32", UNKNOWN),
        ("0.18.9", 8, "fp32", DOES_NOT_RUN),
        ("0.18.3", 8, "bf16", "not measured in bf16; right in fp32"),
        ("0.18.3", 8, "fp16", "not measured in fp16; right in fp32"),
        ("0.18.0", 8, "bf16", WRONG),
        ("0.18.3", 1, "fp32", UNKNOWN),
        ("0.20.0", 8, "fp32", UNKNOWN),
        ("no version", 8, "fp32", UNKNOWN),
    ],
)
def test_what_a_launcher_reads_in_it(tmp_path, release, micro_batches, precision, verdict):
    path = tmp_path / "list"
    path.write_text(gate.in_lines(CELLS))
    config = {"zero_optimization": {"stage": 2}, precision: {"enabled": True}}
    told = ask_ledger(release, config, micro_batches=micro_batches, path=path)
    assert told.verdict == verdict
    # Nothing is said of a mode that was not measured, only of a release.
    assert bool(told.said) == (RIGHT not in verdict and (release, micro_batches) != ("0.18.3", 1))


def test_the_committed_ledger_has_the_pinned_release_without_a_fault_that_a_launcher_meets():
    lines = (REPO_ROOT / "requirements.txt").read_text().splitlines()
    (pin,) = [line for line in lines if line.startswith("deepspeed==")]
    release = pin.partition("==")[2]
    assert release in RELEASES
    for strategy in ("zero1", "zero2", "zero3", "zero3_offload", "deepspeed-pipeline"):
        for precision in ("fp32", "bf16"):
            told = look_up("deepspeed", release, strategy, precision=precision, micro_batches=8)
            if strategy == "deepspeed-pipeline" and precision == "bf16":
                assert told.verdict == "not measured in bf16; right in fp32"  # with clipping
            else:
                assert told.verdict == RIGHT
            assert not told.said
        resumed = look_up("deepspeed", release, strategy, precision="bf16", micro_batches=8, resumes=True)
        assert resumed.verdict == ("not measured in bf16; right in fp32")


def test_what_is_made_of_the_cells_is_what_they_are_today():
    cells = tables.read(tables.CELLS)
    remedy = "write it again: python -m docs.make_generated"
    assert verdicts.RELEASES.read_text() == verdicts.in_lines(verdicts.shorten(cells)), remedy
    assert VERDICTS.read_text() == gate.in_lines([cell for cell in cells if not is_withdrawn(cell)]), remedy
    assert (tables.PAGES / "ledger.md").read_text() == tables.markdown(tables.in_order(cells)), remedy
    assert VERDICTS.stat().st_size <= 5000, "a launcher reads it before every run"


def test_an_answer_holds_every_cell_and_no_other():
    """Also: a span names tried releases alone."""
    left = {}
    for one in standing(tables.read(tables.CELLS)):
        library = library_of(one["strategy"])
        release = one["torch"].partition("+")[0] if library == "torch" else one["release"]
        left[library, release, one["torch"].partition("+")[0], one["strategy"], one["mode"]] = one["verdict"]
    for library, releases in published().items():
        for release in releases:
            for found in answer.found_of(library, release):
                beside = found.torch or release
                for strategy, modes in found.right.items():
                    for mode in modes:
                        assert left.pop((library, release, beside, strategy, mode)) == RIGHT
                for fault in found.faults:
                    for mode in fault["modes"]:
                        assert left.pop((library, release, beside, fault["strategy"], mode)) == fault["verdict"]
    assert not left


def test_the_launchers_refuse_what_they_refused():
    """Answers of the reader that this list replaced, for every release, strategy, precision and way of training.

    A release that had not been tried may have been since, and a precision that had not been measured. Resumed runs did
    not run in 0.14.5 and 0.15.4, whose torch.load refused what the native engine saved; today's saves it reads.
    """
    former = json.loads(Path(__file__).with_name("former_answers.json").read_text())
    tried = {library: json.loads(VERDICTS.read_text())[library]["tried"].split() for library in ("deepspeed", "torch")}
    compared = 0
    for row in former["rows"]:
        for run, (verdict, releases) in product(row["runs"], row["answers"].items()):
            library, words = ("torch", run.split()[1:]) if run.startswith("torch ") else ("deepspeed", run.split())
            strategy, precision, micro_batches, offload, resumes = words
            for release in releases.split():
                told = look_up(
                    library, release, strategy, precision=precision, micro_batches=int(micro_batches.replace("-", "1")),
                    offload=offload == "offload", resumes=resumes == "resumes",
                )  # fmt: skip
                was_tried_since = release in tried[library] and release not in former["tried"][library]
                was_tried_since |= verdict.startswith("not measured")
                was_tried_since |= resumes == "resumes" and release in ("0.14.5", "0.15.4")
                assert told.verdict == verdict or was_tried_since, (run, release, str(told))
                compared += 1
    assert compared == 7596


def test_the_data_keeps_its_schema():
    schema = json.loads(verdicts.SCHEMA.read_text())
    fields = schema["$defs"]["ReleaseFault"]["properties"]
    assert answer.read()["faults"]
    for fault in answer.read()["faults"]:
        assert fault.keys() <= fields.keys()
    assert "not a number" in fields["off_by"]["description"]


SPANS = re.compile(r"(?<![\d.])(\d+(?:\.\d+)+)\.\.(\d+(?:\.\d+)+)")
LEFT_OUT = re.compile(r"\(([^()]*) not tried\)|^Not tried: (.*)\.$", re.MULTILINE)


def false_spans(text: str) -> list[str]:
    """The spans in which a release was not tried, but for those that say so, and what is called not tried but was."""
    found = []
    tried: dict[str, set[str]] = {}
    for measured in answer.read()["measured"]:
        tried.setdefault(measured["software"], set()).update(measured["releases"])
    for match in LEFT_OUT.finditer(text):
        spans = match[1] or match[2]
        for library, known in published().items():
            named = [each for each in spans.split() if each.partition("..")[0] in known]
            found += [f"not tried: {each}" for each in releases_in(" ".join(named), library) if each in tried[library]]
    for match in SPANS.finditer(LEFT_OUT.sub("", text)):
        ends = {match[1], match[2]}
        if not any(end.count(".") == 2 or any(end in known for known in published().values()) for end in ends):
            continue  # numbers of another kind
        libraries = [library for library, known in published().items() if ends <= set(known)]
        if not any(set(releases_in(match[0], library)) <= tried[library] for library in libraries):
            found.append(match[0])
    return found


def test_no_page_and_no_answer_has_a_span_without_trials(capsys):
    pages = [*tables.PAGES.iterdir(), verdicts.RELEASES, VERDICTS, tables.PAGES.parent / "README.md"]
    pages += [path for path in (REPO_ROOT / "docs" / "generated").iterdir() if path.suffix in (".md", ".html")]
    for path in pages:
        assert not false_spans(path.read_text()), path
    for library, releases in published().items():
        for release in releases:
            main(["ledger", "--answer", f"{library}=={release}", "--modes"])
            assert not false_spans(capsys.readouterr().out), release


def test_a_span_without_trials_is_noticed(monkeypatch):
    """The test above would have found what a page once said of sixteen releases that were tried of a hundred."""
    measured = [
        each | {"releases": list(RELEASES_OF["transformers"])} if each["software"] == "transformers" else each
        for each in answer.read()["measured"]
    ]
    with monkeypatch.context() as patch:
        patch.setattr(answer, "read", lambda: {"measured": measured})
        assert false_spans("Trainer, DDP, equal targets: right in 4.42.4..5.24.0") == ["4.42.4..5.24.0"]
    assert false_spans("right again in 0.19.3 (0.18.5..0.18.6 not tried)") == ["not tried: 0.18.5", "not tried: 0.18.6"]
    assert not false_spans("0.18.0..0.18.2 in [1.5..2.5], right again in 0.18.3")


@pytest.mark.parametrize(
    ("releases", "spans"),
    [
        ([], ""),
        (["0.18.0"], "0.18.0"),
        (["0.18.0", "0.18.1", "0.18.2"], "0.18.0..0.18.2"),
        (["0.17.6", "0.18.0", "0.18.2", "0.18.4"], "0.17.6..0.18.0 0.18.2 0.18.4"),
        (["0.18.0", "0.99.0", "0.99.1"], "0.18.0 0.99.0 0.99.1"),
    ],
)
def test_spans_of_releases(releases, spans):
    assert spans_of(releases, "deepspeed") == spans
    assert releases_in(spans, "deepspeed") == releases


@given(st.sampled_from(sorted(published())), st.data())
def test_a_span_is_what_it_was_made_of(library, data):
    releases = data.draw(st.sets(st.sampled_from([*published()[library], "99.0", "99.1"])))
    assert sorted(releases_in(spans_of(sorted(releases), library), library)) == sorted(releases)


@pytest.mark.parametrize(
    ("off_by", "words"),
    [(0.56, "off by 56 %"), (0.00078, "off by 0.078 %"), (1.0, "2 times as large"), (68000.0, "68,000 times as large")],
)
def test_a_difference_in_words(off_by, words):
    assert size_in_words(off_by) == words
    assert size_in_words(None) == "not a number"


@pytest.mark.parametrize(
    ("words", "status", "first"),
    [
        (["0.19.8"], 0, "0.19.8: right in every mode that the launchers use"),
        (["0.17.6", "--strategies", "zero2"], 1,
         "do not use 0.17.6: ZeRO-2 trains another model with more than one micro-batch; take 0.19.8"),
        (["0.18.2", "--strategies", "zero3_offload"], 0, "0.18.2: right in every mode that the launchers use"),
        (["0.18.9", "--strategies", "zero1"], 1, "0.18.9: ZeRO-1 does not run; take 0.19.8"),
        (["torch==2.8.0+cu128"], 1, "do not use torch 2.8.0: FSDP2 trains another model; take 2.15.0"),
        (["torch==2.13.0"], 0, "torch 2.13.0: right in every mode that the launchers use"),
        (["torch==2.7.1"], 3, "torch 2.7.1: right in 1 of the 24 ways in which launchers train; not tried: fp32 (Ten"),
        (["0.99"], 3, "0.99: not tried; the newest that was: 0.19.8"),
        (["v0.18.2", "--strategies", "zero3_offload"], 0, "0.18.2: right in every mode that the launchers use"),
        (["torch 2.13.0"], 0, "torch 2.13.0: right in every mode that the launchers use"),
        (["0.18.2rc1"], 3, "0.18.2rc1: not tried; the newest that was: "),
        (["4.45.2"], 3, "4.45.2: not tried; deepspeed had no such release when this was written, but transformers had"),
        (["0.13.5"], 3, "0.13.5: not tried; the "),
        (["transformers==99.0"], 3, "transformers 99.0: not tried; the newest that was: "),
    ],
)  # fmt: skip
def test_the_first_line_is_the_answer(capsys, words, status, first):
    assert main(["ledger", "--answer", *words]) == status
    assert capsys.readouterr().out.startswith(first)


def test_what_the_ledger_says_of_a_release(capsys, monkeypatch):
    main(["ledger", "--answer", "0.18.2", "--strategies", "zero2"])
    said = capsys.readouterr().out
    assert "gradient norm off by 75 % from iteration 1 on; right again in 0.18.3; deepspeed#7718" in said
    assert "--modes lists them" in said and "used twice" not in said and len(said.split()) < 200
    main(["ledger", "--answer", "0.18.2", "--strategies", "zero2", "--modes"])
    said = capsys.readouterr().out
    assert "deepspeed#7718: ZeRO-2 overwrites" in said and "several backward passes" in said
    main(["ledger", "--answer", "0.18.6", "--strategies", "zero2", "--modes"])
    said = capsys.readouterr().out
    assert "5.3 times as many operators as in 0.18.4, counted with a tiny T5 and ds_configs/ alone" in said
    main(["ledger", "--answer", "0.19.7", "--strategies", "zero3", "--modes"])
    assert "bytes in collectives" not in capsys.readouterr().out, "it was not counted"
    capsys.readouterr()
    # An empty word is what an unset variable of a shell leaves; without --answer, this would train for hours.
    for unknown, said in (
        ("apex==1.0", "no 'apex'"),
        ("newest", "such as 0.19.8"),
        ("", "'' is not a release"),
        ("torch", "such as torch=="),
        ("deepsped==0.18.2", "Did you mean deepspeed==0.18.2?"),
    ):
        assert main(["ledger", "--answer", unknown]) == 2
        assert said in capsys.readouterr().err
    installed = {"deepspeed": "0.19.8", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(answer, "installed", lambda: installed)
    assert main(["ledger", "--mine"]) == 0
    assert main(["ledger", "--mine"]) == 0 and "torch 2.13.0: right" in capsys.readouterr().out
    installed["accelerate"] = "99.0"
    assert main(["ledger", "--mine"]) == 3
    installed["deepspeed"] = "0.18.2"
    assert main(["ledger", "--mine"]) == 1


@pytest.mark.parametrize(
    ("faulty", "others", "said"),
    [
        (["fp32", "bf16"], ["one micro-batch"], "with more than one micro-batch"),
        (["fp32"], ["bf16"], "in 'fp32'"),
        (["bf16"], ["fp32"], "in bf16 with more than one micro-batch"),
        (["resume"], ["fp32"], "when it is resumed with more than one micro-batch"),
        (["fp32", "one micro-batch"], [], ""),
        (["encoder-decoder", "bart"], ["equal targets"], "with T5 and with BART"),
    ],
)
def test_when_a_release_is_wrong_says_no_more_than_was_tried(faulty, others, said):
    modes = [MODE[name] for name in faulty]
    assert answer.condition(modes, [*modes, *(MODE[name] for name in others)]) == said


def test_of_several_libraries_the_severest_answer_comes_first():
    installed = {"deepspeed": "0.19.8", "accelerate": "0.1", "torch": "2.8.0"}
    said, status = answer.answer(installed, ["zero1", "fsdp2", "accelerate"])
    firsts = [line for line in said.splitlines() if not line.startswith(" ")]
    assert status == 1 and firsts[0].startswith("do not use torch 2.8.0")
    assert firsts[1].startswith("accelerate 0.1: not tried") and firsts[2].startswith("0.19.8: right")


def test_it_answers_where_nothing_is_installed(tmp_path):
    """As `pip install packages/ledger` in an empty environment leaves it: this folder alone, no other package."""
    source = REPO_ROOT / "packages" / "ledger" / "src"
    words = [sys.executable, "-S", "-E", "-c", f"import sys; sys.path.insert(0, {str(source)!r})\n"
             "from t5bench_ledger.command import main; sys.exit(main())"]  # fmt: skip
    found = subprocess.run([*words, "--answer", "0.18.2"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 1 and found.stdout.startswith("do not use 0.18.2: "), found.stderr
    measuring = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert measuring.returncode == 2 and "In a clone of the repository" in measuring.stderr
    with subprocess.Popen([*words, "--answer", "0.18.2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as left:
        left.stdout.close()  # as head does
        assert left.stderr.read() == b""
    alone = subprocess.run([*words, "--mine"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert alone.returncode == 2 and "no library of the ledger is installed" in alone.stderr


@pytest.mark.nightly
def test_a_release_with_a_planted_mistake_is_found_and_the_installed_one_is_not_accused(tmp_path):
    """A loss of 1 % too little in a copy of the installed release, which is right without it."""
    (installed,) = find_spec("deepspeed").submodule_search_locations
    shutil.copytree(installed, tmp_path / "changed" / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    engine = tmp_path / "changed" / "deepspeed" / "runtime" / "engine.py"
    text, right = engine.read_text(), "loss / self.gradient_accumulation_steps() if scale_wrt_gas"
    assert text.count(right) == 1
    engine.write_text(text.replace(right, right.replace("()", "() / 1.01")))
    (tmp_path / "nothing").mkdir()
    few = ("--strategies", "zero2,zero3", "--modes", "fp32")
    honest = run_ledger(tmp_path / "output", tmp_path / "nothing", "--releases", "0.0.1", *few)
    changed = run_ledger(tmp_path / "output", tmp_path / "changed", "--releases", "0.0.2", *few, "--locate")
    assert honest.returncode == changed.returncode == 0, honest.stderr + changed.stderr
    cells = json.loads((tmp_path / "output" / "cells.json").read_text())["cells"]
    verdicts = {(one["release"], one["strategy"]): one for one in cells}
    assert [verdicts["0.0.1", name]["verdict"] for name in ("zero2", "zero3")] == [RIGHT, RIGHT]
    for name in ("zero2", "zero3"):
        wrong = verdicts["0.0.2", name]
        assert (wrong["verdict"], wrong["iteration"], wrong["quantity"]) == (WRONG, 1, "gradient norm")
        assert wrong["times"] > 100
        assert wrong["where"].startswith("first in iteration 1, backward pass, ") and wrong["where"].endswith(
            "ranks 0, 1"
        )
    assert verdicts["0.0.1", "zero2"]["where"] == ""
    again = run_ledger(tmp_path / "output", tmp_path / "nothing", "--releases", "0.0.1", *few)
    assert again.stderr.count("right (known)") == 2, again.stderr


@pytest.mark.nightly
def test_a_cell_that_hangs_and_a_release_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken" / "deepspeed").mkdir(parents=True)
    (tmp_path / "broken" / "deepspeed" / "__init__.py").write_text("raise ImportError('it lacks a symbol')\n")
    (tmp_path / "nothing").mkdir()
    few = ("--strategies", "zero1", "--modes", "fp32")
    broken = run_ledger(tmp_path / "output", tmp_path / "broken", "--releases", "0.0.1", *few)
    slow = run_ledger(tmp_path / "output", tmp_path / "nothing", "--releases", "0.0.2", *few, "--limit", "0.1")
    assert broken.returncode == slow.returncode == 0, broken.stderr + slow.stderr
    assert "does not run: ImportError: it lacks a symbol" in broken.stderr
    assert "hangs: it did not end within 0 s" in slow.stderr


@pytest.mark.parametrize("option", [("--strategies", "zero4"), ("--modes", "fp64")])
def test_unknown_names_are_refused(tmp_path, option):
    result = run_ledger(tmp_path / "output", tmp_path, *option)
    assert result.returncode == 2
    assert f"there is no {option[0][2:].rstrip('s').replace('strategie', 'strategy')} '{option[1]}'" in result.stderr


def test_every_strategy_of_a_mode_exists():
    assert {strategy for mode in MODES for strategy in mode.strategies} == set(STRATEGIES)
    assert isinstance(judge(REFERENCE, REFERENCE, "fp32"), CellVerdict)


@pytest.mark.usefixtures("all_is_shown")
def test_what_a_launcher_reads_of_torch(tmp_path):
    wrong = {"iteration": 1, "quantity": "gradient norm", "times": 200000.0}
    cells = [
        cell("", WRONG, "fsdp2", torch="2.8.0+cu128", **wrong),
        cell("", RIGHT, "fsdp2", "bf16", torch="2.8.0+cu128"),
        cell("", WRONG, "fsdp2", "resume", torch="2.9.1", **wrong),
        cell("", RIGHT, "fsdp2", torch="2.9.1"),
        *CELLS,
    ]
    tables.write_pages(tmp_path, cells)
    path = tmp_path / "list"

    def told(release: str, **run: object) -> str:
        return asked(cells, "torch", release, "fsdp2", path, **({"precision": "fp32"} | run)).verdict

    assert [told("2.8.0"), told("2.8.0", precision="fp16"), told("2.8.0", precision="bf16")] == [WRONG, WRONG, RIGHT]
    assert [told("2.9.1"), told("2.9.1", resumes=True), told("2.10.0"), told("")] == [RIGHT, WRONG, UNKNOWN, UNKNOWN]
    text = (tmp_path / "ledger.md").read_text()
    assert "### PyTorch" in text and "| FSDP2 | fp32 | 2.8.0 |" in text


# Run by each process of the ledger when it starts.
SUMMING = """
import torch.distributed.fsdp as fsdp

def summing(module, *others, right=fsdp.fully_shard, **named):
    right(module, *others, **named)
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)

fsdp.fully_shard = summing
"""


def columns_of(*words: str) -> list[tuple[str | None, str, set[str]]]:
    """Of each environment: torch, DeepSpeed, and the strategies that it trains."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    made = measure.columns(parser.parse_args(words))
    return [(column.torch, column.release, {strategy for strategy, _ in column.cells}) for column in made]


def test_every_release_has_an_environment_and_torch_one_without_deepspeed():
    assert columns_of("--releases", "0.18.2,0.19.8", "--strategies", "zero2,fsdp2") == [
        (None, "", {"fsdp2"}),
        (None, "0.18.2", {"zero2"}),
        (None, "0.19.8", {"zero2"}),
    ]
    assert columns_of("--torch", "2.8.0,2.15.0", "--strategies", "ddp,tensor") == [
        ("2.8.0", "", {"ddp", "tensor"}),
        ("2.15.0", "", {"ddp", "tensor"}),
    ]
    releases = "0.18.2,transformers==4.45.2,accelerate==1.2.1"
    assert columns_of("--releases", releases, "--strategies", "zero2,trainer,accelerate") == [
        (None, "0.18.2", {"zero2"}),
        (None, "4.45.2", {"trainer"}),
        (None, "1.2.1", {"accelerate"}),
    ]
    with pytest.raises(Problem, match="--releases has no 'apex'"):
        columns_of("--releases", "apex==1.0")
    with pytest.raises(NoAnswer, match="no torch is given"):
        columns_of("--torch", ",")


def test_what_is_known_starts_no_process(monkeypatch, tmp_path):
    (mode,) = (mode for mode in MODES if mode.name == "fp32")
    code = measure.code_digest("zero2", mode)
    known = [
        measure.Cell("0.19.8", "zero2", "fp32", RIGHT, None, "", 0.1, "", torch, "3.11.7", 1.0, code)
        for torch in (measure.metadata.version("torch"), "2.8.0+cu128")
    ]
    ledger = argparse.Namespace(output=tmp_path)
    monkeypatch.setattr(measure, "start_worker", lambda *_: pytest.fail("a process was started"))

    def trains(torch: str | None, release: str, known: list[measure.Cell]) -> None:
        column = measure.EnvironmentColumn(torch, release, [("zero2", mode)])
        measure.measure_column(ledger, column, tmp_path, measure.CellProgress(1), known, locates=False)

    trains(None, "0.19.8", known)
    trains("2.8.0", "0.19.8", known)
    changed = [replace(each, code="of other code") for each in known]
    for other_torch, release, cells in ((None, "0.19.8", changed), (None, "0.19.4", known), ("2.9.1", "0.19.8", known)):
        with pytest.raises(pytest.fail.Exception):
            trains(other_torch, release, cells)


def test_a_cell_is_trained_again_when_its_own_program_changes(monkeypatch, tmp_path):
    before = {name: measure.code_digest(strategy, MODE[name]) for name, strategy in
              (("equal targets", "trainer"), ("frozen", "zero1"), ("fp32", "zero1"))}  # fmt: skip
    assert len(set(before.values())) == 3
    changed = tmp_path / "trainers.py"
    changed.write_text(measure.TRAINERS_PROGRAM.read_text() + "# changed")
    monkeypatch.setattr(measure, "TRAINERS_PROGRAM", changed)
    assert measure.code_digest("trainer", MODE["equal targets"]) != before["equal targets"]
    assert measure.code_digest("zero1", MODE["frozen"]) == before["frozen"]
    in_other_words = replace(MODE["frozen"], meaning="said otherwise", when="then")
    assert measure.code_digest("zero1", in_other_words) == before["frozen"]


@pytest.mark.slow
@pytest.mark.nightly
def test_strategies_without_deepspeed_are_compared_with_ddp_and_that_with_one_process(tmp_path):
    """With gradients that FSDP2 adds up but does not divide, as torch 2.8.0 does on a CPU, in place of FSDP2's."""
    few = ("--strategies", "ddp,hybrid,fsdp2", "--modes", "fp32")
    honest = run_ledger(tmp_path / "output", tmp_path, *few)
    assert honest.returncode == 0, honest.stderr
    cells = json.loads((tmp_path / "output" / "cells.json").read_text())["cells"]
    assert {(cell["strategy"], cell["release"]): cell["verdict"] for cell in cells} == {
        ("ddp", ""): RIGHT,
        ("hybrid", ""): RIGHT,
        ("fsdp2", ""): RIGHT,
    }
    assert not (tmp_path / "output" / "ledger.svg").exists(), "the picture is DeepSpeed's"
    (tmp_path / "sitecustomize.py").write_text(SUMMING)
    wrong = run_ledger(tmp_path / "wrong", tmp_path, *few, "--locate", first_folder=tmp_path)
    assert wrong.returncode == 0, wrong.stderr
    found = "fsdp2 fp32  wrong from iteration 1 on: gradient norm 2 times as large"
    assert f"{found}; first in iteration 1, gradient reduced over the ranks, " in wrong.stderr


def test_fp32_without_a_fault_is_no_answer_for_fp16_and_without_clipping_none_for_a_pipeline(tmp_path):
    pipeline = "deepspeed-pipeline"
    cells = [
        *CELLS,
        cell("0.18.3", RIGHT, "zero1"),
        cell("0.18.3", DOES_NOT_RUN, "zero1", "fp16 overflow", sentence="it overflows"),
        cell("0.18.3", RIGHT, pipeline),
        cell("0.19.8", RIGHT, pipeline),
        cell("0.19.8", RIGHT, pipeline, "pipeline clipping"),
    ]

    def told(release: str, strategy: str, precision: str) -> str:
        return asked(
            cells, "deepspeed", release, strategy, tmp_path / "list", precision=precision, micro_batches=8
        ).verdict

    assert told("0.18.3", "zero2", "fp16") == "not measured in fp16; right in fp32"
    assert [told("0.18.3", "zero1", name) for name in ("fp32", "fp16")] == [RIGHT, DOES_NOT_RUN]
    assert [told(release, pipeline, "fp32") for release in ("0.18.3", "0.19.8")] == [UNKNOWN, RIGHT]
    assert told("0.19.8", pipeline, "bf16") == "not measured in bf16; right in fp32"


def counted(release: str, calls: dict[str, int], operators: int = 10, gathered: int = 0) -> Cost:
    collectives = [{"phase": "forward", "kind": "allgather_base", "ranks": 2, "bytes": gathered, "count": 3}]
    counts = {
        "operators": {"forward": operators},
        "copies": {},
        "copied_bytes": {},
        "collectives": collectives if gathered else [],
        "deepspeed_calls": calls,
        "tensor_bytes": 1 << 20,
        "peak_bytes": 1 << 20,
    }
    return Cost(release, "zero2", "fp32", counts)


def test_what_a_release_changed(tmp_path):
    before = counted("0.9.0", {"engine.py:step": 4, "utils.py:old": 1})
    after = counted("0.10.0", {"engine.py:step": 4, "stage.py:hook": 400}, operators=12, gathered=1 << 20)
    changed = [str(change) for change in costs.differences(before.figures, after.figures)]
    assert changed == [
        "operators in forward 10 -> 12",
        "calls of DeepSpeed's Python 5 -> 404",
        "allgather_base 0 -> 3",
        "MiB in allgather_base 0.00 -> 3.00",
    ]
    assert [change.figure for change in costs.functions(before, after)] == ["stage.py:hook", "utils.py:old"]
    failed = Cost("0.11.0", "zero2", "fp32", {}, "ImportError: it lacks a symbol")
    data, page = tmp_path / "costs.json", tmp_path / "costs.md"
    costs.write(data, page, [after, failed, before], "2.13.0")
    text = page.read_text()
    assert "| 0.9.0 -> 0.10.0 | ZeRO-2 | operators 10 -> 12 (+20%);" in text and "`stage.py:hook` 0 -> 400" in text
    assert "| ZeRO-2 | fp32 | 0.11.0 | ImportError: it lacks a symbol |" in text and "0.10.0 -> 0.11.0" not in text
    rows = json.loads(data.read_text())["costs"]
    assert [row["release"] for row in rows] == ["0.9.0", "0.10.0", "0.11.0"]
    costs.write(data, page, [before, counted("0.9.1", before.counts["deepspeed_calls"])], "2.13.0")
    assert "0.9.0 ->" not in page.read_text(), "what changed nothing has no row"


def test_the_most_memory_that_is_held_at_one_time():
    storages = LiveStorages(1024)
    kept = torch.zeros(1024)
    storages.see([kept, kept.view(32, 32), torch.zeros(8)])
    assert storages.bytes == 4096, "a view holds nothing of its own, and small ones are left out"
    storages.see(torch.zeros(2048))
    assert (storages.bytes, storages.peak) == (4096, 12288), "the second was freed at once"
    kept.untyped_storage().resize_(1024)
    storages.see(kept[:8])
    assert (storages.bytes, storages.peak) == (1024, 12288)
    del kept
    assert storages.bytes == 0


def test_an_increase_lasts_until_a_release_is_without_it():
    values = {"0.1": 100, "0.2": 109, "0.3": 300, "0.4": 290, "0.5": 340, "0.9": 105, "0.10": 130}
    found = [
        (each.before, each.releases, each.mended_in, each.times)
        for each in costs.increases_of("zero2", "operators", values)
    ]
    assert found == [
        ("0.2", "0.3 0.4 0.5", "0.9", 2.8),
        ("0.4", "0.5", "0.9", 1.17),
        ("0.9", "0.10", "", 1.24),
    ]
    rows = [
        {
            "release": release,
            "strategy": "zero2",
            "mode": mode,
            "totals": {"operators": value, "bytes in collectives": 8},
        }
        for mode in ("fp32", "bf16")
        for release, value in values.items()
    ]
    assert [each.modes for each in costs.increases(rows)] == [["fp32", "bf16"]] * 3


@pytest.mark.slow
def test_a_release_counts_the_same_twice_and_a_planted_copy_is_seen(tmp_path):
    """A clone of each gradient that ZeRO-2 does not need, in a copy of the installed release."""
    (installed,) = find_spec("deepspeed").submodule_search_locations
    shutil.copytree(installed, tmp_path / "changed" / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    engine = tmp_path / "changed" / "deepspeed" / "runtime" / "engine.py"
    text, scaled = engine.read_text(), "loss / self.gradient_accumulation_steps() if scale_wrt_gas"
    assert text.count(scaled) == 1
    engine.write_text(text.replace(scaled, scaled.replace("loss /", "loss.clone() /")))
    (tmp_path / "nothing").mkdir()
    figures = {}
    for name, folder in (("first", "nothing"), ("second", "nothing"), ("changed", "changed")):
        output = tmp_path / name
        few = ("--costs", "--releases", "0.0.1", "--strategies", "zero2")
        result = run_ledger(output, tmp_path / folder, *few, first_folder=tmp_path / folder)
        assert result.returncode == 0, result.stderr
        (of_fp32,) = [row for row in json.loads((output / "costs.json").read_text())["costs"] if row["mode"] == "fp32"]
        figures[name] = of_fp32["figures"]
    assert figures["first"] == figures["second"]
    changed = {
        change.figure: change.after - change.before
        for change in costs.differences(figures["first"], figures["changed"])
    }
    assert figures["first"]["bytes more at the peak"] > figures["first"]["bytes that tensors hold"], "its bucket"
    assert changed["copies"] == 4, "one for each micro-batch"
    assert changed["bytes copied"] == 16
