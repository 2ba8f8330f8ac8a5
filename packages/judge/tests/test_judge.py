"""Two trainings compared by their logs: what is read, what is said, and that nothing is guessed."""

import csv
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from t5bench_judge.__main__ import main
from t5bench_judge.columns import Names
from t5bench_judge.logs import read_log
from t5bench_judge.meanings import Meaning, meaning_of

STEPS = range(1, 21)
Row = dict[str, float]


def training(change: Callable[[Row], object] = lambda row: None) -> list[Row]:
    """A training's log lines: a falling loss, and norms that vary."""
    rows = []
    for step in STEPS:
        row = {"step": step, "loss": 5 + 3 / step + 1e-7 * math.sin(step), "grad_norm": 1.5 + math.sin(step) / 3}
        change(row)
        rows.append(row)
    return rows


def written(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """What `judge` says of a plain training and another: exit status and output."""

    def judge(other: list[Row], *options: str, plain: list[Row] | None = None) -> tuple[int, str]:
        first = written(tmp_path / "other.jsonl", other)
        second = written(tmp_path / "plain.jsonl", plain or training())
        status = main([str(first), str(second), *options])
        said = capsys.readouterr()
        return status, said.out + said.err

    return judge


def scaled(name: str, factor: float, begin: int = 1) -> Callable[[Row], object]:
    def change(row: Row) -> None:
        if row["step"] >= begin:
            row[name] *= factor

    return change


def all_of(*changes: Callable[[Row], object]) -> Callable[[Row], object]:
    def change(row: Row) -> None:
        for one in changes:
            one(row)

    return change


def not_a_number(row: Row) -> None:
    if row["step"] == 7:
        row["loss"] = math.nan


def test_equal_trainings(judged):
    noise = training(lambda row: row.update(loss=row["loss"] * (1 + 2e-7), grad_norm=row["grad_norm"] * (1 - 9e-7)))
    status, said = judged(noise)
    assert (status, said) == (0, "EQUAL: 20 steps, bounds of fp32: loss 5e-06, norm 5e-06, relative\n")


@pytest.mark.parametrize(
    ("change", "likely"),
    [
        (scaled("grad_norm", 8), "the gradient norm is 8 times the second's at the first step.*summed in one"),
        (scaled("grad_norm", 1 / 3), "1/3 of the second's"),
        (scaled("grad_norm", math.sqrt(2)), r"sqrt\(2\) times the second's.*not reduced"),
        (scaled("grad_norm", 1.07), "the norm alone"),
        (scaled("loss", 4), "the loss is 4 times the second's.*the sum, the other the mean"),
        (scaled("loss", 1.01), "the loss alone"),
        (all_of(scaled("loss", 1.01), scaled("grad_norm", 1.1)), "from the first step on: other weights"),
        (all_of(scaled("loss", 1.001, 2), scaled("grad_norm", 1.1, 2)), "agreement until step 2: the update"),
        (all_of(scaled("loss", 1.001, 2), scaled("grad_norm", 1.1)), "missing from plain.*those of other.*not reduced"),
        (all_of(scaled("loss", 1.001, 2), scaled("grad_norm", 0.3)), "missing from other.*those of plain.*not reduced"),
        (scaled("grad_norm", 1.07, 2), "the norm alone, and not at once.*not zeroed"),
        (all_of(scaled("loss", 1 + 1e-5, 3), scaled("loss", 1 + 2e-4, 6)), "agreement until step 3: the update"),
        (lambda row: scaled("loss", 1 + 1e-7 * 2 ** row["step"])(row), "a drift, which passes the bound at step 6"),
        (not_a_number, "other.jsonl is not a number at step 7"),
    ],
)  # fmt: skip
def test_a_difference_has_a_likely_cause(judged, change: Callable[[Row], object], likely: str):
    status, said = judged(training(change))
    (line,) = [line for line in said.splitlines() if line.startswith("likely: ")]
    assert status == 1 and said.startswith("DIFFERENT: 20 steps")
    assert re.search(likely, line), line


@pytest.mark.parametrize(
    ("change", "hides"),
    [
        (lambda row: row.pop("grad_norm"), "there is no gradient norm in other.jsonl and plain.jsonl: Adam divides"),
        (lambda row: row.update(loss=5.0), "the loss moves by only 0.0e+00: a dead model"),
        (lambda row: row.update(grad_norm=0.0), "every gradient norm is 0"),
        (lambda row: row.update(grad_norm=1.0), "every gradient norm is 1: it was probably logged after clipping"),
        (lambda row: row.update(loss=round(row["loss"], 3)), "the loss is logged with few digits"),
    ],
)
def test_what_two_equal_logs_may_hide(judged, change: Callable[[Row], object], hides: str):
    status, said = judged(training(change), plain=training(change))
    assert (status, said.partition(":")[0]) == (3, "NOT SHOWN")
    assert f"a mistake could hide: {hides}" in said


def test_a_rounded_log_is_given_its_rounding(judged):
    rounded = training(lambda row: row.update(loss=round(row["loss"], 6), grad_norm=round(row["grad_norm"], 6)))
    assert judged(rounded)[0] == 0
    assert judged(training(scaled("loss", 1 + 1e-5)), plain=rounded)[0] == 1


def test_lengths_and_intervals(judged):
    status, said = judged(training()[:12])
    assert status == 0 and "note: 8 steps are in one log alone, the first of them step 13" in said
    status, said = judged(training()[4::5])
    assert status == 0 and "one log has a line every 5 steps, the other every 1: the steps that both" in said
    later = training(lambda row: row.update(step=row["step"] + 100))
    status, said = judged(later)
    assert status == 2 and "the logs share no step: they have 101 to 120 and 1 to 20" in said
    assert "steps that both logs have: 2." in judged(training()[:2])[1]


def test_names_of_columns(judged, tmp_path: Path):
    renamed = [{"Iteration": row["step"], "lm loss": row["loss"], "Grad-Norm": row["grad_norm"]} for row in training()]
    assert judged(renamed)[0] == 0
    status, said = judged([row | {"train/loss": 1.0} for row in training()])
    assert status == 2 and "several columns that may be the loss: loss, train/loss" in said and "--loss NAME" in said
    path = written(tmp_path / "own.jsonl", [{"n": 1, "objective": 5.0}])
    assert main([str(path), str(path)]) == 2
    both = [{"n": row["step"], "objective": row["loss"], "length": row["grad_norm"]} for row in training()]
    assert judged(both, "--loss", "objective", "--norm", "length", "--step", "n", plain=both)[0] == 0
    status, said = judged([*training(), {"step": 20, "loss": 9.0}])
    assert status == 2 and "two values of loss at step 20" in said and "one rank and one attempt" in said


def test_bf16_has_its_own_bounds(judged):
    near = training(all_of(scaled("loss", 1.001), scaled("grad_norm", 1.01)))
    assert (judged(near)[0], judged(near, "--precision", "bf16")[0]) == (1, 0)


def test_json_is_for_programs(judged):
    status, said = judged(training(scaled("grad_norm", 8)), "--json")
    found = json.loads(said)
    (difference,) = found["differences"]
    assert (status, found["verdict"], difference["what"], difference["step"]) == (1, "different", "gradient norm", 1)


# ---- the kinds of logs

LOGS = Path(__file__).parent / "logs"
FEW_DIGITS = "is logged with few digits"
NO_NORM = "there is no gradient norm in"
SAYS_NO_STEP = "says no step: its lines are counted"
IN_OTHER_UNITS = "compared line by line, because the logs count steps in other units"
NO_PRETRAINING = "a loss of reinforcement learning, which is no pretraining loss: it depends on what was sampled"
# What trainers and people write of one training, with what judge says of it beside plain.jsonl.
SHAPES = {
    "a-row-for-each-metric.csv": (0, "EQUAL: 12 steps"),
    "array.json": (0, "EQUAL: 12 steps"),
    "axolotl.log": (0, SAYS_NO_STEP),
    "blanks.txt": (0, "EQUAL: 12 steps"),
    "bpb.jsonl": (2, "but a perplexity or a number of bits, which has fewer digits of the loss (train/bpb)"),
    "build-nanogpt.log": (3, FEW_DIGITS),
    "camel.json": (0, "EQUAL: 12 steps"),
    "clu.log": (0, "EQUAL: 12 steps"),
    "columns.json": (0, "EQUAL: 12 steps"),
    "comet.csv": (0, "EQUAL: 12 steps"),
    "compose.log": (0, "EQUAL: 12 steps"),
    "composer.log": (3, FEW_DIGITS),
    "deepspeed-monitor": (0, IN_OTHER_UNITS),
    "deepspeed-timers.log": (2, "says a loss: they say logging.py, Rank, step, skipped, lr"),
    "deepspeed.log": (3, NO_NORM),
    "detectron2.log": (3, FEW_DIGITS),
    "docker.log": (0, "EQUAL: 12 steps"),
    "espnet.log": (0, SAYS_NO_STEP),
    "evaluations-alone.log": (2, "has no training loss, but an evaluation's loss (eval loss)"),
    "evaluations-between.log": (0, "EQUAL: 12 steps"),
    "every-third.jsonl": (0, "EQUAL: 4 steps"),
    "excel.csv": (0, "EQUAL: 12 steps"),
    "fairseq-simple.log": (3, "loss is read as the loss, and not nll_loss"),
    "fairseq.log": (3, FEW_DIGITS),
    "gan.csv": (2, "but the loss of one of two networks that train against each other (loss_G, loss_D)"),
    "imagenet.log": (3, NO_NORM),
    "keras-epochs.csv": (3, SAYS_NO_STEP),
    "key-value.log": (0, "EQUAL: 12 steps"),
    "lightning-metrics.csv": (0, "compared as if shifted by one step"),
    "lightning-steps-and-epochs.csv": (0, "compared as if shifted by one step"),
    "lingua.jsonl": (0, "EQUAL: 12 steps"),
    "litgpt.log": (3, NO_NORM),
    "llamafactory.jsonl": (3, NO_NORM),
    "llm.c.log": (3, FEW_DIGITS),
    "maxtext.jsonl": (0, "compared as if shifted by one step"),
    "maxtext.log": (3, FEW_DIGITS),
    "means-of-three.jsonl": (0, "the loss of a line is the mean of its 3 steps"),
    "megatron-deepspeed.log": (0, "EQUAL: 12 steps"),
    "megatron-lm.log": (0, "EQUAL: 12 steps"),
    "megatron-moe.log": (0, "EQUAL: 12 steps"),
    "message.jsonl": (0, "EQUAL: 12 steps"),
    "mindformers.log": (3, FEW_DIGITS),
    "mindspore.log": (3, NO_NORM),
    "mlflow": (0, "EQUAL: 12 steps"),
    "mlperf.log": (3, NO_NORM),
    "mmengine.log": (3, FEW_DIGITS),
    "mnist.log": (3, IN_OTHER_UNITS),
    "modded-nanogpt-evaluations.txt": (2, "has no training loss, but an evaluation's loss (val_loss)"),
    "nan-in-both.jsonl": (1, "the gradient norm of nan-in-both.jsonl is not a number at step 3"),
    "nanochat.log": (3, FEW_DIGITS),
    "nanogpt.log": (3, NO_NORM),
    "nanotron.log": (3, FEW_DIGITS),
    "nemo-progress.log": (3, FEW_DIGITS),
    "nemo.log": (3, FEW_DIGITS),
    "numbers-alone.csv": (2, "has numbers alone, and no line that says what they are"),
    "olmo-core.log": (3, FEW_DIGITS),
    "olmo-wandb.csv": (3, NO_NORM),
    "olmo.log": (3, FEW_DIGITS),
    "openrlhf.csv": (2, NO_PRETRAINING),
    "pandas.json": (0, "EQUAL: 12 steps"),
    "perplexity.csv": (2, "which has fewer digits of the loss (perplexity)"),
    "pipes.md": (0, "EQUAL: 12 steps"),
    "plain.jsonl": (0, "both logs have the same numbers"),
    "plain.jsonl.gz": (0, "EQUAL: 12 steps"),
    "powershell.txt": (0, "EQUAL: 12 steps"),
    "resumed.jsonl": (0, "loss of steps 7 to 9 stand there twice, with values up to 1.0e-07 apart"),
    "rich.txt": (0, "EQUAL: 12 steps"),
    "semicolons.csv": (0, "EQUAL: 12 steps"),
    "smoothed.csv": (2, "but a smoothed or extreme value, and not a step's (loss_ema)"),
    "stable-baselines.csv": (3, "agree in it only if they sampled alike"),
    "summary-alone.json": (2, "has one line with a loss: a summary, no curve"),
    "summary-row.csv": (0, "EQUAL: 12 steps"),
    "swift.jsonl": (0, "EQUAL: 12 steps"),
    "tabs.tsv": (0, "EQUAL: 12 steps"),
    "tensorboard-scalar.csv": (2, "say so: --loss Value"),
    "torchtitan.log": (3, FEW_DIGITS),
    "tqdm.log": (3, NO_NORM),
    "trainer_state.json": (1, "the gradient norm of trainer_state.json is not a number at step 1"),
    "transformers-5-console.log": (0, SAYS_NO_STEP),
    "transformers-console.log": (0, SAYS_NO_STEP),
    "transformers-notebook.tsv": (0, "EQUAL: 12 steps"),
    "trl-ppo.jsonl": (2, NO_PRETRAINING),
    "two-ranks.log": (2, "has two values of loss at step 1"),
    "verl.log": (2, NO_PRETRAINING),
    "wandb-export.csv": (3, NO_NORM),
    "wandb-history.jsonl": (0, "EQUAL: 12 steps"),
    "xtuner.log": (3, FEW_DIGITS),
    "zero-based.jsonl": (0, "compared as if shifted by one step"),
}


def test_every_shape_has_an_answer():
    assert SHAPES.keys() == {path.name for path in LOGS.iterdir()}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_read_as_a_person_reads_it(name: str, capsys: pytest.CaptureFixture[str]):
    status, said = SHAPES[name]
    assert main([str(LOGS / name), str(LOGS / "plain.jsonl")]) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert "\x1b" not in printed.out + printed.err


def test_what_is_not_a_number_in_both_logs_is_no_difference(capsys: pytest.CaptureFixture[str]):
    for name in ("nan-in-both.jsonl", "trainer_state.json"):
        assert main([str(LOGS / name), str(LOGS / name)]) == 0
        assert "neither log has a number as gradient norm at step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        # One training lost its first step: a shift of what both count alike is no way of counting.
        (lambda rows: [row | {"step": row["step"] - 1} for row in rows[1:]], 1, "equal if shifted by one step"),
        # Counted from 0, and another training from its second step on.
        (
            lambda rows: [
                row | {"step": row["step"] - 1, "loss": row["loss"] + 0.01 * (row["step"] > 1)} for row in rows
            ],
            1,
            "agreement until step 2",
        ),
        # Two trainings in one file are no resumed one; the same one twice is.
        (lambda rows: [*rows, *[row | {"loss": 1.1 * row["loss"]} for row in rows]], 2, "two values of loss at step 1"),
        (lambda rows: [*rows, *rows], 0, "stand there twice, with the same values"),
        # Resumed from a checkpoint of another training.
        (lambda rows: [*rows[:15], *[row | {"loss": row["loss"] + 0.1} for row in rows[12:]]], 1, "step 13"),
        # Every fifth step, of another training.
        (lambda rows: [row | {"grad_norm": 2 * row["grad_norm"]} for row in rows[4::5]], 1, "2 times the second's"),
        (lambda rows: [row | {"loss": row["loss"] + 0.1} for row in rows[4::5]], 2, "neither the value of its step"),
    ],
)
def test_steps_that_are_counted_or_written_otherwise(judged, lines: Callable[[list], list], status: int, said: str):
    found, printed = judged(lines(training()))
    assert (found, said in printed) == (status, True), printed


