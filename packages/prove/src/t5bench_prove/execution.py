"""Executes the native engine's own training step for any rank of any number, in one process and without arithmetic.

PyTorch's fake process group stands for the other ranks, which answer nothing. What the rank sends and allocates is
noted and compared with the cost model, collective by collective.
"""

import contextlib
import os
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from native.model import mesh_of
from native.parallel import Mesh
from native.pipeline_parallel import Messages
from native.trainers import PipelineTrainer, TorchTrainer, ZeroTrainer
from t5bench import Problem
from t5bench.costmodel import traffic
from t5bench.costmodel.job import Job, beyond_native
from t5bench.costmodel.memory import memory_of
from t5bench.imports import import_deepspeed
from t5bench_prove.hollow import HollowTensors
from t5bench_prove.proof import Report, Watch

WARM_UP = 2  # DDP arranges its buckets anew after the first step, and ZeRO-3 prefetches from the second step on
KINDS = {
    "allreduce_": "all-reduce", "_allgather_base_": "all-gather", "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter", "reduce_scatter_tensor_coalesced_": "reduce-scatter", "reduce_": "reduce",
    "broadcast_": "broadcast", "send": "send", "recv_": "receive", "barrier": "barrier",
}  # fmt: skip
INPUTS = {"reduce-scatter"}  # whose second argument, what goes in, is the larger one


@dataclass(frozen=True)
class ExecutedCollective:
    """One collective of a rank, as its group sees it."""

    kind: str
    ranks: tuple[int, ...]  # the group; of a message its sender and its receiver
    bytes: int

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:4])) + (", ..." if len(self.ranks) > 4 else "")
        return f"{self.kind} of {self.bytes:,} bytes among {len(self.ranks)} ranks ({shown})"


@dataclass(frozen=True)
class Execution:
    """What one training step of a rank did."""

    rank: int
    collectives: Counter[ExecutedCollective]
    allocated: int  # bytes between iterations, CPU memory of an offload included
    peak: int


@dataclass(frozen=True)
class OtherCount:
    """A collective that the step makes another number of times than the model says."""

    collective: ExecutedCollective
    executed: int
    predicted: int

    def __str__(self) -> str:
        return f"{self.collective}: executed {self.executed} times, predicted {self.predicted}"


class StepFailed(Exception):
    """A step that ended in an exception of the trainer's; its text is a finding."""


def execute(job: Job, rank: int, watch: Watch | None = None) -> Execution:
    """One training step of a rank, after WARM_UP steps. Raises Problem if the native engine cannot train the job.

    watch: follows that step's gradients. Raises StepFailed.
    """
    reason = unsupported(job)
    if reason:
        raise Problem(f"the native engine's step cannot be executed: {reason}", "Choose another layout or engine")
    if not 0 <= rank < job.parallel.world:
        raise Problem(f"rank {rank} is not one of {job.parallel.world}", "Choose a rank that exists")
    with joined(job, rank):
        arguments = native_arguments(job, rank)
        mesh = mesh_of(arguments)
        tracker = TotalMemory()
        collectives = Collectives()
        following = watch.following() if watch else contextlib.nullcontext()
        with GpuKernels(), HollowTensors(), collectives, following:
            with tracker:
                trainer = make_trainer(arguments, mesh)
                batch = tokens(job, arguments)
                for _ in range(WARM_UP):
                    take_step(trainer, batch, arguments.lr)
            collectives.seen.clear()
            if watch:
                watch.begin(trainer, batch)
            with tracker:  # which forgets the peak of the steps before
                take_step(trainer, batch, arguments.lr)
            if watch:
                watch.end()
            peak, allocated = (tracker.get_tracker_snapshot(kind) for kind in ("peak", "current"))
        return Execution(
            rank,
            collectives.seen,
            allocated=allocated[arguments.device]["Total"],
            peak=peak[arguments.device]["Total"],
        )


def take_step(trainer: TorchTrainer, batch: tuple[torch.Tensor, ...], rate: float) -> None:
    """Raises StepFailed."""
    try:
        trainer.step(batch, rate)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        said = f"the step ends in {type(error).__name__}: {error} ({where})"
        parameters = dict(trainer.model.named_parameters())
        without = [name for name, parameter in parameters.items() if parameter.grad is None]
        if without:
            said += f"; {len(without)} of {len(parameters)} parameters have no gradient then, among them {without[0]}"
        raise StepFailed(said) from error


def watched(job: Job, rank: int) -> tuple[Report, list[str]]:
    """What a rank's step does with its gradients, and its collectives that the cost model does not have, or has.

    Raises Problem.
    """
    watch = Watch(job, rank)
    try:
        execution = execute(job, rank, watch)
    except StepFailed as failure:
        return Report(findings=[str(failure)]), []
    return watch.report, [str(difference) for difference in differences(job, execution)]


