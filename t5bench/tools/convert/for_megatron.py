"""What a checkpoint of Megatron-DeepSpeed says besides weights and moments, of a run that the native engine trained.

Both engines take the same command line, so the arguments follow from the run's plan, and the rest from the seal.
"""

from argparse import Namespace
from typing import Any

import torch

from native.arguments import make_parser
from native.pieces import KINDS
from t5bench import Problem
from t5bench.checkpoint_form import Seal, read_seal
from t5bench.record.checkpoints import how_to_renew
from t5bench.record.run import Run
from t5bench.tools.convert.stored import StoredTensors, is_stored
from t5bench.tools.convert.trained import TrainedModel, native_arguments
from t5bench.tools.convert.training_state import Shard, TrainingState

CHECKPOINT_VERSION = 3.0  # of today's order of query, key and value
TRACKED = "model-parallel-rng"  # Megatron's name of the generator that tensor-parallel ranks do not share
CUDA_STATE_BYTES = 16


def check(model: TrainedModel) -> None:
    """Raises Problem for a native run that Megatron-DeepSpeed cannot continue."""
    if model.architecture.kind:
        found = f"{model.directory} trained a model that MODEL describes, which Megatron-DeepSpeed does not have"
        raise Problem(found, "Continue it in the native engine")
    if not is_stored(model.folder):
        found = f"{model.folder} was saved by an earlier release of the native engine"
        raise Problem(found, how_to_renew(str(model.directory)))
    seal = read_seal(model.folder)
    planned = [seal.learning_rate.get(name, 0) for name in ("train_iters", "global_batch_size")]
    if seal.planned_samples and list(seal.planned_samples) != [planned[0] * planned[1]]:
        found = f"{model.directory} was made longer or had another batch, and Megatron-DeepSpeed has no second order"
        raise Problem(f"{found} of the samples", "Continue it in the native engine")


def head_of(model: TrainedModel, settings: Run) -> dict[str, Any]:
    """What each file has besides its part of the model and the optimizer."""
    seal = read_seal(model.folder)
    args = engine_arguments(model, settings, seal)
    tokens = seal.consumed_samples * (model.architecture.encoder_length + model.architecture.decoder_length)
    return {
        "args": args,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": seal.iteration,
        "tokens": tokens,
        "opt_param_scheduler": schedule_of(args, seal, tokens),
        "rng_state": [generators_of(settings.plan.device)],
    }


def engine_arguments(model: TrainedModel, settings: Run, seal: Seal) -> Namespace:
    """The run's arguments, as the engine would have kept them."""
    plan = settings.plan
    given, _ = make_parser(model.architecture.family).parse_known_args(list(plan.arguments.words))
    args = Namespace(**{"vocab_file": None} | vars(given) | vars(native_arguments(settings, model.folder)))
    del args.native_sharding
    args.add_position_embedding = True
    args.openai_gelu = False
    args.data_parallel_random_init = False
    args.consumed_train_samples = seal.consumed_samples
    evaluations = seal.iteration // plan.number("EVAL_INTERVAL")
    args.consumed_valid_samples = evaluations * plan.number("EVAL_ITERS") * plan.number("GLOBAL_BATCH_SIZE")
    return args


def schedule_of(args: Namespace, seal: Seal, tokens: int) -> dict[str, Any]:
    """The state of Megatron's OptimizerParamScheduler, whose steps are samples."""
    batch = args.global_batch_size
    schedule = {**vars(args), **seal.learning_rate, **seal.optimizer}
    decay = schedule["lr_decay_iters"] or schedule["train_iters"]
    return {
        "max_lr": schedule["lr"],
        "min_lr": schedule["min_lr"],
        "lr_decay_style": schedule["lr_decay_style"],
        "lr_warmup_steps": schedule["lr_warmup_iters"] * batch,
        "lr_warmup_tokens": None,
        "lr_decay_steps": decay * batch,
        "lr_decay_tokens": None,
        "num_steps": seal.consumed_samples,
        "num_tokens": tokens,
        "start_wd": schedule["weight_decay"],
        "end_wd": schedule["weight_decay"],
        "wd_incr_style": "constant",
        "wd_incr_steps": schedule["train_iters"] * batch,
    }


def generators_of(device: str) -> dict[str, Any]:
    """Random states of the sizes that the engine's have on this device: reshape fills them anew."""
    cpu = torch.Generator().get_state()
    own = torch.zeros(CUDA_STATE_BYTES, dtype=torch.uint8) if device == "cuda" else cpu
    return {"torch_rng_state": cpu, "cuda_rng_state": own, "rng_tracker_states": {TRACKED: own}}


def state_of(model: TrainedModel, args: Namespace) -> TrainingState:
    """The optimizer's states and the fp32 weights. args: of engine_arguments()."""
    seal = read_seal(model.folder)
    optimizer = {**vars(args), **seal.optimizer}
    own = torch.optim.AdamW(
        [torch.zeros(1)],
        lr=args.lr,
        betas=(optimizer["adam_beta1"], optimizer["adam_beta2"]),
        eps=optimizer["adam_eps"],
        weight_decay=optimizer["weight_decay"],
        fused=True,
    )
    [group] = own.state_dict()["param_groups"]
    # Apex counts steps by group, PyTorch by parameter.
    group |= {"lr_mult": 1.0, "bias_correction": True, "step": seal.step}
    groups = [
        {**group, "name": "wd_no_scale_lr", "wd_mult": 1.0},
        {**group, "name": "no_wd_no_scale_lr", "wd_mult": 0.0, "weight_decay": 0.0},
    ]
    values = {kind: StoredTensors(model.folder, kind) for kind in KINDS}
    example = Shard({}, groups, torch.tensor(float(seal.step)), has_masters=model.dtype != torch.float32)
    return TrainingState(values, example)
