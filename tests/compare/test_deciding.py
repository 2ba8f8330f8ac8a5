"""What a comparison says to whoever must decide: which of equals to run, hours and money, and another recipe."""

from pathlib import Path

import pytest
from made_runs import make_run

from t5bench import __main__ as program
from t5bench.compare.comparison import Comparison, build
from t5bench.compare.recipe import RECIPE_RUNS, fastest_rows, sentence
from t5bench.costmodel.ties import TIES
from t5bench.record import records
from t5bench.report.tables import columns

ITERATIONS = 30


def sweep_of(
    folder: Path, times: dict[str, list[float]], memory: dict[str, list[float]] | None = None, **made: object
) -> list[Path]:
    """Interleaved repeats of strategies; times: milliseconds of an iteration, one for each repeat."""
    runs = []
    for repeat in range(len(next(iter(times.values())))):
        for place, (name, own) in enumerate(times.items()):
            start = 1e9 + 1000 * repeat + 100 * place
            of_name = {"memory_mib": memory[name]} if memory else {}
            directory = folder / f"repeat{repeat + 1}" / name
            strategy = name.partition("-")[0]
            runs.append(
                make_run(directory, strategy, elapsed_ms=[own[repeat]] * ITERATIONS, start=start, **of_name, **made)
            )
    return runs


def compared(runs: list[Path]) -> Comparison:
    return build([records.load(run) for run in runs])


EQUAL = {"ddp": [100, 99, 101], "zero1": [99, 100, 98], "zero2": [100, 98, 99.5]}


@pytest.mark.parametrize(
    ("memory", "named"),
    [
        ({"ddp": [9000, 9000], "zero1": [4000, 4000], "zero2": [6000, 6000]}, "zero1"),
        ({"ddp": [4200, 4200], "zero1": [6000, 6000], "zero2": [4000, 4000]}, "zero2"),
    ],
    ids=["least memory", "as many GiB: the faster"],
)
def test_of_rows_that_are_no_different_the_rule_for_ties_names_one(tmp_path: Path, memory: dict, named: str):
    verdict = compared(sweep_of(tmp_path, EQUAL, memory)).verdicts[0]
    assert "there is no clear difference" in verdict and verdict.endswith(f"take the one with {TIES}: {named}.")


def test_the_comparison_ends_with_the_command_of_the_row_to_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of a tie and of a winner; not where one run says nothing. The recipe was the comparison's, not the user's."""
    times = {"tie": (EQUAL, "zero1"), "winner": ({"ddp": [100, 101, 99], "zero1": [50, 51, 49]}, "zero1")}
    for name, (of_rows, taken) in times.items():
        sweep_of(tmp_path / name, of_rows, {"ddp": [9000, 9000], "zero1": [4000, 4000], "zero2": [6000, 6000]})
        assert program.main(["compare", str(tmp_path / name), "--output", str(tmp_path / "page")]) == 0
        _, line, _ = capsys.readouterr().out.rstrip().rsplit("\n", 2)
        assert line.endswith(f"bash scripts/run_megatron_t5_{taken}.sh") and "MODEL_PRESET" in line, line
        assert "DROPOUT=" not in line and "TRAIN_ITERS=" not in line, line
    sweep_of(tmp_path / "once", {"ddp": [100], "zero1": [50]})
    assert program.main(["compare", str(tmp_path / "once"), "--output", str(tmp_path / "page")]) == 0
    assert "To train with" not in capsys.readouterr().out


def test_a_clear_winner_needs_no_rule(tmp_path: Path):
    verdict = compared(sweep_of(tmp_path, {"ddp": [100, 101, 99], "zero1": [50, 51, 49]})).verdicts[0]
    assert "zero1 is the fastest" in verdict and TIES not in verdict


def test_hours_and_money_to_a_number_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In the table, on the page and for programs, at the measured rate."""
    sweep_of(tmp_path, {"ddp": [100, 100, 100], "zero1": [50, 50, 50]})
    program.main(["compare", str(tmp_path), "--tokens", "20e9", "--price", "2.5", "--format", "markdown"])
    shown = capsys.readouterr().out
    rate = 16 * (128 + 64) / 0.1  # tokens per second of ddp
    hours = 20e9 / rate / 3600
    assert "hours to 2e+10 tokens" in shown and "price at 2.5 an hour" in shown
    assert f"{hours:.0f} |" in shown and f"{hours * 2 * 2.5:.0f} |" in shown and f"{hours / 2:.1f} |" in shown
    page = (tmp_path / "comparison" / "index.html").read_text()
    assert "hours to 2e+10 tokens" in page and f"{hours:.0f}" in page
    row = compared(sorted(tmp_path.glob("repeat*/ddp"))).rows[0]
    assert row.tokens_per_second.median == pytest.approx(rate)
    program.main(["compare", str(tmp_path), "--format", "markdown"])
    assert "hours to" not in capsys.readouterr().out
    assert program.main(["compare", str(tmp_path), "--price", "2.5"]) == 2


