"""Data parallelism by PyTorch's DDP, with which tensor parallelism combines: the trainer on which the others build."""

import inspect
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from native.data import Batch
from native.model import Model, build, initialise, parts_of, shape_of
from native.parallel import Mesh, clip_gradients, sum_tied_gradients
from native.precision import forget_copies
from native.sequence_parallel import sum_sequence_gradients

# All replicas start from the same weights, so DDP need not broadcast them; PyTorch 2.4 has no option for this.
CAN_SKIP_BROADCAST = "init_sync" in inspect.signature(DistributedDataParallel).parameters


def make_optimizer(model: Model, args: Namespace) -> torch.optim.AdamW:
    """AdamW, fused into one kernel on GPU and CPU; no decay of biases and LayerNorms."""
    matrices = []
    vectors = []
    for parameter in model.parameters():
        if len(shape_of(parameter)) > 1:
            matrices.append(parameter)
        else:
            vectors.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=args.lr, betas=betas, eps=args.adam_eps, fused=True)


def split_batch(batch: Batch, args: Namespace) -> list[Batch]:
    """The micro-batches of an iteration's batch: [samples, length] tensors into [micro-batch size, length] ones."""
    chunks = [tensor.chunk(args.micro_batches) for tensor in batch]
    return list(zip(*chunks, strict=True))


def mean_loss(losses: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a micro-batch's real tokens, []."""
    return losses.sum() / (labels >= 0).sum()


class TorchTrainer:
    """Data and tensor parallelism.

    With --bf16 the parameters are the fp32 master weights: each iteration computes with one bf16 copy of them, and
    gradients are accumulated and reduced in fp32. Per parameter that is Megatron's 18 bytes: 4 master + 2 copy +
    4 gradient + 8 AdamW.
    """

    def __init__(self, args: Namespace, mesh: Mesh) -> None:
        self.args = args
        self.mesh = mesh
        with args.device:
            self.model = build(args, mesh)
        initialise(self.model, args, mesh)
        self.optimizer = make_optimizer(self.model, args)
        self.parts = parts_of(self.model)
        self.replicas: list[DistributedDataParallel] = []
        """Of each part; none without other replicas."""
        if mesh.dp.size > 1:
            options = {"process_group": mesh.dp.group, "gradient_as_bucket_view": True}
            if CAN_SKIP_BROADCAST:
                options["init_sync"] = False
            self.replicas = [DistributedDataParallel(part, **options) for part in self.parts]

    def step(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor]:
        """One iteration; (loss, gradient norm), both [] on the device. Nothing here waits for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.forward_backward(split_batch(batch, self.args))
        sum_tied_gradients(self.model.tied)
        sum_sequence_gradients(self.model.parameters(), self.mesh)
        norm = self.update()
        return loss, norm

    def forward_backward(self, micro_batches: list[Batch]) -> Tensor:
        """Accumulates the gradients of an iteration; the mean loss of its micro-batches, 0 on a stage without loss."""
        total = torch.zeros((), device=self.args.device)
        for number, micro_batch in enumerate(micro_batches, 1):
            loss = mean_loss(self.forward(micro_batch), micro_batch[-1]) / len(micro_batches)
            self.backward(loss, is_last=number == len(micro_batches))
            total += loss.detach()
        return total

    def forward(self, micro_batch: Batch, received: Tensor | None = None, part: int = 0) -> Tensor:
        """A part's output for a micro-batch. No gradient is all-reduced yet: see backward()."""
        if not self.replicas:
            return self.parts[part](*micro_batch, received)
        with self.replicas[part].no_sync():
            return self.replicas[part](*micro_batch, received)

    def backward(self, output: Tensor, gradient: Tensor | None = None, *, is_last: bool, part: int = 0) -> None:
        """Adds to the gradients. DDP all-reduces them only during a part's last backward pass of an iteration."""
        if is_last and self.replicas:
            self.replicas[part].reducer.prepare_for_backward([])  # what DDP's forward pass does outside no_sync()
        output.backward(gradient)

    def update(self) -> Tensor:
        """Applies the accumulated gradients and forgets them; their norm, []."""
        forget_copies()
        norm = clip_gradients(self.model, self.model.tied, self.mesh, self.args.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The mean loss of an iteration's micro-batches, []; 0 on a stage without loss."""
        losses = [self.loss(micro_batch) for micro_batch in split_batch(batch, self.args)]
        forget_copies()
        return torch.stack(losses).mean()

    def loss(self, micro_batch: Batch) -> Tensor:
        """A micro-batch's mean loss, []."""
        return mean_loss(self.model(*micro_batch), micro_batch[-1])

    def shard(self, directory: Path) -> Path:
        """The file with the weights of this tensor- and pipeline-parallel rank, by Megatron's naming."""
        folder = f"mp_rank_{self.mesh.tp.rank:02d}"
        if self.mesh.pp.size > 1:
            folder += f"_{self.mesh.pp.rank:03d}"
        return directory / folder / "model_optim_rng.pt"

    def save(self, directory: Path) -> None:
        if self.mesh.dp.rank == 0:
            path = self.shard(directory)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load(self, directory: Path) -> None:
        state = torch.load(self.shard(directory), map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
