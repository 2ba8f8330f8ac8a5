"""One training step under each parallelism: TorchTrainer for data and tensor, PipelineTrainer with two pipeline stages
as well, ZeroTrainer for ZeRO."""

import inspect
from argparse import Namespace
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from native.data import Batch
from native.model import T5, initialise
from native.parallel import Layout, clip_gradients, forget_copies, sum_tied_gradients

# All replicas start from the same weights; PyTorch 2.4 has no option for this.
SAME_WEIGHTS = {"init_sync": False} if "init_sync" in inspect.signature(DistributedDataParallel).parameters else {}


def make_optimizer(model: T5, args: Namespace) -> torch.optim.AdamW:
    """AdamW, fused into one kernel on GPU and CPU; no decay of biases and LayerNorms."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[len(getattr(parameter, "ds_shape", parameter.shape)) > 1].append(parameter)
    decay = [{"params": group, "weight_decay": args.weight_decay * matrix} for matrix, group in groups.items()]
    betas = args.adam_beta1, args.adam_beta2
    return torch.optim.AdamW(decay, lr=args.lr, betas=betas, eps=args.adam_eps, fused=True)


def micro_batches(batch: Batch, args: Namespace) -> list[Batch]:
    return list(zip(*(tensor.chunk(args.micro_batches) for tensor in batch), strict=True))


def mean_loss(losses: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a micro-batch's real tokens, []."""
    return losses.sum() / (labels >= 0).sum()


