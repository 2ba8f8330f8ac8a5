"""Which device and how many processes a run takes, and how they divide the work."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache

from t5bench import Problem
from t5bench.model.job import beyond_native
from t5bench.plan.families import check_rampup, family_of
from t5bench.plan.request import Request
from t5bench.record.plan import Layout


def count_gpus(environment: Mapping[str, str]) -> int:
    """The GPUs that CUDA shows to this process."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = visible.split(",") if visible else []
        return 0 if not devices or devices[0] in ("", "-1") else len(devices)
    return len(gpu_names())


@cache
def gpu_names() -> Sequence[str]:
    """nvidia-smi's list of this machine's GPUs, cached: if no daemon keeps the driver loaded, it takes seconds."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return [match[1] for match in re.finditer(r"^GPU \d+: (.*?)(?: \(UUID: .*)?$", listed, re.MULTILINE)]


class Processes:
    """The device, the number of processes on each node, and whether they share GPUs."""

    def __init__(self, request: Request) -> None:
        self.request, self.strategy = request, request.strategy
        self.nnodes = request.number("NNODES")
        self.gpus = count_gpus(os.environ)
        self.device = request.value("DEVICE")
        if self.device == "auto":
            self.device = "cuda" if self.gpus else "cpu"
        self.model_parallel = request.number("TENSOR_PARALLEL_SIZE") * request.number("PIPELINE_PARALLEL_SIZE")
        # NCCL allows one process per GPU, and so does DeepSpeed with any backend.
        self.may_share = request.value("SHARE_GPUS") == "1" and self.gpus > 0 and not self.strategy.ds_config
        self.per_node = int(request.value("NPROC_PER_NODE") or self._default())
        self.shared = False
        if self.device == "cuda" and self.per_node > self.gpus:
            self._too_few_gpus()

    def _default(self) -> int:
        """Two processes, or as many as the model is divided over; one GPU is enough for DDP."""
        per_node = -(-max(2, self.model_parallel) // self.nnodes)
        if self.device == "cuda" and self.model_parallel == 1 and 0 < self.gpus < per_node and not self.may_share:
            return self.gpus
        return per_node

    def _too_few_gpus(self) -> None:
        findings = self.request.findings
        if self.may_share:
            self.shared = True
            shared = f"warning: {self.per_node} processes share {self.gpus} GPU(s) over gloo"
            findings.notes.append(f"{shared}: results are valid, timings are not")
            return
        findings.lack(
            "too-few-gpus",
            f"NPROC_PER_NODE is {self.per_node} but this node has {self.gpus} visible GPU(s)",
            f"{self.strategy.name} needs {self.model_parallel} GPU(s) in all: set NNODES and NPROC_PER_NODE to what you"
            " have, or DEVICE=cpu",
        )


def divide(request: Request, processes: Processes, zero_stage: int) -> Layout | None:
    """The layout; None if the sizes do not divide, and then the findings say why. zero_stage: 0 without DeepSpeed."""
    tp, pp = request.number("TENSOR_PARALLEL_SIZE"), request.number("PIPELINE_PARALLEL_SIZE")
    world_size = processes.nnodes * processes.per_node
    _check_model_parallel(request, tp, pp, world_size, processes)
    _check_divisible(request, tp)
    family = family_of(request)
    if pp > 1:
        family.check_pipeline(request, pp)
    if request.findings.refused:
        return None
    dp = world_size // (tp * pp)
    global_batch, micro_batch = request.number("GLOBAL_BATCH_SIZE"), request.number("MICRO_BATCH_SIZE")
    if global_batch % (micro_batch * dp):
        request.findings.refuse(
            "batch-size",
            f"GLOBAL_BATCH_SIZE={global_batch} is not divisible by {micro_batch * dp} (MICRO_BATCH_SIZE={micro_batch}"
            f" x data-parallel size {dp})",
            "Change GLOBAL_BATCH_SIZE or MICRO_BATCH_SIZE",
        )
        return None
    check_rampup(request, dp)
    micro_batches, split_rank = global_batch // (micro_batch * dp), pp // 2 if pp > 1 and family.has_encoder else None
    if request.value("ENGINE") == "native":
        _check_native(request, tp, pp, zero_stage, micro_batches)
    return Layout(processes.nnodes, processes.per_node, world_size, tp, pp, dp, micro_batches, split_rank)


def _check_native(request: Request, tp: int, pp: int, zero_stage: int, micro_batches: int) -> None:
    is_fp16 = request.value("PRECISION_FLAG") == "--fp16"
    if reason := beyond_native(tp, pp, zero_stage > 0, micro_batches, is_fp16):
        request.findings.refuse("native-engine", reason, "Use ENGINE=megatron")
    if request.extra:
        from native.arguments import check_compile, make_parser

        try:
            check_compile(make_parser(is_complete=False).parse_args(request.extra), zero_stage)
        except Problem as problem:
            request.findings.refuse("engine-argument", f"after --: {problem}", problem.remedy)


def _check_model_parallel(request: Request, tp: int, pp: int, world_size: int, processes: Processes) -> None:
    strategy, refuse = request.strategy, request.findings.refuse
    for name, kind, size, own in (
        ("TENSOR_PARALLEL_SIZE", "tensor", tp, strategy.tp),
        ("PIPELINE_PARALLEL_SIZE", "pipeline", pp, strategy.pp),
    ):
        if size > 1 and own == 1 and not (kind == "tensor" and strategy.ds_config):  # ZeRO goes with any tensor size
            remedy = f"Use run_megatron_t5_{kind}.sh or run_megatron_t5_hybrid.sh"
            remedy += f"; in a sweep or a check, unset it and name {kind}-tp{tp}" * (kind == "tensor")
            refuse(f"no-{kind}-parallelism", f"{name} is {size} but {strategy.name} has no {kind} parallelism", remedy)
    if world_size % (tp * pp):
        refuse(
            "world-size",
            f"{strategy.name} needs a multiple of {tp * pp} processes (TP={tp} x PP={pp}), found {world_size} "
            f"({processes.nnodes} node(s) x {processes.per_node})",
            f"Set NNODES and NPROC_PER_NODE so that their product is divisible by {tp * pp}",
        )


def _check_divisible(request: Request, tp: int) -> None:
    refuse = request.findings.refuse
    hidden, heads = request.number("HIDDEN_SIZE"), request.number("NUM_ATTENTION_HEADS")
    if hidden % heads:
        refuse("model-size", f"HIDDEN_SIZE={hidden} is not divisible by NUM_ATTENTION_HEADS={heads}")
    for name in ("NUM_ATTENTION_HEADS", "FFN_HIDDEN_SIZE"):
        if request.number(name) % tp:
            refuse("tensor-size", f"{name}={request.number(name)} is not divisible by the tensor-parallel size {tp}")
    if request.number("VOCABULARY_MULTIPLE") % tp:
        refuse("tensor-size", f"the tensor-parallel size must divide VOCABULARY_MULTIPLE, found {tp}")
