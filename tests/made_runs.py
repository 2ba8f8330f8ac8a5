"""Run directories made by hand, in the format of records.py: what a launcher would have left after a run like this."""

import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from t5bench.checkpoint_form import INDEX, SEAL, Seal, Sums
from t5bench.costmodel.flops import flops_per_iteration
from t5bench.costmodel.job import Architecture
from t5bench.plan import torchrun_command
from t5bench.plan.engine import config_of_settings
from t5bench.record import files, records
from t5bench.record.checkpoints import Checkpoints
from t5bench.record.command_script import script
from t5bench.record.log import Iteration
from t5bench.record.plan import Arguments, Layout, Plan, Setting, Strategy
from t5bench.record.settings import BY_NAME, default_values
from t5bench.record.status import COMPLETE, RUNNING
from t5bench_verify.implied import choices_of, draft_of

PORTS = {"ddp": 29800, "zero1": 29801, "zero2": 29802, "zero3": 29803, "zero3_offload": 29804, "pipeline": 29810,
         "tensor": 29811, "hybrid": 29812}  # fmt: skip
COLOURS = {"ddp": "ink", "zero1": "#56b4e9", "zero2": "#0072b2", "zero3": "#009e73", "zero3_offload": "#b5a21e",
    "pipeline": "#d55e00", "tensor": "#e69f00", "hybrid": "#cc79a7"}  # fmt: skip
START = 1_763_700_000.0  # seconds since 1970
# The tiny preset, and what else made runs have that is not the launchers' default.
_TINY = {
    "MODEL_PRESET": "tiny", "ENCODER_NUM_LAYERS": "2", "DECODER_NUM_LAYERS": "2", "HIDDEN_SIZE": "64",
    "NUM_ATTENTION_HEADS": "4", "FFN_HIDDEN_SIZE": "128", "ENCODER_SEQ_LENGTH": "128", "DECODER_SEQ_LENGTH": "64",
    "DROPOUT": "0", "PRECISION_FLAG": "", "LOG_INTERVAL": "1", "NNODES": "1", "NPROC_PER_NODE": "2",
    "OUTPUT_DIR": "/run", "WANDB_MODE": "offline", "MEGATRON_DIR": "/engine", "MEGATRON_DATA_DIR": "/data",
}  # fmt: skip
LARGE = {
    "MODEL_PRESET": "large", "ENCODER_NUM_LAYERS": "24", "DECODER_NUM_LAYERS": "24", "HIDDEN_SIZE": "1024",
    "NUM_ATTENTION_HEADS": "16", "FFN_HIDDEN_SIZE": "2816", "ENCODER_SEQ_LENGTH": "512", "DECODER_SEQ_LENGTH": "128",
    "DROPOUT": "0.1", "PRECISION_FLAG": "--bf16",
}  # fmt: skip
LAYOUTS = {"tensor": (2, 1), "pipeline": (1, 2), "hybrid": (2, 2)}  # TP, PP; 1, 1 for the others
ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}
RTX_5000_ADA = "NVIDIA RTX 5000 Ada Generation"
VOCABULARY = 4224
OF_A_PART = ("status", "reason", "remedy", "padded_vocab_size", "versions", "commits")


def made_settings(values: Mapping[str, str], family: str = "t5", strategy: str = "ddp") -> dict[str, Setting]:
    """The launchers' settings with these values where they are named, else those of a tiny run."""
    named = {"strategy": strategy, "port": PORTS.get(strategy, 29899), "gpus_per_node": ""}
    named |= dict(zip(("tp", "pp"), LAYOUTS.get(strategy, (1, 1)), strict=True))
    defaults = default_values(family, "large", **named)
    assert not values.keys() - BY_NAME.keys(), values.keys() - BY_NAME.keys()
    if family == "gpt":
        # A GPT has the encoder's depth and length.
        alike = {"NUM_LAYERS": "ENCODER_NUM_LAYERS", "SEQ_LENGTH": "ENCODER_SEQ_LENGTH"}
        values = {name: values[other] for name, other in alike.items() if other in values} | dict(values)
    tiny = _TINY | {"NUM_LAYERS": "2", "SEQ_LENGTH": "128", "MODEL_FAMILY": family}
    made = {}
    for name, default in defaults.items():
        value = values.get(name, tiny.get(name, default))
        made[name] = Setting(BY_NAME[name].role, value, value == default)
    return made


