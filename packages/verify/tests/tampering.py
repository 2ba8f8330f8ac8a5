"""Ways of tampering with records, and what each is told."""

import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from made_runs import VOCABULARY, make_run, seal, stamp

from t5bench.costmodel.parameters import parameters
from t5bench.record import records
from t5bench.record.plan import by_name
from t5bench.record.records import load

Change = Callable[[Path], object]
LOG, METRICS, PART, SAMPLES = "node0.log", "metrics.jsonl", "node0.json", "node0.samples.jsonl"
DAY = 86_400
NOISE = random.Random(3)
TIMES = [100 + round(8 * NOISE.random(), 1) for _ in range(40)]
EVALUATIONS = [
    {"iteration": iteration, "samples": "validation", "lm_loss": 7.5, "perplexity": 1.808042e3}
    for iteration in (10, 20, 30, 40)
]


def header(run: Path, *texts: str) -> None:
    """Puts what an engine prints at first before the log."""
    part, log = json.loads((run / PART).read_text()), run / LOG
    log.write_text("".join(f"{part['started']} {text}\n" for text in texts) + log.read_text())


def arguments_of(run: Path) -> list[tuple[str, str]]:
    """The settings' names and numbers, as engines print them."""
    given = by_name(load_plan(run)["arguments"]["settings"])
    return [(name[2:].replace("-", "_"), value) for name, value in given.items() if value[:1].isdigit()]


def make_pristine(root: Path) -> Path:
    """A run of each engine on a CPU, one of two nodes with GPUs, and a short one, with what engines print at first."""
    watched = {
        "EVAL_INTERVAL": "10",
        "EVAL_ITERS": "2",
        "LR_WARMUP_ITERS": "8",
        "MIN_LR": "0.00001",
        "PROFILE_ITERATION": "25",
    }
    sampled: dict[str, Any] = {"sent_per_iteration": 1e6, "sample_seconds": 0.5}
    native = make_run(root / "native", elapsed_ms=TIMES, engine="native", settings=watched, **sampled)
    size = parameters(load(native).architecture)
    header(native, f"native engine: {size:,} parameters, TP=1 PP=1 DP=2, 8 micro-batches of 1,"
           f" vocabulary padded to {VOCABULARY}, torch.float32 on cpu, from iteration 0")  # fmt: skip
    log = native / LOG
    for entry in EVALUATIONS:
        text = f" validation loss at iteration {entry['iteration']} | lm loss value: 7.500000E+00 |"
        text += " lm loss PPL: 1.808042E+03 | "
        pattern = rf"^((\S+)  iteration +{entry['iteration']}/.*\n)"
        log.write_text(re.sub(pattern, rf"\1\2 {text}\n", log.read_text(), flags=re.MULTILINE))
    part = json.loads((native / PART).read_text())
    (native / PART).write_text(json.dumps(part | {"evaluations": EVALUATIONS}))
    rank = {"host": "node0", "wall_ms": 99.0, "parts": {"forward": 44.0, "backward": 55.0}}
    ranks = [rank | {"rank": number} for number in range(2)]
    (native / "profile.json").write_text(json.dumps({"iteration": 25, "ranks": ranks}))
    megatron = make_run(root / "zero1", "zero1", elapsed_ms=TIMES[::-1],
                        settings={"VOCABULARY_MULTIPLE": "64"})  # fmt: skip
    began = json.loads((megatron / PART).read_text())["started"].replace("T", " ")[:19]
    header(
        megatron,
        "using world size: 2, data-parallel-size: 2, sequence-parallel size: 1, tensor-model-parallel size: 1,"
        " pipeline-model-parallel size: 1 ",
        f" > padded vocab (size: 4196) with 28 dummy tokens (new size: {VOCABULARY})",
        f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {size}",
        f"[before the start of training step] datetime: {began} ",
    )
    records.write_json(megatron / "ds_config.json", load_plan(megatron)["ds_config"])
    gpus = make_run(root / "gpus", elapsed_ms=TIMES[7:] + TIMES[:7], nodes=2, gpu="NVIDIA A100", log_interval=2,
                    settings={"PRECISION_FLAG": "--bf16"}, **sampled)  # fmt: skip
    short = make_run(root / "short", "tensor", elapsed_ms=TIMES[:12], **sampled)
    zero2 = make_run(root / "zero2", "zero2", elapsed_ms=TIMES[3:15], **sampled)
    staged = make_run(root / "staged", "pipeline", elapsed_ms=TIMES[4:16], **sampled)
    slow = make_run(root / "slow", "zero3", elapsed_ms=[100 * time for time in TIMES[5:30]], **sampled | {
        "sample_seconds": 2.0})  # fmt: skip
    for run in (megatron, gpus, short, zero2, staged, slow):
        header(run, *(f"  {name} {'.' * 20} {value}" for name, value in arguments_of(run)))
    header(native, "native engine's arguments: " + " ".join(f"{name}={value}" for name, value in arguments_of(native)))
    for run in (native, megatron, gpus, short, zero2, staged, slow):
        seal(run)
    return root