def unsupported(job: Job) -> str:
    """Why the native engine cannot train a job; "" if it can."""
    parallel = job.parallel
    zero = job.zero.stage > 0
    if not (job.architecture.cross_attention or job.architecture.family == "gpt"):
        return "it trains T5 and GPT-2 alone"
    if job.engine != "native":
        return "only the native engine's step can be executed (ENGINE=native)"
    if job.recompute != "none":
        return "it does not recompute activations"
    is_fp16 = job.precision == "fp16"
    has_fsdp2 = job.fully_sharded is not None
    return beyond_native(parallel.tensor, parallel.pipeline, zero, job.micro_batches, is_fp16, has_fsdp2)


@contextlib.contextmanager
def joined(job: Job, rank: int) -> Iterator[None]:
    """This process is a rank of a fake process group."""
    if dist.is_initialized():
        raise Problem("this process is in a process group already", "Execute in a process of its own")
    world = job.parallel.world
    environment = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in environment.items()}, DS_ACCELERATOR="cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        if job.zero.stage:
            import_deepspeed()
            believe_other_ranks()
        yield
    finally:
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def believe_other_ranks() -> None:
    """DeepSpeed's ZeRO-3 compares the order of its modules with rank 0's, which does not exist here.

    And ZeRO leaves out an update whose gradient norm is not finite, but here the norm is any number.
    """
    import deepspeed.comm.comm as communication
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3, stage_1_and_2

    for module in (partition_parameters, partitioned_param_coordinator, stage3):
        module.assert_ints_same_as_other_ranks = lambda _: None
    for module in (stage_1_and_2, stage3):
        module.is_invalid_grad_norm = lambda _: False  # DeepSpeed 0.18.3 does not ask this
    communication.cdb = None  # the process group of an execution before


def native_arguments(job: Job, rank: int) -> Namespace:
    """What the native engine's trainers read of its command line."""
    a = job.architecture
    parallel = job.parallel
    has_encoder = a.family == "t5"
    return Namespace(
        model_description=a.description() if a.kind else None, sequence_parallel=parallel.sequence_parallel,
        family=a.family, recompute_granularity=None, num_layers=a.encoder_layers or a.decoder_layers,
        encoder_num_layers=a.encoder_layers, decoder_num_layers=a.decoder_layers if has_encoder else 0,
        hidden_size=a.hidden,
        num_attention_heads=a.heads, kv_channels=a.head_size, ffn_hidden_size=a.ffn,
        encoder_seq_length=a.encoder_length, decoder_seq_length=a.decoder_length, seq_length=a.decoder_length,
        max_position_embeddings=a.position_rows, padded_vocab_size=a.padded_vocabulary, pad_token=0,
        # A GPU's fused attention keeps no mask; a CPU has no such kernel with dropout.
        attention_dropout=0.0, hidden_dropout=job.dropout,
        pipeline_model_parallel_split_rank=parallel.decoder_stage,
        pipeline_schedule=parallel.schedule, virtual_pipeline_stages=parallel.virtual_stages,
        no_bias_gelu_fusion=False, init_method_std=0.02, compile=False, seed=1234,
        micro_batch_size=job.micro_batch, global_batch_size=job.global_batch, micro_batches=job.micro_batches,
        tp=parallel.tensor, pp=parallel.pipeline, dp=parallel.data, rank=rank, world_size=parallel.world,
        lr=1e-4, weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-8, clip_grad=1.0,
        dtype=torch.bfloat16 if job.precision == "bf16" else torch.float32, device=torch.device("cpu"),
        deepspeed=job.zero.stage > 0, deepspeed_json=deepspeed_json(job),
        zero_reduce_once=job.zero.reduce_once, fsdp2=job.fully_sharded is not None,
        fsdp2_keep_parameters=bool(job.fully_sharded and job.fully_sharded.keeps_parameters),
        fsdp2_shard_size=parallel.shards,
    )  # fmt: skip


def deepspeed_json(job: Job) -> dict[str, Any]:
    """DeepSpeed's configuration of a job, as the launchers complete ds_configs/."""
    zero = job.zero
    options: dict[str, Any] = {
        "stage": zero.stage,
        "overlap_comm": zero.overlap,
        "reduce_bucket_size": zero.reduce_bucket,
        "stage3_prefetch_bucket_size": zero.prefetch_bucket,
        "stage3_max_live_parameters": zero.live_parameters,
        "stage3_max_reuse_distance": zero.reuse_distance,
        "stage3_param_persistence_threshold": zero.persistence_threshold,
    }
    if zero.offload_optimizer:
        options["offload_optimizer"] = {"device": "cpu"}
    if zero.offload_parameters:
        options["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": job.precision == "bf16"},
        "zero_optimization": options,
    }
    if zero.reduction:
        config["communication_data_type"] = zero.reduction
    return config


def make_trainer(arguments: Namespace, mesh: Mesh) -> TorchTrainer:
    if arguments.deepspeed:
        return ZeroTrainer(arguments, mesh)
    if arguments.fsdp2:
        from native.fsdp2 import FSDP2Trainer  # older versions of PyTorch lack it

        return FSDP2Trainer(arguments, mesh)
    trainer = (PipelineTrainer if arguments.pp > 1 else TorchTrainer)(arguments, mesh)
    for replica in trainer.replicas:
        # The fake group's own answer holds no tensor, which DDP would not accept.
        replica.register_comm_hook(replica.process_group, _reduce_bucket)
    if isinstance(trainer, PipelineTrainer):
        _forget_what_is_sent(trainer.messages)
    return trainer