@pytest.mark.parametrize(("digits", "changed", "status"), [(4, 1.0, 3), (4, 1.02, 1), (9, 1.0, 0)])
def test_a_log_of_so_many_digits_is_given_their_rounding(judged, digits: int, changed: float, status: int):
    """10.5098 is 10.51 there, and 9.8515 is 9.851: not one number of decimal places."""
    near = [row | {"loss": row["loss"] + 4, "grad_norm": row["grad_norm"]} for row in training()]
    short = [row | {"loss": float(f"{changed * row['loss']:.{digits}g}")} for row in near]
    assert judged(short, plain=near)[0] == status


def test_steps_in_other_units_are_compared_only_where_all_lines_agree(judged):
    of_samples = training(lambda row: row.update(step=1000 * row["step"]))
    assert judged(of_samples)[0] == 0
    status, said = judged([row | {"loss": 1.1 * row["loss"]} for row in of_samples])
    assert status == 2 and "the logs share no step" in said


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("train/CrossEntropyLoss", Meaning.LOSS),
        ("trainLoss", Meaning.LOSS),
        ("Training Loss [nats/token]", Meaning.LOSS),
        ("train_lm_xent", Meaning.LOSS),
        ("loss value", Meaning.LOSS),
        ("span_corruption_loss", Meaning.UNKNOWN_LOSS),
        ("heldout/nll", Meaning.EVALUATION),
        ("losses/qf1_loss", Meaning.REINFORCEMENT),
        ("loss/value_avg", Meaning.REINFORCEMENT),
        ("entropy_loss", Meaning.REINFORCEMENT),
        ("moe_load_balancing_loss", Meaning.PART),
        ("loss_running", Meaning.SMOOTHED),
        ("loss scale", Meaning.OTHER),
        ("grad_norm", Meaning.OTHER),
    ],
)
def test_the_words_of_a_name_say_what_it_means(name: str, meaning: Meaning):
    assert meaning_of(name) == meaning