class TorchTrainer:
    """Data and tensor parallelism.

    With --bf16 the parameters are the fp32 master weights: each iteration computes with one bf16 copy of them, and
    gradients are accumulated and reduced in fp32. Per parameter that is Megatron's 18 bytes: 4 master + 2 copy +
    4 gradient + 8 AdamW.
    """

    def __init__(self, args: Namespace, layout: Layout) -> None:
        self.args, self.layout = args, layout
        with args.device:
            self.model = T5(args, layout)
        initialise(self.model, args, layout)
        self.optimizer = make_optimizer(self.model, args)
        self.replica: DistributedDataParallel | None = None
        if layout.dp.size > 1:
            options = {"process_group": layout.dp.group, "gradient_as_bucket_view": True, **SAME_WEIGHTS}
            self.replica = DistributedDataParallel(self.model, **options)

    def step(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor]:
        """One iteration; (loss, gradient norm), both [] on the device. Nothing here waits for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.forward_backward(micro_batches(batch, self.args))
        return loss, self.update()

    def forward_backward(self, parts: list[Batch]) -> Tensor:
        """Accumulates the gradients of an iteration; the mean loss of its micro-batches, 0 on a stage without loss."""
        total = torch.zeros((), device=self.args.device)
        for number, part in enumerate(parts, 1):
            loss = mean_loss(self.forward(part), part[2]) / len(parts)
            self.backward(loss, is_last=number == len(parts))
            total += loss.detach()
        return total

    def forward(self, part: Batch, encoded: Tensor | None = None) -> Tensor:
        """The model's output for a micro-batch. No gradient is all-reduced yet: see backward()."""
        if self.replica is None:
            return self.model(*part, encoded)
        with self.replica.no_sync():
            return self.replica(*part, encoded)

    def backward(self, output: Tensor, gradient: Tensor | None = None, *, is_last: bool) -> None:
        """Adds to the gradients. DDP all-reduces them only during an iteration's last backward pass."""
        if is_last and self.replica is not None:
            self.replica.reducer.prepare_for_backward([])  # what DDP's forward pass does outside no_sync()
        output.backward(gradient)

    def update(self) -> Tensor:
        """Applies the accumulated gradients and forgets them; their norm, []."""
        forget_copies()
        sum_tied_gradients(self.model, self.layout)
        norm = clip_gradients(self.model, self.layout, self.args.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The mean loss of an iteration's micro-batches, []; 0 on a stage without loss."""
        losses = [self.loss(part) for part in micro_batches(batch, self.args)]
        forget_copies()
        return torch.stack(losses).mean()

    def loss(self, part: Batch) -> Tensor:
        """A micro-batch's mean loss, []."""
        return mean_loss(self.model(*part), part[2])

    def shard(self, directory: Path) -> Path:
        """Where a checkpoint has the weights of this tensor- and pipeline-parallel rank, by Megatron's naming."""
        stage = f"_{self.layout.pp.rank:03d}" if self.layout.pp.size > 1 else ""
        return directory / f"mp_rank_{self.layout.tp.rank:02d}{stage}" / "model_optim_rng.pt"

    def save(self, directory: Path) -> None:
        if self.layout.dp.rank == 0:
            self.shard(directory).parent.mkdir(parents=True, exist_ok=True)
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self.shard(directory))

    def load(self, directory: Path) -> None:
        state = torch.load(self.shard(directory), map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class PipelineTrainer(TorchTrainer):
    """Encoder and decoder on separate processes, with data and tensor parallelism within each.

    One forward, one backward (1F1B): the encoder is at most two micro-batches ahead of the decoder. Per micro-batch the
    encoder's output [b, s_enc, hidden] travels forward and its gradient back; every stage has the tokens itself.
    """

    def forward_backward(self, parts: list[Batch]) -> Tensor:
        return self.decode(parts) if self.layout.last_stage else self.encode(parts)

    def encode(self, parts: list[Batch]) -> Tensor:
        outputs: list[Tensor] = []
        for number, part in enumerate(parts, 1):
            outputs.append(self.forward(part))
            gradient = self.exchange(outputs[-1], receives=number > 1)
            if gradient is not None:
                self.backward(outputs.pop(0), gradient, is_last=False)
        self.backward(outputs.pop(), self.exchange(receives=True), is_last=True)
        return torch.zeros((), device=self.args.device)

    def decode(self, parts: list[Batch]) -> Tensor:
        total, encoded = torch.zeros((), device=self.args.device), self.exchange(receives=True)
        for number, part in enumerate(parts, 1):
            encoded.requires_grad_()
            loss = mean_loss(self.forward(part, encoded), part[2]) / len(parts)
            self.backward(loss, is_last=number == len(parts))
            encoded = self.exchange(encoded.grad, receives=number < len(parts))
            total += loss.detach()
        return total

    def exchange(self, sent: Tensor | None = None, *, receives: bool = False) -> Tensor | None:
        """Sends to the other stage and receives from it at once; otherwise each would wait for the other's message."""
        args, pp = self.args, self.layout.pp
        other = dist.get_global_rank(pp.group, 1 - pp.rank)
        place = "cpu" if dist.get_backend() == "gloo" else args.device  # gloo sends only from host memory
        shape = args.micro_batch_size, args.encoder_seq_length, args.hidden_size
        received = torch.empty(shape, dtype=args.dtype, device=place) if receives else None
        operations = [dist.P2POp(dist.irecv, received, other, pp.group)] if receives else []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent.detach().to(place), other, pp.group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received.to(args.device) if receives else None

    def loss(self, part: Batch) -> Tensor:
        if self.layout.last_stage:
            return mean_loss(self.model(*part, self.exchange(receives=True)), part[2])
        self.exchange(self.model(*part))
        return torch.zeros((), device=self.args.device)


class ZeroTrainer(TorchTrainer):
    """ZeRO-1, 2, 3 and offload, by DeepSpeed with the run's JSON; parameters in bf16 with DeepSpeed's fp32 masters."""

    def __init__(self, args: Namespace, layout: Layout) -> None:
        import deepspeed

        self.args, config = args, args.deepspeed_json
        zero = config["zero_optimization"]
        # PyTorch's fused AdamW steps on CPU and GPU alike: DeepSpeed's own would have to be compiled first.
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        if args.device.type == "cpu":
            for part in {"offload_optimizer", "offload_param"} & zero.keys():
                zero[part]["pin_memory"] = False
        sharded = zero["stage"] == 3

        def gather(parameter: torch.nn.Parameter) -> AbstractContextManager:
            return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=sharded)

        # ZeRO-3 partitions each module's parameters as soon as they exist: no process ever has the whole model.
        with args.device, deepspeed.zero.Init(config_dict_or_path=config, enabled=sharded):
            model = T5(args, layout)
        initialise(model, args, layout, gather)
        if sharded:  # the head uses the embedding's weight, so it has to gather it
            embedding = model.language_model["embedding"].word_embeddings
            deepspeed.zero.register_external_parameter(model.lm_head, embedding.weight)
        optimizer = make_optimizer(model, args)
        self.model, self.optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def forward_backward(self, parts: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self.args.device)
        for part in parts:
            loss = self.loss(part)
            self.model.backward(loss)  # divides by the number of micro-batches
            self.model.step()  # updates after the last one
            total += loss.detach() / len(parts)
        return total

    def update(self) -> Tensor:
        return torch.as_tensor(self.model.get_global_grad_norm(), dtype=torch.float32, device=self.args.device)

    def save(self, directory: Path) -> None:
        self.model.save_checkpoint(str(directory.parent), tag=directory.name, save_latest=False)

    def load(self, directory: Path) -> None:
        self.model.load_checkpoint(str(directory.parent), tag=directory.name)