def by_role(settings: Mapping[str, Setting]) -> dict[str, dict[str, str]]:
    """Settings as a plan has them."""
    values: dict[str, dict[str, str]] = {}
    for name, setting in settings.items():
        values.setdefault(setting.role, {})[name] = setting.value
    return values


def with_values(plan: Plan, values: Mapping[str, str]) -> Plan:
    """The plan with other values of some of its settings."""
    settings = dict(plan.settings)
    for name, value in values.items():
        settings[name] = settings[name]._replace(value=value)
    return replace(plan, settings_by_role=by_role(settings), chosen=list(dict.fromkeys([*plan.chosen, *values])))


def made_plan(
    strategy: str = "ddp",
    settings: Mapping[str, str] | None = None,
    *,
    nodes: int = 1,
    world_size: int | None = None,
    own_arguments: Sequence[str] = (),
    extra_arguments: Sequence[str] = (),
    family: str = "t5",
    strategy_flags: Sequence[str] = (),
    **fields: Any,
) -> Plan:
    """A plan of one node; world_size: what the strategy needs, but at least 2. fields: others of the plan."""
    tp, pp = LAYOUTS.get(strategy, (1, 1))
    world_size = world_size or max(2, tp * pp)
    here, dp, name = world_size // nodes, world_size // (tp * pp), f"megatron-{strategy}"
    port, stage = PORTS.get(strategy, 29899), ZERO_STAGES.get(strategy)  # a ninth strategy has a port, too
    chosen = {
        "NNODES": str(nodes), "NPROC_PER_NODE": str(here), "MASTER_PORT": str(port), "TENSOR_PARALLEL_SIZE": str(tp),
        "PIPELINE_PARALLEL_SIZE": str(pp), "WANDB_RUN_NAME": name, "ENGINE": fields.get("engine", "megatron"),
    } | (settings or {})  # fmt: skip
    plan_settings = made_settings(chosen, family, strategy)
    batch, micro_batch = (int(plan_settings[name].value) for name in ("GLOBAL_BATCH_SIZE", "MICRO_BATCH_SIZE"))
    words = [plan_settings["PRECISION_FLAG"].value] if plan_settings["PRECISION_FLAG"].value else []
    for setting_name, setting in plan_settings.items():
        for argument in BY_NAME[setting_name].arguments:
            if setting.value:
                words += [argument, setting.value]
    ds_config, colour = f"megatron_{strategy}.json" if stage else "", COLOURS.get(strategy, "#123456")
    made = {
        "strategy": Strategy(strategy, strategy, port, tp, pp, ds_config, colour, list(strategy_flags)),
        "settings_by_role": by_role(plan_settings), "obstacles": [],
        "chosen": [name for name, setting in plan_settings.items() if not setting.is_default],
        "master_address": "node0", "device": "cpu",
        "engine": "megatron", "engine_directory": "/engine", "engine_patches": "series",
        "data_prefix": "/data/xsum", "tokenizer": "t", "output_dir": chosen.get("OUTPUT_DIR", "/run"),
        "layout": Layout(nodes, here, world_size, tp, pp, dp, batch // (micro_batch * dp), 1 if pp > 1 else None),
        "ds_config": None,
        "arguments": Arguments(settings=words, own=own_arguments, extra=list(extra_arguments)),
        "environment": {},
        "program": ["pretrain_t5.py"],
    }  # fmt: skip
    plan = Plan(**made | fields)
    if stage and "ds_config" not in fields:
        options = config_of_settings(draft_of(plan))
        plan = replace(plan, ds_config=options | {"zero_optimization": {"stage": stage, "overlap_comm": False}})
    if "environment" not in fields:
        plan = replace(plan, environment=torchrun_command.environment(draft_of(plan), plan, choices_of(plan)))
    if "arguments" in fields:
        return plan
    own = torchrun_command.own_arguments(draft_of(plan), plan, choices_of(plan))
    return replace(plan, arguments=replace(plan.arguments, own=[*own, *own_arguments]))


def made_checkpoints(
    directory: Path = Path("/run"), *, stage: int = 0, precision: str = "", tp: int = 1, pp: int = 1, dp: int = 2,
    nodes: int = 1, layers: int = 2, **fields: Any,
) -> Checkpoints:  # fmt: skip
    """The checkpoints in a run directory, as node 0 sees them; stage: of ZeRO; fields: what made_plan takes."""
    settings = {"OUTPUT_DIR": str(directory), "PRECISION_FLAG": precision, "ENCODER_NUM_LAYERS": str(layers)}
    layout = Layout(nodes, tp * pp * dp // nodes, tp * pp * dp, tp, pp, dp, 1)
    ds_config = {"zero_optimization": {"stage": stage}} if stage else None
    return Checkpoints(made_plan("ddp", settings, ds_config=ds_config, layout=layout, **{"engine": "native"} | fields))


def write_checkpoint(checkpoints: Checkpoints, iteration: int) -> None:
    """The files of all ranks: of the native engine's with their list, in which each rank reads its own; else as
    torch.save makes them, zip archives with the tensors uncompressed."""
    assert checkpoints.plan.layout
    folder = checkpoints.folder(iteration)
    ranks = range(checkpoints.plan.layout.world_size)
    if checkpoints.plan.engine == "native":
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for name in [INDEX, *(f"__{rank}_0.distcp" for rank in ranks)]:
            content = name.encode() * 100
            (folder / name).write_bytes(content)
            files[name] = Sums(len(content), zlib.crc32(content))
        samples = iteration * checkpoints.plan.number("GLOBAL_BATCH_SIZE")
        seal = Seal(iteration, iteration, samples, checkpoints.division, has_dropout=True, files=files)
        (folder / SEAL).write_bytes(replace(seal, read_from=[[rank] for rank in ranks]).encode())
        return
    for name in checkpoints.files(ranks):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", b"pickle")
            archive.writestr("archive/data/0", b"weights" * 100)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def make_run(
    directory: Path,
    strategy: str = "ddp",
    *,
    elapsed_ms: Sequence[float] = (100.0,) * 30,
    losses: Sequence[float | None] = (),
    norms: Sequence[float | None] = (),
    log_interval: int = 1,
    settings: Mapping[str, str] | None = None,
    nodes: int = 1,
    gpu: str | None = None,
    idx_sha256: str = "5a" * 32,
    skipped: Mapping[int, int] | None = None,
    memory_mib: Sequence[float] = (),
    sent_per_iteration: float | None = None,
    sample_seconds: float = 5.0,
    start: float = START,
    **others: Any,
) -> Path:
    """Writes a run whose log lines have these times (ms per iteration), losses (by default falling from 8) and gradient
    norms (by default 1.25 and 0.75 in turn).

    skipped: skipped iterations by the line's iteration. gpu names the GPUs, None is a CPU. sent_per_iteration: bytes of
    each node, by eth0, or by lo on one node; None writes no samples. others: what the nodes' parts have (OF_A_PART), or
    what made_plan takes. The directory, for convenience.
    """
    directory.mkdir(parents=True, exist_ok=True)
    iterations, interval = max(1, len(elapsed_ms) * log_interval), log_interval if elapsed_ms else 1000
    chosen = {"TRAIN_ITERS": str(iterations), "LOG_INTERVAL": str(interval), "OUTPUT_DIR": str(directory)}
    chosen |= settings or {}
    given = {name: others.pop(name) for name in OF_A_PART if name in others}
    plan = made_plan(strategy, chosen, nodes=nodes, device="cuda" if gpu else "cpu", **others)
    assert plan.layout
    lines = _lines(elapsed_ms, losses, norms, log_interval, skipped or {}, start, plan)
    end = lines[-1].time if lines else start
    for node in range(nodes):
        ranks = plan.layout.ranks_of(node)
        part = {
            "format": records.FORMAT, "node": node, "nnodes": nodes, "host": f"node{node}",
            "pid": 1000 + zlib.crc32(bytes(directory)) % 4_000_000,
            "status": COMPLETE, "reason": "", "remedy": "", "cause": None, "exit_status": 0, "signal": None,
            "started": stamp(start), "ended": stamp(end), "plan": replace(plan, node=node).to_json(),
            "data": {"prefix": "/data/xsum", "bin_bytes": 123456, "idx_sha256": idx_sha256, "tokenizer": "t"},
            "versions": {"python": "3.11.2", "torch": "2.13.0", "deepspeed": "0.19.8"},
            "commits": {"repository": "1" * 40, "repository_changed": False, "engine": "2" * 40},
            "patches": {}, "environment": {}, "kernel": "6", "oom_kills": 0, "padded_vocab_size": VOCABULARY,
            "devices": [
                {"index": i, "name": gpu, "memory_mib": 32000, "driver": "1", "uuid": f"{node}-{i}"}
                for i in range(len(ranks)) if gpu
            ],
            "cpu": {"model": "a CPU", "cores": 2, "memory_mib": 24000}, "network": {"eth0": {"speed_mbit": 10_000}},
            "peak_memory": [
                {"rank": rank, "device_mib": peak if gpu else None, "host_mib": peak}
                for rank in ranks for peak in [memory_mib[rank] if memory_mib else 400.0 + rank]
            ],
            **given,
        }  # fmt: skip
        part |= {"ended": None} if part["status"] == RUNNING else {}
        files.write_json(directory / f"node{node}.json", part)
        (directory / f"node{node}.command.sh").write_text(script(plan))
        size = part["padded_vocab_size"]
        told = [(start, f"vocabulary padded to {size}")] if size else []
        if node == nodes - 1:
            told += [(line.time, engine_line(line, plan)) for line in lines]
        told += [(end, memory_line(**peak, host=f"node{node}")) for peak in part["peak_memory"]]
        (directory / f"node{node}.log").write_text("".join(f"{stamp(time)} {text}\n" for time, text in told))
        if sent_per_iteration is not None:
            values = {"memory_mib": 1000.0, "sm_mhz": 2000.0, "utilization": 90.0, "power_w": 200.0}
            gpus = [{"index": index, **values} for index in range(len(part["devices"]))]
            samples = _samples(lines, start, "eth0" if nodes > 1 else "lo", sent_per_iteration, sample_seconds, gpus)
            (directory / f"node{node}.samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    (directory / "metrics.jsonl").write_text("".join(records.metrics_line(line) + "\n" for line in lines))
    seal(directory)
    return directory


def seal(directory: Path) -> None:
    """What the recorder does when a run has ended; a test that changes a file of a run does it again."""
    for path in directory.glob("node*.json"):
        part = json.loads(files.read(path))
        if part["status"] != RUNNING:
            files.seal(directory, part["node"], part["nnodes"])
    records.write_run(directory)


def change(directory: Path, node: int = 0, **values: Any) -> None:
    """Another node part, as if the recorder had written it so."""
    path = directory / f"node{node}.json"
    files.write_json(path, json.loads(path.read_text()) | values)
    seal(directory)


def learning_rate(plan: Plan, iteration: int) -> float:
    """As both engines warm up and decay, in fractions of the samples."""
    highest, lowest = plan.decimal("LR"), plan.decimal("MIN_LR")
    warm_up, end = plan.number("LR_WARMUP_ITERS"), plan.number("TRAIN_ITERS")
    done = plan.samples(0, iteration) / plan.number("GLOBAL_BATCH_SIZE")
    if done <= warm_up and warm_up:
        return highest * done / warm_up
    share = min(1.0, (done - warm_up) / max(1, end - warm_up))
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * share)) / 2


def engine_line(line: Iteration, plan: Plan) -> str:
    """As both engines print an iteration."""
    assert plan.layout
    architecture, samples = Architecture.of_arguments(plan.named_arguments, 0), plan.samples(0, line.iteration)
    tokens = architecture.encoder_length + architecture.decoder_length
    fields = {
        "consumed samples": samples,
        "consumed tokens": samples * tokens,
        "elapsed time per iteration (ms)": line.elapsed_ms,
        "learning rate": line.learning_rate,
        "global batch size": plan.samples(line.iteration - 1, line.iteration),
        "lm loss": line.lm_loss,
        "loss scale": line.loss_scale,
        "grad norm": line.grad_norm,
        "number of skipped iterations": line.skipped,
        "number of nan iterations": line.nan,
        "samples per second": line.samples_per_second,
        "tokens per gpu per second (tgs)": line.samples_per_second * tokens / plan.layout.world_size,
        "TFLOPs": line.tflops,
    }
    shown = "".join(f" {name}: {value} |" for name, value in fields.items() if value is not None)
    return f" iteration {line.iteration:8d}/{line.total:8d} |{shown}"


def memory_line(rank: int, device_mib: float | None, host_mib: float, host: str = "vm") -> str:
    """As both engines print a rank's peak memory."""
    return (
        f" peak memory | rank {rank} | host {host} | device {'cuda' if device_mib else 'cpu'} |"
        f" allocated MiB {device_mib or 0.0} | reserved MiB 0.0 | host rss MiB {float(host_mib)}"
    )


def _lines(
    elapsed_ms: Sequence[float], losses: Sequence[float | None], norms: Sequence[float | None],
    log_interval: int, skipped: Mapping[int, int], start: float, plan: Plan,
) -> list[Iteration]:  # fmt: skip
    lines, now = [], start
    architecture = Architecture.of_arguments(plan.named_arguments, VOCABULARY)
    per_sample = flops_per_iteration(architecture, 1)
    for number, elapsed in enumerate(elapsed_ms):
        iteration, norm = (number + 1) * log_interval, norms[number] if norms else 1 + 0.25 * (-1) ** number
        loss = losses[number] if losses else 6 + 2 / (1 + iteration / 100)
        now += elapsed * log_interval / 1000
        values = {"samples_per_second": plan.number("GLOBAL_BATCH_SIZE") * 1000 / elapsed, "grad_norm": norm}
        rate = per_sample * values["samples_per_second"] / plan.layout.world_size / 1e12
        values |= {"learning_rate": learning_rate(plan, iteration), "tflops": rate, "loss_scale": 1.0, "time": now}
        left_out = skipped.get(iteration, log_interval if loss is None else 0)
        lines.append(Iteration(iteration, plan.iterations, elapsed, loss, skipped=left_out, **values))
    return lines


def _samples(
    lines: Sequence[Iteration], start: float, interface: str, per_iteration: float, seconds: float,
    gpus: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One sample every few seconds; the counter begins at a million, as one of a machine that was up before."""
    ends, numbers = [start, *(line.time for line in lines)], [0, *(line.iteration for line in lines)]
    now = start
    while now <= ends[-1]:
        sent = 1_000_000 + float(np.interp(now, ends, numbers)) * per_iteration
        yield {"time": now, "gpus": gpus, "network": {interface: {"sent": sent, "received": sent / 2}}}
        now += seconds