def test_one_loss_of_an_unusual_name_is_read_with_a_note(judged):
    renamed = [
        {"step": row["step"], "span_corruption_loss": row["loss"], "gnorm": row["grad_norm"]} for row in training()
    ]
    status, said = judged(renamed)
    assert status == 0 and "span_corruption_loss, the only one that speaks of a training's loss, is read as" in said
    assert judged([row | {"other_task_loss": 1.0} for row in renamed])[0] == 2


def test_lower_precision_is_no_gradient_that_was_not_zeroed(judged):
    """Norms of parameters in bf16 differ by some parts in a thousand, after the first update."""
    status, said = judged(training(scaled("grad_norm", 1.002, 2)))
    assert status == 1 and "in a lower precision, such as bf16" in said


def test_csv(tmp_path: Path):
    path = tmp_path / "log.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "loss", "grad_norm"])
        writer.writeheader()
        writer.writerows(training())
    assert read_log(path, Names()).curves.loss == {row["step"]: row["loss"] for row in training()}


def test_trainer_state(tmp_path: Path):
    """Of transformers' Trainer: evaluations and the last summary are no steps of the training."""
    lines = [row | {"epoch": 0.1} for row in training()]
    lines += [{"step": 20, "eval_loss": 7.0}, {"step": 20, "train_loss": 6.1, "train_runtime": 12.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 20, "log_history": lines}))
    found = read_log(tmp_path, Names())
    assert found.source == "transformers"
    assert found.curves.norm == {row["step"]: row["grad_norm"] for row in training()} and len(found.curves.loss) == 20


