"""One training step under each parallelism: TorchTrainer for data, tensor and pipeline, ZeroTrainer for ZeRO."""

import contextlib
import inspect
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from native import checkpoint
from native.arguments import stop
from native.model import T5, Layer, initialise
from native.parallel import Layout, Stage, clip_gradients, forget_copies, sum_tied_gradients

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # encoder input, decoder input, labels


def make_optimizer(model: T5, args: Namespace) -> torch.optim.AdamW:
    """AdamW, fused into one kernel on GPU and CPU; no decay of biases and LayerNorms."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[len(getattr(parameter, "ds_shape", parameter.shape)) > 1].append(parameter)
    decay = [{"params": group, "weight_decay": args.weight_decay * matrix} for matrix, group in groups.items()]
    betas = args.adam_beta1, args.adam_beta2
    return torch.optim.AdamW(decay, lr=args.lr, betas=betas, eps=args.adam_eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def compile_layers(model: T5, args: Namespace) -> None:
    """--compile: layer by layer, since all layers of a stack share what is compiled."""
    for module in model.modules():
        if args.compile and isinstance(module, Layer):
            module.compile()


def micro_batches(batch: Batch, count: int) -> Iterator[Batch]:
    return zip(*(tensor.chunk(count) for tensor in batch), strict=True)


def mean_loss(losses: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of a micro-batch's real tokens, []."""
    return losses.sum() / (labels >= 0).sum()


