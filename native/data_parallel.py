"""Data parallelism by PyTorch's DDP, with which tensor parallelism combines: the trainer on which the others build."""

import inspect
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from native.data import Batch
from native.model import Model, build, initialise
from native.parallel import Layout, clip_gradients, sum_tied_gradients
from native.precision import forget_copies

# All replicas start from the same weights; PyTorch 2.4 has no option for this.
SAME_WEIGHTS = {"init_sync": False} if "init_sync" in inspect.signature(DistributedDataParallel).parameters else {}


def make_optimizer(model: Model, args: Namespace) -> torch.optim.AdamW:
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
            self.model = build(args, layout)
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
        sum_tied_gradients(self.model.tied, self.layout)
        return loss, self.update()

    def forward_backward(self, parts: list[Batch]) -> Tensor:
        """Accumulates the gradients of an iteration; the mean loss of its micro-batches, 0 on a stage without loss."""
        total = torch.zeros((), device=self.args.device)
        for number, part in enumerate(parts, 1):
            loss = mean_loss(self.forward(part), part[-1]) / len(parts)
            self.backward(loss, is_last=number == len(parts))
            total += loss.detach()
        return total

    def forward(self, part: Batch, received: Tensor | None = None) -> Tensor:
        """The model's output for a micro-batch. No gradient is all-reduced yet: see backward()."""
        if self.replica is None:
            return self.model(*part, received)
        with self.replica.no_sync():
            return self.replica(*part, received)

    def backward(self, output: Tensor, gradient: Tensor | None = None, *, is_last: bool) -> None:
        """Adds to the gradients. DDP all-reduces them only during an iteration's last backward pass."""
        if is_last and self.replica is not None:
            self.replica.reducer.prepare_for_backward([])  # what DDP's forward pass does outside no_sync()
        output.backward(gradient)

    def update(self) -> Tensor:
        """Applies the accumulated gradients and forgets them; their norm, []."""
        forget_copies()
        norm = clip_gradients(self.model, self.model.tied, self.layout, self.args.clip_grad)
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
        return mean_loss(self.model(*part), part[-1])

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