def test_tensorboard(tmp_path: Path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for row in training():
            writer.add_scalar("train/loss", row["loss"], row["step"])
            writer.add_scalar("train/grad_norm", row["grad_norm"], row["step"])
    found = read_log(tmp_path, Names())
    assert found.curves.loss == pytest.approx({row["step"]: row["loss"] for row in training()}, rel=1e-7)
    assert found.curves.norm.keys() == found.curves.loss.keys()


def test_offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="any") as run:
        for row in training(lambda row: row.update(text="x" * 3000)):  # more than a block of the file
            run.log({"train/" + name: value for name, value in row.items() if name != "step"}, step=row["step"])
    (directory,) = tmp_path.glob("wandb/offline-run-*")
    for _ in range(100):  # W&B's own process writes the last block when the run has already ended
        found = read_log(directory, Names())
        if len(found.curves.loss) == len(training()):
            break
        time.sleep(0.1)
    assert found.curves.loss == {row["step"]: row["loss"] for row in training()}
    assert found.curves.norm == {row["step"]: row["grad_norm"] for row in training()}


def make_run(directory: Path, settings: dict[str, dict[str, str]], micro_batches: int = 4) -> Path:
    """A run directory of T5-Parallelism, as far as a judge reads it: the plan, and the lines with a resumed part."""
    directory.mkdir()
    lines = [{"iteration": row["step"], "lm_loss": row["loss"], "grad_norm": row["grad_norm"]} for row in training()]
    lines.insert(10, {"resumed_from": 10})
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    plan = {"settings_by_role": settings, "layout": {"micro_batches": micro_batches}}
    (directory / "node0.json").write_text(json.dumps({"plan": plan}))
    return directory