def load_plan(run: Path) -> dict[str, Any]:
    return json.loads((run / PART).read_text())["plan"]


# ---- ways of tampering with one run ----------------------------------------------------------------------------------


def sub(name: str, pattern: str, to: str | Callable[[re.Match[str]], str], count: int = 0) -> Change:
    def change(run: Path) -> None:
        path = run / name
        text, done = re.subn(pattern, to, path.read_text(), count=count, flags=re.MULTILINE)
        assert done and text != path.read_text(), f"{name} has no {pattern}"
        path.write_text(text)

    return change


def also(*changes: Change) -> Change:
    return lambda run: [change(run) for change in changes]


def value(name: str, *path: str | int, to: Any) -> Change:
    def change(run: Path) -> None:
        content = place = json.loads((run / name).read_text())
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to(place[path[-1]]) if callable(to) else to
        (run / name).write_text(json.dumps(content))

    return change


def iteration_log(run: Path) -> str:
    """The last node's, which has the iterations."""
    return "node1.log" if (run / "node1.log").exists() else LOG


# The same figure in the log and in metrics.jsonl.
NAMES = {
    "elapsed_ms": r"elapsed time per iteration \(ms\)", "samples_per_second": "samples per second",
    "learning_rate": "learning rate", "lm_loss": "lm loss", "tflops": "TFLOPs", "loss_scale": "loss scale",
    "grad_norm": "grad norm", "skipped": "number of skipped iterations", "nan": "number of nan iterations",
}  # fmt: skip


def figure(name: str, to: Callable[[float], float], iterations: Sequence[int] = range(1000)) -> Change:
    """Another value in both files, in these iterations."""

    def in_log(match: re.Match[str]) -> str:
        is_meant = int(match["iteration"]) in iterations
        return f"{match['before']}{to(float(match['value'])) if is_meant else match['value']}"

    def in_metrics(match: re.Match[str]) -> str:
        content = json.loads(match[0])
        if content["iteration"] in iterations:
            content[name] = to(float(content[name]))
            content[name] = str(content[name]) if content[name] != content[name] else content[name]
        return json.dumps(content)

    log = rf"(?P<before> iteration +(?P<iteration>\d+)/.*\| {NAMES[name]}: )(?P<value>\S+)"
    return also(lambda run: sub(iteration_log(run), log, in_log)(run), sub(METRICS, "^.+$", in_metrics))


def faster(factor: float, iterations: Sequence[int] = range(1000)) -> Change:
    """As if each iteration had taken so much less time, with the rates that follow."""
    rates = [figure(name, lambda rate: rate * factor, iterations) for name in ("samples_per_second", "tflops")]

    def tokens(match: re.Match[str]) -> str:
        is_meant = int(match["iteration"]) in iterations
        return f"{match['before']}{float(match['value']) * factor if is_meant else match['value']}"

    pattern = r"(?P<before> iteration +(?P<iteration>\d+)/.*\(tgs\): )(?P<value>\S+)"
    return also(
        figure("elapsed_ms", lambda time: time / factor, iterations),
        *rates,
        lambda run: sub(iteration_log(run), pattern, tokens)(run),
    )