class TorchTrainer:
    """Data, tensor and pipeline parallelism in any combination.

    With --bf16 the parameters are the fp32 master weights: each iteration computes with one bf16 copy of them, and
    gradients are accumulated and reduced in fp32. Per parameter that is Megatron's 18 bytes: 4 master + 2 copy +
    4 gradient + 8 AdamW.
    """

    def __init__(self, args: Namespace, layout: Layout) -> None:
        self.args, self.layout = args, layout
        with args.device:
            self.model = T5(args, layout)
        initialise(self.model, args, layout)
        compile_layers(self.model, args)
        self.optimizer = make_optimizer(self.model, args)
        self.stage = Stage(self.model, layout, args.device) if layout.pp.size > 1 else None
        self.replica: torch.nn.Module = self.stage or self.model
        if layout.dp.size > 1:
            # All have the same weights already; PyTorch 2.4 cannot be told.
            same = {"init_sync": False} if "init_sync" in inspect.signature(DistributedDataParallel).parameters else {}
            self.replica = DistributedDataParallel(
                self.replica, process_group=layout.dp.group, gradient_as_bucket_view=True, **same
            )
        self.schedule = self.make_schedule(self.stage) if self.stage else None

    def make_schedule(self, module: Stage) -> "Schedule1F1B":
        """One forward, one backward: the encoder stage runs at most two micro-batches ahead of the decoder stage.

        Per micro-batch the encoder's output [b, s_enc, hidden] travels forward and its gradient back.
        """
        # A second of import, for pipelines alone.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

        # Before PyTorch had this, it waited for one of several messages alone, which is enough over NCCL.
        if dist.get_backend() == "gloo" and not hasattr(schedules, "_wait_batch_p2p"):
            stop(
                f"pipelines of PyTorch {torch.__version__} hang over gloo: use NCCL, a newer PyTorch or ENGINE=megatron"
            )
        args, layout = self.args, self.layout
        b, s, d = args.micro_batch_size, args.encoder_seq_length, args.decoder_seq_length
        tokens = torch.empty(b, s, dtype=torch.int64, device="meta")
        hidden = torch.empty(b, s, args.hidden_size, dtype=args.dtype, device="meta", requires_grad=True)
        losses = torch.empty(b, d, device="meta", requires_grad=True)
        inputs, outputs = (tokens, hidden) if layout.first_stage else (hidden, losses)
        # PyTorch 2.4 moves the module that it is given to the device of the exchange: it gets the real one afterwards.
        place = layout.pp.rank, layout.pp.size, module.exchange
        stage = PipelineStage(torch.nn.Identity(), *place, (inputs,), (outputs,), group=layout.pp.group)
        stage.submod = self.replica
        # The loss is divided by the number of micro-batches here; older schedules cannot, newer ones would once more.
        unscaled = {"scale_grads": False} if "scale_grads" in inspect.signature(Schedule1F1B).parameters else {}
        return Schedule1F1B(
            stage, args.micro_batches, lambda losses, labels: mean_loss(losses, labels) / args.micro_batches, **unscaled
        )

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Accumulates the gradients of an iteration; the mean loss of its micro-batches, 0 on a stage without loss."""
        count, total = self.args.micro_batches, torch.zeros((), device=self.args.device)
        if self.schedule and self.stage:
            losses: list[torch.Tensor] = []
            self.stage.tokens = micro_batches(batch, count)
            if self.layout.first_stage:
                self.schedule.step(batch[0])
            else:
                self.schedule.step(target=batch[2], losses=losses)
            return sum(losses, total).detach()
        for number, (x, y, z) in enumerate(micro_batches(batch, count), 1):
            # DDP all-reduces in the last backward alone, and while it runs.
            wait = self.replica.no_sync() if number < count and self.layout.dp.size > 1 else contextlib.nullcontext()
            with wait:
                loss = mean_loss(self.replica(x, x, y, z), z) / count
                loss.backward()
            total += loss.detach()
        return total

    def step(self, batch: Batch, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        """One iteration; (loss, gradient norm), both [] on the device. Nothing here waits for the device."""
        set_rate(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.forward_backward(batch)
        forget_copies()
        sum_tied_gradients(self.model, self.layout)
        norm = clip_gradients(self.model, self.layout, self.args.clip_grad)
        self.optimizer.step()
        return loss, norm

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The mean loss of an iteration's micro-batches, []; 0 on a stage without loss."""
        args, layout, total = self.args, self.layout, torch.zeros((), device=self.args.device)
        exchange = self.stage.exchange if self.stage else args.device
        for x, y, z in micro_batches(batch, args.micro_batches):
            encoded = x
            if not layout.first_stage:
                encoded = torch.empty(*x.shape, args.hidden_size, dtype=args.dtype, device=exchange)
                dist.recv(encoded, dist.get_global_rank(layout.pp.group, 0), layout.pp.group)
            output = self.model(encoded.to(args.device), x, y, z)
            if layout.last_stage:
                total += mean_loss(output, z) / args.micro_batches
            else:
                dist.send(output.to(exchange), dist.get_global_rank(layout.pp.group, 1), layout.pp.group)
        forget_copies()
        return total

    def save(self, directory: str, iteration: int) -> None:
        if self.layout.dp.rank == 0:
            path = checkpoint.shard_path(directory, iteration, self.layout)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load(self, directory: str, iteration: int) -> None:
        """Raises FileNotFoundError where this node lacks its part."""
        path = checkpoint.shard_path(directory, iteration, self.layout)
        state = torch.load(path, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class ZeroTrainer:
    """ZeRO-1, 2, 3 and offload, by DeepSpeed with the run's JSON; parameters in bf16 with DeepSpeed's fp32 masters."""

    def __init__(self, args: Namespace, layout: Layout) -> None:
        import deepspeed

        # DeepSpeed 0.18.3 asks for this in a backward hook, where gradients are off: PyTorch 2.4 has no answer there.
        graph = torch.autograd.graph
        graph._get_grad_fn_or_grad_acc = torch.enable_grad()(graph._get_grad_fn_or_grad_acc)
        self.args, config = args, args.deepspeed_json
        zero = config["zero_optimization"]
        # PyTorch's fused AdamW steps on CPU and GPU alike: DeepSpeed's own would have to be compiled first.
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        if args.device.type == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled too, and gloo does the same
            for part in {"offload_optimizer", "offload_param"} & zero.keys():
                zero[part]["pin_memory"] = False
        sharded = zero["stage"] == 3

        def gather(parameter: torch.nn.Parameter) -> contextlib.AbstractContextManager:
            return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=sharded)

        # ZeRO-3 takes each module's parameters apart as soon as they are made: no process ever has the whole model.
        with args.device, deepspeed.zero.Init(config_dict_or_path=config, enabled=sharded):
            model = T5(args, layout)
        initialise(model, args, layout, gather)
        if sharded:  # the head uses the embedding's weight, so it has to gather it
            embedding = model.language_model["embedding"].word_embeddings
            deepspeed.zero.register_external_parameter(model.lm_head, embedding.weight)
        compile_layers(model, args)
        optimizer = make_optimizer(model, args)
        self.model, self.optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, batch: Batch, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        """One iteration; (loss, gradient norm), both [] on the device."""
        set_rate(self.optimizer, rate)
        total = torch.zeros((), device=self.args.device)
        for x, y, z in micro_batches(batch, self.args.micro_batches):
            loss = mean_loss(self.model(x, x, y, z), z)
            self.model.backward(loss)  # divides by the number of micro-batches
            self.model.step()  # updates after the last one
            total += loss.detach() / self.args.micro_batches
        norm = torch.as_tensor(self.model.get_global_grad_norm(), dtype=torch.float32, device=self.args.device)
        return total, norm

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The mean loss of an iteration's micro-batches, []."""
        losses = [mean_loss(self.model(x, x, y, z), z) for x, y, z in micro_batches(batch, self.args.micro_batches)]
        return torch.stack(losses).mean()

    def save(self, directory: str, iteration: int) -> None:
        self.model.save_checkpoint(directory, tag=checkpoint.name_of(iteration), save_latest=False)

    def load(self, directory: str, iteration: int) -> None:
        """Raises FileNotFoundError where this node lacks its part."""
        if not (path := Path(directory) / checkpoint.name_of(iteration)).is_dir():
            raise FileNotFoundError(path)
        self.model.load_checkpoint(directory, tag=path.name)