@pytest.mark.parametrize(
    ("recipe", "micro_batches", "status", "said"),
    [
        ({"CLIP_GRAD": "1.5", "SEED": "1"}, 4, 0, "EQUAL: 20 steps, bounds of fp32"),
        ({"CLIP_GRAD": "9"}, 4, 3, "CLIP_GRAD=9 clips the gradients of no iteration"),
        ({"CLIP_GRAD": "1.5"}, 1, 3, "an iteration has one micro-batch"),
    ],
)
def test_run_directories_are_judged_with_what_their_recipe_hides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: dict, micro_batches: int, status: int, said: str
):
    settings = {"model": {"PRECISION_FLAG": ""}, "recipe": recipe}
    first, second = (make_run(tmp_path / name, settings, micro_batches) for name in ("zero1", "ddp"))
    assert main([str(first), str(second)]) == status
    assert said in capsys.readouterr().out


def test_run_directories_say_their_precision_and_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = []
    for number, precision in enumerate(("--bf16", "--bf16", "--fp16")):
        settings = {"model": {"PRECISION_FLAG": precision}, "recipe": {"CLIP_GRAD": "1.5", "SEED": str(number)}}
        made.append(str(make_run(tmp_path / str(number), settings)))
    assert main(made[:2]) == 0
    said = capsys.readouterr().out
    assert "bounds of bf16" in said and "their settings differ: SEED is 0 and 1" in said
    assert main(made[1:]) == 2
    assert "in fp16, for which no bound was measured" in capsys.readouterr().err


def test_files_that_are_no_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plain = written(tmp_path / "plain.jsonl", training())
    for name, content in (("empty", b""), ("binary", bytes(range(256))), ("list", b"[1, 2]"), ("broken", b'{"loss": ')):
        path = tmp_path / name
        path.write_bytes(content)
        assert main([str(path), str(plain)]) == 2, name
        assert capsys.readouterr().err.startswith("error: "), name
    assert main([str(tmp_path / "none"), str(plain)]) == 2
    assert main([str(tmp_path), str(plain)]) == 2