def _forget_what_is_sent(messages: Messages) -> None:
    """A message of the fake group never says that it has arrived."""
    send = messages.send

    def send_and_forget(way: str, tensor: torch.Tensor) -> None:
        send(way, tensor)
        messages.sent.clear()

    messages.__dict__["send"] = send_and_forget


def _reduce_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # A hook replaces both things that DDP does with a bucket.
    dist.all_reduce(bucket.buffer().div_(group.size()), group=group)
    answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    answer.set_result(bucket.buffer())
    return answer


def tokens(job: Job, arguments: Namespace) -> tuple[torch.Tensor, ...]:
    """An iteration's encoder tokens, if there is an encoder, decoder tokens and labels."""
    lengths = [job.architecture.decoder_length] * 2
    if job.architecture.encoder_layers:
        lengths.insert(0, job.architecture.encoder_length)
    samples = job.micro_batch * job.micro_batches
    return tuple(torch.ones(samples, length, dtype=torch.int64) for length in lengths)


class GpuKernels(TorchFunctionMode):
    """What a GPU's kernels keep. A CPU's dropout keeps its mask in the activations' precision, a GPU's in one byte. A
    CPU's RMS norm is several operators, which keep their results; a GPU's keeps its input, as a layer norm does."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.dropout and kwargs["p"] > 0:
            return torch.native_dropout(args[0], kwargs["p"], kwargs["training"])[0]
        if function is torch.nn.functional.rms_norm:
            return torch.native_layer_norm(*args, kwargs["weight"], None, kwargs["eps"])[0]
        return function(*args, **kwargs)


class NoModules(ModTracker):
    """PyTorch's tracker of modules without its hooks on them.

    These would keep a module's inputs and outputs until their gradients are there, and what a pipeline stage received
    even longer: the memory would be measured too high.
    """

    def __enter__(self) -> "NoModules":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class TotalMemory(MemTracker):
    """PyTorch's tracker of memory without its figures of each module, which allow one forward pass alone."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = NoModules()


class Collectives(TorchDispatchMode):
    """Notes what goes through PyTorch's process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[ExecutedCollective] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.note(KINDS[function.__name__.partition(".")[0]], args)
        return function(*args, **(kwargs or {}))

    def note(self, kind: str, args: Any) -> None:
        group = next(value for value in args if isinstance(value, torch.ScriptObject))
        name = dist.ProcessGroup.unbox(group).group_name
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name))
        if len(ranks) == 1:
            return
        data = args[1] if kind in INPUTS else args[0]
        size = sum(tensor.nbytes for tensor in tree_leaves(data) if isinstance(tensor, torch.Tensor))
        if kind in ("send", "receive"):
            here = dist.get_rank()
            there = ranks[args[2]]
            ranks = [here, there] if kind == "send" else [there, here]
        self.seen[ExecutedCollective(kind, tuple(ranks), size)] += 1


def predicted(job: Job, rank: int) -> Counter[ExecutedCollective]:
    """The same of the cost model's list."""
    parallel = job.parallel
    stage = rank // (parallel.tensor * parallel.data)
    step = parallel.tensor * parallel.data  # to the same rank of the next stage
    groups = traffic.groups_of(job)
    found: Counter[ExecutedCollective] = Counter()
    for row in traffic.collectives_of(job):
        if row.kind in ("send", "send back"):
            way = step if row.kind == "send" else -step
            before = (rank - way) % parallel.world
            after = (rank + way) % parallel.world
            if stage in row.stages:
                found[ExecutedCollective("send", (rank, after), round(row.bytes))] += row.count
            if before // step in row.stages:
                found[ExecutedCollective("receive", (before, rank), round(row.bytes))] += row.count
        elif stage in row.stages:
            ranks = next(members for members in groups[row.group] if rank in members)
            found[ExecutedCollective(row.kind, ranks, round(row.bytes))] += row.count
    return found


def differences(job: Job, execution: Execution) -> list[OtherCount]:
    """The collectives that the step and the model do not make equally often."""
    expected = predicted(job, execution.rank)
    seen = execution.collectives
    names = sorted(expected.keys() | seen.keys(), key=lambda one: (one.ranks, one.kind, one.bytes))
    return [OtherCount(name, seen[name], expected[name]) for name in names if seen[name] != expected[name]]


def memory(job: Job, rank: int) -> tuple[float, float]:
    """Predicted bytes between iterations and at the peak, of what PyTorch's tracker sees: no GPU's workspaces."""
    stage = rank // (job.parallel.tensor * job.parallel.data)
    found = memory_of(replace(job, attention="fused", causal_attention="fused"), stage)
    beyond = found.states.get("workspace", 0) + found.states.get("allocator", 0)
    host = sum(found.cpu.values())
    return found.allocated - beyond + host, found.peak - beyond + host