def test_rows_of_other_micro_batches_are_compared(tmp_path: Path):
    """Each is a row of its own; a T5's curve depends on the size, so nothing is said of whether they train alike."""
    ddp = make_run(tmp_path / "ddp")
    large = make_run(tmp_path / "ddp-mb4", settings={"MICRO_BATCH_SIZE": "4"}, elapsed_ms=[50.0] * ITERATIONS)
    zero = make_run(tmp_path / "zero1-mb4", "zero1", settings={"MICRO_BATCH_SIZE": "4"})
    other = make_run(tmp_path / "zero2-mb2", "zero2", settings={"MICRO_BATCH_SIZE": "2"})
    comparison = compared([ddp, large, zero, other])
    rows = {row.label: row for row in comparison.rows}
    assert list(rows) == ["ddp (MICRO_BATCH_SIZE 1)", "ddp (MICRO_BATCH_SIZE 4)", "zero1", "zero2"]
    assert rows["zero1"].ratio.median == pytest.approx(0.5), "beside DDP of its own size"
    assert (rows["zero1"].parity.verdict, rows["zero2"].parity.why) == ("yes", "MICRO_BATCH_SIZE")
    assert "ddp (MICRO_BATCH_SIZE 4) was fastest" in comparison.verdicts[0]
    assert "MICRO_BATCH_SIZE: 1 (ddp); 4 (ddp, zero1); 2 (zero2)" in comparison.notes
    (column,) = [column for column in columns(comparison) if column.title == "micro-batch"]
    assert [column.text(row) for row in comparison.rows] == ["1", "4", "4", "2"]
    again = build([records.load(run) for run in (ddp, zero)], allowed=["MICRO_BATCH_SIZE"])
    assert len(again.rows) == 2, "which comparisons once needed"


def test_a_decoders_curve_is_compared_whatever_its_micro_batches_are(tmp_path: Path):
    """Without dropout, on the native engine: its samples have equally many targets, unless they are documents."""
    native = {"engine": "native", "family": "gpt"}
    of_4 = native | {"settings": {"MICRO_BATCH_SIZE": "4"}}

    def parity(name: str, **made: object) -> tuple[str, str]:
        ddp = make_run(tmp_path / name / "ddp", **native | {key: made[key] for key in made if key != "settings"})
        zero = make_run(tmp_path / name / "zero1", "zero1", **of_4 | made)
        found = compared([ddp, zero]).rows[1].parity
        return found.verdict, found.why

    assert parity("packed") == ("yes", "")
    assert parity("documents", extra_arguments=["--document-samples"]) == ("not shown", "MICRO_BATCH_SIZE")


RECIPE = {"settings": {"DROPOUT": "0.1", "CLIP_GRAD": "1"}}


@pytest.mark.parametrize(
    ("times", "answer"),
    [
        ({"zero1": [60, 61, 59], "ddp": [90, 91, 89]}, "zero1 is the fastest of these 2 rows, too: 1.50x ["),
        ({"zero1": [90, 91, 89], "ddp": [60, 61, 59]}, "zero1 is not the fastest: 0.67x ["),
        ({"zero1": [90, 60, 80], "ddp": [80, 90, 60]}, "whether zero1 is the fastest of these 2 rows is not clear: "),
    ],
    ids=["holds", "does not hold", "not clear"],
)
def test_whether_the_order_holds_with_another_recipe(tmp_path: Path, times: dict[str, list[float]], answer: str):
    own = compared(sweep_of(tmp_path, {"ddp": [100, 101, 99], "zero1": [50, 51, 49], "zero2": [99, 100, 101]}))
    again = compared(sweep_of(tmp_path / RECIPE_RUNS, times, **RECIPE))
    said = sentence(own, again)
    assert said.startswith(f"With DROPOUT=0.1 CLIP_GRAD=1 {answer}")
    assert "the speed of ddp (2.00x without)" in said and "zero2" not in said
    assert sentence(own, compared(sorted((tmp_path / RECIPE_RUNS).glob("*/ddp")))) == ""


def test_the_fastest_rows_are_those_of_one_number_of_processes(tmp_path: Path):
    times = {"ddp": [100.0], "zero1": [50.0], "zero2": [70.0], "zero3": [60.0]}
    runs = sweep_of(tmp_path, times)
    runs.append(make_run(tmp_path / "ddp-4", elapsed_ms=[55.0] * ITERATIONS, settings={"NPROC_PER_NODE": "4"}))
    assert [row.strategy for row in fastest_rows(compared(runs))] == ["zero1", "zero3", "zero2"]


def test_the_command_finds_the_runs_with_the_other_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """And does not take them for runs of the sweep."""
    sweep_of(tmp_path, {"ddp": [100, 101, 99], "zero1": [50, 51, 49]})
    sweep_of(tmp_path / RECIPE_RUNS, {"ddp": [100, 101, 99], "zero1": [50, 51, 49]}, **RECIPE)
    assert program.main(["compare", str(tmp_path), "--format", "markdown"]) == 0
    shown = capsys.readouterr().out
    assert "With DROPOUT=0.1 CLIP\\_GRAD=1 zero1 is the fastest of these 2 rows, too" in shown
    assert "With DROPOUT=0.1 CLIP_GRAD=1 zero1 is the fastest" in (tmp_path / "comparison" / "index.html").read_text()
