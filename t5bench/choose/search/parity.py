"""Whether the layout that a search names trains as DDP does: both train a small model, and the gate compares them."""

from dataclasses import replace
from pathlib import Path

from t5bench import Problem
from t5bench.choose.search.runs import Runner
from t5bench.choose.space import Candidate
from t5bench.costmodel.job import Architecture, Parallel
from t5bench.plan.described_model import sizes_of
from t5bench.plan.families import FAMILIES
from t5bench.plan.scripts import script_defaults
from t5bench.record.settings import MODEL_FAMILIES
from t5bench.sweep.clipping import with_clip_among
from t5bench.sweep.launch import BASELINE
from t5bench.sweep.parity_check import ARGUMENTS
from t5bench.sweep.sweep import t5bench
from training_comparison.verdict import EXIT_DIFFERENT, EXIT_NOT_SHOWN

HEAD_SIZE = 16
RECIPE = ("LR", "MIN_LR", "LR_WARMUP_ITERS", "WEIGHT_DECAY", "CLIP_GRAD", "SEED", "TRAIN_ITERS", "MODEL_PRESET")
# What a layout's settings say of its model and batch gives way to the check's small ones.
KEPT = (
    "MODEL_FAMILY", "NNODES", "NPROC_PER_NODE", "TENSOR_PARALLEL_SIZE", "PIPELINE_PARALLEL_SIZE", "PIPELINE_SCHEDULE",
    "VIRTUAL_PIPELINE_STAGES", "SEQUENCE_PARALLEL", "FSDP_SHARD_SIZE", "FSDP_KEEP_PARAMETERS", "ZERO_REDUCE_ONCE",
    "RECOMPUTE", "ENGINE",
)  # fmt: skip


def settings_of(candidate: Candidate) -> dict[str, str]:
    """The recipe of scripts/check_parity.sh, with a model and a batch that the layout and DDP divide alike."""
    defaults = script_defaults("check_parity", {})
    recipe = {name: defaults[name] for name in RECIPE}
    parallel = candidate.job.parallel
    model = small_model(candidate.job.architecture, parallel)
    batch = {"MICRO_BATCH_SIZE": "1", "GLOBAL_BATCH_SIZE": str(parallel.world * max(2, parallel.pipeline))}
    described = {"MODEL": model.description()} if model.kind else {}
    exact = {"PRECISION_FLAG": "", "DROPOUT": "0", "LOG_INTERVAL": "1"}
    return recipe | sizes_of(model) | batch | described | exact


def small_model(model: Architecture, parallel: Parallel) -> Architecture:
    """A small one of the same parts, which the layout divides. Grouped heads stay grouped, in other numbers."""
    tiny = MODEL_FAMILIES[model.family].presets["tiny"]
    lengths = [min(int(tiny[name]), model.position_rows) for name in FAMILIES[model.family].lengths]
    heads = max(4, parallel.tensor)
    depth = max(2, parallel.chunks)
    return replace(
        model,
        encoder_layers=depth if model.encoder_layers else 0,
        decoder_layers=depth,
        hidden=HEAD_SIZE * heads,
        heads=heads,
        kv_heads=heads if model.kv_heads == model.heads else heads // 2,
        head_size=HEAD_SIZE,
        ffn=2 * HEAD_SIZE * heads,
        rotary_columns=HEAD_SIZE // 2 if model.rotary_columns else 0,
        encoder_length=lengths[0] if model.encoder_layers else 0,
        decoder_length=lengths[-1],
    )


def fault_of(name: str, candidate: Candidate, runner: Runner) -> str:
    """Why a layout does not train as DDP does; "" if their curves agree, whether or not they could show every mistake.

    The gate prints which of the two it is. Raises Problem and Interrupted.
    """
    common = settings_of(candidate)
    of_layout = {key: value for key, value in candidate.settings().items() if key in KEPT and value}
    of_ddp = {key: of_layout[key] for key in ("MODEL_FAMILY", "NNODES", "NPROC_PER_NODE", "ENGINE") if key in of_layout}
    folder = runner.runs_dir / "parity" / name
    world = candidate.job.parallel.world

    def train_ddp(clip: str) -> Path:
        baseline = folder / (BASELINE if clip == common["CLIP_GRAD"] else f"{BASELINE}-clip-{clip}")
        reason = runner.train(baseline, BASELINE, world, common | of_ddp | {"CLIP_GRAD": clip}, ARGUMENTS)
        if reason:
            raise Problem(f"DDP, with which layouts are compared, failed: {reason}", f"Its log is in {baseline}")
        return baseline

    clip, baseline = with_clip_among(train_ddp, common["CLIP_GRAD"])
    common["CLIP_GRAD"] = clip
    named = folder / "named"
    reason = runner.train(named, candidate.strategy, world, common | of_layout, ARGUMENTS)
    if reason:
        return reason
    return verdict(named, baseline)


def verdict(named: Path, baseline: Path) -> str:
    """Raises Problem where the gate could not judge."""
    status = t5bench("parity", named, baseline, "--baseline", baseline)
    if status == EXIT_DIFFERENT:
        return "it does not train as DDP does; the table above has the difference"
    if status not in (0, EXIT_NOT_SHOWN):
        raise Problem(f"the parity check of {named} ended with status {status}", "Run the same command again")
    return ""