def setting(name: str, argument: str, to: str) -> Change:
    """Another setting wherever the plan says it."""

    def change(run: Path) -> None:
        part = json.loads((run / PART).read_text())
        plan = part["plan"]
        for values in plan["settings_by_role"].values():
            if name in values:
                values[name] = to
        words = plan["arguments"]["settings"]
        words[words.index(argument) + 1] = to
        (run / PART).write_text(json.dumps(part))

    return also(change, sub("node0.command.sh", rf"({argument} )\S+", rf"\g<1>{to}"))


def claimed(name: str, to: str) -> Change:
    """Another value of a setting, and nothing else."""

    def change(run: Path) -> None:
        part = json.loads((run / PART).read_text())
        (role,) = [role for role, values in part["plan"]["settings_by_role"].items() if name in values]
        assert part["plan"]["settings_by_role"][role][name] != to
        part["plan"]["settings_by_role"][role][name] = to
        (run / PART).write_text(json.dumps(part))

    return change


def profiled(factor: float) -> Change:
    """All times of the profile, times a factor."""

    def change(run: Path) -> None:
        content = json.loads((run / "profile.json").read_text())
        for rank in content["ranks"]:
            rank["wall_ms"] *= factor
            rank["parts"] = {name: factor * time for name, time in rank["parts"].items()}
        (run / "profile.json").write_text(json.dumps(content))

    return change


def moved(seconds: float) -> Change:
    """All times in the part, the log and the metrics."""

    def later(match: re.Match[str]) -> str:
        return stamp(records.reader.seconds(match[0]) + seconds)

    def change(run: Path) -> None:
        for name in (LOG, PART):
            path = run / name
            path.write_text(re.sub(r"20\d\d-\d\d-\d\dT[\d:.]+Z", later, path.read_text()))
        lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
        lines = [line | {"time": line["time"] + seconds} for line in lines]
        (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def squeezed(run: Path) -> None:
    """All lines' times at half their distance from the start."""
    start = records.reader.seconds(json.loads((run / PART).read_text())["started"])
    halve = lambda time: start + (time - start) / 2  # noqa: E731
    pattern = r"^20\d\d-\d\d-\d\dT[\d:.]+Z"
    sub(LOG, pattern, lambda match: stamp(halve(records.reader.seconds(match[0]))))(run)
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    lines = [line | {"time": round(halve(line["time"]), 3)} for line in lines]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def shorter(run: Path) -> None:
    """A run of 40 iterations that was cut to 30, as if that had been the plan."""
    setting("TRAIN_ITERS", "--train-iters", "30")(run)
    sub(LOG, r"/ +40 \|", "/      30 |")(run)
    sub(METRICS, '"total": 40', '"total": 30')(run)
    sub(METRICS, r'^.*"iteration": (3[1-9]|40),.*\n', "")(run)
    sub(LOG, r"^\S+  iteration +(3[1-9]|40)/.*\n", "")(run)
    sub(LOG, r"^.*validation loss at iteration 40.*\n", "")(run)
    value(PART, "evaluations", to=lambda found: found[:-1])(run)


def both_peaks(rank: int, **values: float) -> Change:
    """Another peak of a rank in the part and in the log."""

    def change(run: Path) -> None:
        for name, mib in values.items():
            word = {"host_mib": "host rss MiB", "device_mib": "allocated MiB"}[name]
            sub(LOG, rf"(rank {rank} \|.*{word} )[\d.]+", rf"\g<1>{mib}")(run)
            value(PART, "peak_memory", rank, name, to=mib)(run)

    return change


def copied(name: str, to: str, *changes: Change) -> Change:
    """Of the directory of all runs: one more, which is another with changes."""

    def change(run: Path) -> None:
        target = run.parent / to
        shutil.copytree(run.parent / name, target)
        for one in changes:
            one(target)
        seal(target)

    return change


def a_copy_with_times(factor: float) -> Change:
    return also(faster(1 / factor), figure("elapsed_ms", lambda time: round(time, 1)), moved(DAY))


HEADER = r"^(\S+ native engine: .*?)"
TAMPERINGS: dict[str, tuple[str, Change, str]] = {
    # ---- clocks
    "times 1.2 times faster": ("native", faster(1.2), "iterations .* took .* but their lines came"),
    "times twice as fast": ("zero1", faster(2), "iterations .* took .* but their lines came"),
    "times ten times faster": ("gpus", faster(10), "iterations .* took .* but their lines came"),
    "times 1.2 times slower": ("zero1", faster(1 / 1.2), "iterations .* took .* but their lines came"),
    "times 1.2 times faster in a run of 12 iterations": ("short", faster(1.2), "iterations .* took"),
    "the second half 1.3 times faster": ("zero1", faster(1.3, range(21, 41)), "iterations .* took"),
    "the last ten iterations ten times faster": ("zero1", faster(10, range(31, 41)), "iterations .* took"),
    "the first ten iterations twice as slow": ("zero1", faster(0.5, range(1, 11)), "iterations .* took"),
    "one iteration of ten seconds": ("zero1", faster(0.01, [7]), "iteration 7 took 10"),
    "lines that come at half their distance": ("zero1", squeezed, "iterations .* took"),
    "a start a year before": ("native", value(PART, "started", to="2024-11-21T04:40:00.000Z"), "s after the start"),
    "an end a year later": ("native", value(PART, "ended", to="2026-11-21T04:40:00.000Z"), "after the last line"),
    "everything seven minutes later": ("zero1", moved(420), "at another time than the engine's clock"),
    "a line from a minute before": (
        "zero1", sub(LOG, r"^(\S+)( +peak memory \| rank 1)", r"2025-11-21T04:00:00.000Z\2"), "before the line above"),
    # ---- rates and counts
    "tokens/s doubled": (
        "native", sub(LOG, r"(\(tgs\): )(\S+)", lambda m: f"{m[1]}{2 * float(m[2])}"), "tokens/s per process, but"),
    "tokens/s of one line": ("native", sub(LOG, r"(\(tgs\): )(\S+)", r"\g<1>1.0", 1), "tokens/s per process, but"),
    "TFLOP/s times 100": ("native", figure("tflops", lambda rate: 100 * rate), "TFLOP/s, but"),
    "samples/s doubled": ("native", figure("samples_per_second", lambda rate: 2 * rate), "do not give 16 samples"),
    "samples of one line": ("native", sub(LOG, "consumed samples: 160", "consumed samples: 176"), "counts 176 samples"),
    "tokens of one line": ("native", sub(LOG, r"consumed tokens: 30720 ", "consumed tokens: 30721 "), "30721 tokens"),
    "another global batch": ("native", sub(LOG, "global batch size: 16", "global batch size: 32"), "a global batch of"),
    # ---- the schedule
    "a constant learning rate": ("zero1", figure("learning_rate", lambda _: 1e-4), "the schedule of 40 iterations"),
    "learning rates 1 % higher": ("zero1", figure("learning_rate", lambda rate: 1.01 * rate), "the schedule of 40"),
    "the learning rate of the end": ("native", figure("learning_rate", lambda _: 0.0, [40]), "gives 1e-05"),
    "a run cut to 30 of 40 iterations": ("native", shorter, "but the schedule of 30 iterations"),
    "another warm-up": ("native", setting("LR_WARMUP_ITERS", "--lr-warmup-iters", "4"), "learning rate 1.25e-05, but"),
    "another final rate": ("native", setting("MIN_LR", "--min-lr", "0"), "but the schedule"),
    "another peak": ("zero1", setting("LR", "--lr", "0.001"), "but the schedule"),
    "a loss scale without fp16": ("native", figure("loss_scale", lambda _: 65536.0), "a loss scale of 65536"),
    "skipped updates in fp32": ("native", figure("skipped", lambda _: 1, [5]), "skipped updates, which fp32 never"),
    "a skipped update": ("gpus", figure("skipped", lambda _: 1, [6]), "has the learning rate .*, but the schedule"),
    "more skipped than there are": ("gpus", figure("skipped", lambda _: 5, [6]), "has 5 iterations skipped"),
    "a loss that is no number": ("native", figure("lm_loss", lambda _: float("nan"), [9]), "counts no iteration that"),
    "a norm that is no number": ("native", figure("grad_norm", lambda _: float("nan"), [9]), "gradient norm nan, but"),
    "norms that are no numbers": ("native", figure("grad_norm", lambda _: float("nan")), "the gradient norm nan, but"),
    # ---- methods that the engine was not told to use
    "gradients reduced once": (
        "zero2", claimed("ZERO_REDUCE_ONCE", "1"), "imply --zero-reduce-once, which the engine was not given"),
    "gradients reduced in fp32": ("zero1", claimed("GRADIENT_REDUCTION", "fp32"), "have no communication_data_type"),
    "sequence parallelism": (
        "short", claimed("SEQUENCE_PARALLEL", "1"), "imply --sequence-parallel, which the engine was not given"),
    "a zero-bubble schedule": (
        "staged", claimed("PIPELINE_SCHEDULE", "zero-bubble"), "imply --pipeline-schedule zero-bubble, which the"),
    "flash attention": ("zero1", claimed("FLASH_ATTENTION", "on"), "the engine was not given --use-flash-attn-v2"),
    "communication that overlaps": ("zero2", claimed("OVERLAP_COMM", "on"), "OVERLAP_COMM is 'on', but the DeepSpeed"),
    "another number of hardware queues": (
        "zero1", claimed("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
        "imply CUDA_DEVICE_MAX_CONNECTIONS=8, but the engine was given CUDA_DEVICE_MAX_CONNECTIONS=1"),
    "a setting's argument left out": (
        "zero2", value(PART, "plan", "arguments", "settings", to=lambda words: words[:-2]), "was not given"),
    "an argument without a setting": (
        "short", value(PART, "plan", "arguments", "own", to=lambda words: [*words, "--sequence-parallel"]),
        "given --sequence-parallel, which no setting of the plan implies"),
    "a ZeRO stage that the engine was not given": (
        "zero2", value(PART, "plan", "arguments", "own", to=lambda words: [
            "1" if word == "2" else word for word in words]), "imply --zero-stage 2, but the engine was given"),
    "other clipping in DeepSpeed": (
        "zero2", value(PART, "plan", "ds_config", "gradient_clipping", to=0.3), "the DeepSpeed option gradient_clip"),
    "bf16 in DeepSpeed": (
        "zero2", value(PART, "plan", "ds_config", "bf16", "enabled", to=True), "the DeepSpeed option bf16"),
    # ---- evaluations
    "a better validation loss": ("native", also(
        sub(LOG, "value: 7.500000E", "value: 7.400000E", 1), value(PART, "evaluations", 0, "lm_loss", to=7.4)),
        "perplexity 1808.04, but its loss 7.4 gives"),
    "a better perplexity": ("native", also(
        sub(LOG, r"PPL: 1\.8", "PPL: 1.7", 1), value(PART, "evaluations", 0, "perplexity", to=1.708042e3)),
        "perplexity 1708.04, but"),
    "an evaluation left out": ("native", also(
        sub(LOG, r"^\S+ +validation loss at iteration 20 .*\n", ""),
        value(PART, "evaluations", to=lambda found: [entry for entry in found if entry["iteration"] != 20])),
        "iteration 20 was not evaluated, where every 10 of 40 are"),
    "an evaluation at another iteration": ("native", also(
        sub(LOG, "loss at iteration 10", "loss at iteration 13"), value(PART, "evaluations", 0, "iteration", to=13)),
        "iteration 13 was evaluated, where every 10"),
    # ---- the model, and what engines print of the plan
    "a vocabulary a hundred times as large": ("native", also(
        sub(LOG, f"padded to {VOCABULARY}", f"padded to {100 * VOCABULARY}"),
        value(PART, "padded_vocab_size", to=100 * VOCABULARY)), "another run than the plan: parameters"),
    "a vocabulary that is no multiple": ("zero1", also(
        sub(LOG, rf"(new size: |padded to ){VOCABULARY}", rf"\g<1>{VOCABULARY + 1}"),
        value(PART, "padded_vocab_size", to=VOCABULARY + 1)), f"pads 4196 tokens with 28 to {VOCABULARY + 1}"),
    "another number of parameters": ("native", sub(LOG, r"[\d,]+ parameters", "1,000 parameters"), "parameters 1,000"),
    "tensor parallelism in the header": ("native", sub(LOG, HEADER + "TP=1", r"\1TP=2"), "TP 2 instead of 1"),
    "other replicas in the header": ("native", sub(LOG, HEADER + "DP=2", r"\1DP=4"), "DP 4 instead of 2"),
    "other micro-batches": ("native", sub(LOG, HEADER + "8 micro", r"\g<1>4 micro"), "micro-batches 4 instead of 8"),
    "larger micro-batches": ("native", sub(LOG, "batches of 1", "batches of 2"), "samples of a micro-batch 2 instead"),
    "another precision": ("native", sub(LOG, "torch.float32 on", "torch.bfloat16 on"), "data type bfloat16 instead"),
    "another device": ("native", sub(LOG, "float32 on cpu", "float32 on cuda"), "device cuda instead of cpu"),
    "a resumed run as a new one": ("native", sub(LOG, "from iteration 0", "from iteration 10"), "first iteration 10"),
    "the native engine's header in Megatron's log": (
        "zero1", sub(LOG, r"\A(\S+) ", r"\1 native engine: 9 parameters, TP=1 PP=1 DP=2, 8 micro-batches of 1,"
        rf" vocabulary padded to {VOCABULARY}, torch.float32 on cpu, from iteration 0\n\1 "), "instead of megatron"),
    "another world size": ("zero1", sub(LOG, "world size: 2", "world size: 4"), "another layout than the plan"),
    "another argument": ("zero1", sub(LOG, r"(seed \.+ )1234", r"\g<1>1235"), "has --seed 1235, and the plan '1234'"),
    "another argument of the native engine": (
        "native", sub(LOG, r"(arguments: .*seed=)1234", r"\g<1>1235"), "has --seed 1235, and the plan '1234'"),
    "other decay": ("short", setting("WEIGHT_DECAY", "--weight-decay", "0.1"), "has --weight-decay 0.01, and the plan"),
    "a setting left out": (
        "short", sub(PART, r'"CLIP_GRAD": "[^"]*",', ""), "given --clip-grad, but the plan has no setting CLIP_GRAD"),
    "dummy tokens that do not fit": ("zero1", sub(LOG, "with 28 dummy", "with 92 dummy"), "with 92 to 4224"),
    "Megatron's parameters": ("zero1", sub(LOG, r"(\(0, 0\): )\d+", r"\g<1>1000"), "counts 1000 parameters"),
    # ---- memory and samples
    "the peak of one rank left out": ("native", also(
        sub(LOG, r"^.*peak memory \| rank 1 .*\n", ""), value(PART, "peak_memory", to=lambda peaks: peaks[:1])),
        r"peak memory is of the ranks \[0\], in a run of 2"),
    "more memory than the host has": ("native", both_peaks(0, host_mib=99000.0), "99000 MiB of the host's 24000"),
    "more memory than a GPU has": ("gpus", both_peaks(0, device_mib=99000.0), "99000 MiB of a GPU's 32000"),
    "less memory than an interpreter takes": ("native", both_peaks(0, host_mib=20.0), "20 MiB of the host, less than"),
    "two peaks of one rank": (
        "native", sub(LOG, r"^(.*peak memory \| rank 1 .*\n)", r"\1\1"), "2 lines with the peak memory of rank 1"),
    "the samples of a long run left out": ("slow", lambda run: (run / SAMPLES).unlink(), "has 0 samples of 26"),
    "all but one sample of a long run": (
        "slow", lambda run: (run / SAMPLES).write_text((run / SAMPLES).read_text().splitlines()[0] + "\n"),
        "has 1 samples of 26"),
    "a peak from another host": ("native", sub(LOG, r"host node0 \|", "host node9 |"), "from the host node9"),
    "a peak on another device": ("native", sub(LOG, r"device cpu \|", "device cuda:0 |"), "from the device cuda"),
    "less reserved than allocated": (
        "gpus", sub(LOG, r"reserved MiB 0\.0", "reserved MiB 10.0"), "more memory allocated than reserved"),
    "a rank of another node": ("gpus", also(
        sub(LOG, r"peak memory \| rank 0", "peak memory | rank 1"), value(PART, "peak_memory", 0, "rank", to=1)),
        r"ranks \[1, 1\]|does not run there"),
    "samples of another day": (
        "native", sub(SAMPLES, r'("time": )(\d+\.\d+)', lambda m: f"{m[1]}{float(m[2]) - DAY}"), "outside the run"),
    "samples that stand there twice": (
        "native", sub(SAMPLES, r"^(.*\n)", r"\1\1"), "has two samples of"),
    "a profile from another host": (
        "native", value("profile.json", "ranks", 1, "host", to="node9"), "has rank 1 on node9, the record on node0"),
    "more bytes than the link carries": (
        "gpus", sub(SAMPLES, r'("sent": )([\d.]+)', lambda m: f"{m[1]}{float(m[2]) * 1e4}"), "Mbit/s carry"),
    "a counter that goes back": (
        "native", sub(SAMPLES, r'("sent": )([1-9][\d.]*)', lambda m: f"{m[1]}{1e9 - float(m[2])}"),
        "bytes fewer sent over lo than before"),
    "a received counter that goes back": (
        "native", sub(SAMPLES, r'("received": )([1-9][\d.]*)', lambda m: f"{m[1]}{1e9 - float(m[2])}"),
        "bytes fewer received over lo than before"),
    "more bytes received than the link carries": (
        "gpus", sub(SAMPLES, r'("received": )([\d.]+)', lambda m: f"{m[1]}{float(m[2]) * 1e4}"), "Mbit/s carry"),
    "a GPU that is busy nine times over": (
        "gpus", sub(SAMPLES, '"utilization": 90.0', '"utilization": 900.0'), "busy 900 % of the time"),
    "a GPU with more memory": (
        "gpus", sub(SAMPLES, '"memory_mib": 1000.0', '"memory_mib": 99000.0'), "99000 MiB used of a GPU's 32000"),
    # ---- the end
    "exit status 1 beside complete": ("native", value(PART, "exit_status", to=1), "is complete, but has exit_status 1"),
    "SIGKILL beside complete": ("native", value(PART, "signal", to="KILL"), "is complete, but has signal KILL"),
    "a reason beside complete": ("native", value(PART, "reason", to="lost"), "is complete, but has reason lost"),
    "no exit status beside complete": ("native", value(PART, "exit_status", to=None), "but has exit_status None"),
    "cancelled by nothing": ("native", value(PART, "status", to="cancelled"), "was cancelled, but by no signal"),
    "a rumour about another node": ("gpus", value(PART, "heard", to=[{
        "node": 1, "nnodes": 2, "host": "node9", "status": "complete", "reason": "", "remedy": "", "cause": None,
        "signal": None, "ended": "2025-11-21T04:40:00.000Z"}]), "has the host node9, but its record has node1"),
    # ---- files that repeat the record
    "another seed in the command": ("native", sub("node0.command.sh", "--seed 1234", "--seed 1235"), "another command"),
    "another stage": ("zero1", value("ds_config.json", "zero_optimization", "stage", to=2), "ds_config.json differs"),
    "a profile left out": ("native", lambda run: (run / "profile.json").unlink(), "profile.json is missing, though it"),
    "a profile that takes longer than its iteration": (
        "native", profiled(5.0), "profile.json takes 495 ms, but its line came"),
    "a profile that takes no time": ("native", profiled(0.01), "0.99 ms, but the fastest iteration 100"),
    "a rank of the profile left out": (
        "native", value("profile.json", "ranks", to=lambda ranks: ranks[:1]), "has 1 ranks, in a run of 2 processes"),
    "a profile of another iteration": ("native", value("profile.json", "iteration", to=5), "is of iteration 5"),
    "a shorter part of a profile": (
        "native", value("profile.json", "ranks", 0, "parts", "backward", to=1.0), "take 45 ms, the whole 99 ms"),
    # ---- copies
    "a copy with times x 1.01": (
        "native", copied("native", "again", a_copy_with_times(1.01)),
        "(again is a copy of .*native|native is a copy of .*again)"),
    "a copy of its samples": (
        "native", copied("native", "again", value(PART, "pid", to=7), faster(0.98), moved(DAY)), "is a copy"),
    "a copy of its noise": ("zero1", copied("zero1", "again", value(PART, "pid", to=7), a_copy_with_times(1.05)),
        "all multiplied by the same number"),
    "a copy of its process": ("short", copied("short", "again", faster(0.9, range(1, 7))), "both were process"),
}  # fmt: skip
