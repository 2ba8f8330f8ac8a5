"""The trainer's layouts on two processes: how samples, tokens, layers or weights are divided, and what is added up."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gate_score.trainer import IGNORED, VOCABULARY, Batch, Model, Recipe, Trainer


class SumBackward(torch.autograd.Function):
    """Before divided weights: the gradients of the ranks' parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


class SumForward(torch.autograd.Function):
    """Behind divided weights: the ranks' parts are added up, and each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Gather(torch.autograd.Function):
    """All ranks' parts of a dimension; backward, the sum of what the ranks have for this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scattered(gradient, ctx.dim), None


class Scatter(torch.autograd.Function):
    """This rank's part of the ranks' sum; backward, all ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return scattered(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.dim), None


def summed(x: Tensor) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def gathered(x: Tensor, dim: int) -> Tensor:
    world = dist.get_world_size()
    whole = x.new_empty((world * x.shape[dim], *x.transpose(0, dim).shape[1:]))
    dist.all_gather_into_tensor(whole, x.detach().transpose(0, dim).contiguous())
    return whole.transpose(0, dim)


def scattered(x: Tensor, dim: int) -> Tensor:
    moved = x.detach().transpose(0, dim).contiguous()
    part = moved.new_empty((moved.shape[0] // dist.get_world_size(), *moved.shape[1:]))
    dist.reduce_scatter_tensor(part, moved)
    return part.transpose(0, dim)


def total_of(value: float) -> float:
    return float(summed(torch.tensor(value, dtype=torch.float64)))


class Parallel(Trainer):
    """What all layouts of several ranks share."""

    def __init__(self, recipe: Recipe) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        super().__init__(recipe)


class DataParallel(Parallel):
    """Each rank has its own samples, and gradients are added up once a step."""

    layout = "data"

    def own(self, whole: Batch) -> Batch:
        size = len(whole.tokens) // self.world
        return whole.samples(slice(self.rank * size, (self.rank + 1) * size))

    def count(self, batches: list[Batch]) -> float:
        return total_of(super().count(batches))

    def reduce(self) -> None:
        for name, parameter in self.parameters():
            self.reduce_one(name, parameter.grad)

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        dist.all_reduce(gradient)

    def reported(self, own: float) -> float:
        return total_of(own)

    def own_loss(self, own: float) -> float | None:
        return own * self.world


class Zero1(DataParallel):
    """As DataParallel, but each rank updates its part of all parameters, which lie one behind another."""

    layout = "zero1"

    def pieces(self, length: int) -> list[tuple[int, int]]:
        """The parts of so many elements, by rank; the last may be shorter."""
        size = -(-length // self.world)
        return [(min(rank * size, length), min((rank + 1) * size, length)) for rank in range(self.world)]

    def decays(self) -> Tensor:
        """Of each element."""
        return torch.cat([torch.full((one.numel(),), self.decay(name, one)) for name, one in self.parameters()])

    def update(self, step: int) -> None:
        parameters = [parameter for _, parameter in self.parameters()]
        weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        gradients = torch.cat([parameter.grad.flatten() for parameter in parameters])
        start, end = self.pieces(len(weights))[self.rank]
        piece = weights[start:end].clone()
        state = self.optimizer.of("piece", piece)
        self.adamw(piece, gradients[start:end], state, self.rate(step), self.decays()[start:end])
        whole = self.gather_pieces(piece, len(weights))
        for parameter, values in zip(parameters, whole.split([one.numel() for one in parameters]), strict=True):
            parameter.detach().copy_(values.view_as(parameter))

    def gather_pieces(self, piece: Tensor, length: int) -> Tensor:
        pieces = self.pieces(length)
        size = pieces[0][1]
        padded = torch.cat([piece, piece.new_zeros(size - len(piece))])
        return gathered(padded, 0)[:length]

    def saved_states(self, parameters: dict[str, nn.Parameter]) -> dict[str, Any]:
        return {key: dict(value) | _copies(value) for key, value in self.optimizer.state.items()}

    def load_states(self, states: dict[str, Any]) -> None:
        self.optimizer.state = {key: dict(value) | _copies(value) for key, value in states.items()}


def _copies(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}


class FullySharded(DataParallel):
    """PyTorch's FSDP2, which averages gradients over the ranks: so each rank's loss is multiplied by their number."""

    layout = "fsdp2"

    def wrap(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in self.model.blocks:
            fully_shard(block, **self.options())
        fully_shard(self.model, **self.options())

    def options(self) -> dict[str, Any]:
        return {}

    def scaled(self, loss: Tensor, total: float) -> Tensor:
        return super().scaled(loss, total) * self.world

    def reduce(self) -> None:
        """FSDP2 has done it."""

    def norm(self) -> Tensor:
        return summed(super().norm().square()).sqrt()

    def reported(self, own: float) -> float:
        return total_of(own) / self.world

    def own_loss(self, own: float) -> float | None:
        return own


DIVIDED = {"qkv.weight": 0, "qkv.bias": 0, "out.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1}
DIVIDED |= {"embedding.weight": 0}


class TensorParallel(Parallel):
    """Heads, the inner layer and the vocabulary are divided; each rank has all samples."""

    layout = "tensor"

    @property
    def divided(self) -> int:
        return self.world

    def dim(self, name: str) -> int | None:
        """The dimension along which ranks divide a parameter; None if each has all of it."""
        return next((dim for ending, dim in DIVIDED.items() if name.endswith(ending)), None)

    def part_of(self, name: str) -> tuple[int, list[tuple[int, int]]] | None:
        dim = self.dim(name)
        if dim is None:
            return None
        blocks = 3 if "qkv" in name else 1
        length = self.model.get_parameter(name).shape[dim] // blocks
        return dim, [((block * self.world + self.rank) * length, length) for block in range(blocks)]

    def whole_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        shape = list(parameter.shape)
        dim = self.dim(name)
        if dim is not None:
            shape[dim] *= self.world
        return tuple(shape)

    def slice_of(self, name: str, whole: Tensor) -> Tensor:
        dim = self.dim(name)
        if dim is None:
            return whole
        blocks = whole.chunk(3 if "qkv" in name else 1, dim)  # each rank has its part of q, of k and of v
        return torch.cat([block.chunk(self.world, dim)[self.rank] for block in blocks], dim)

    def enter(self, x: Tensor) -> Tensor:
        return SumBackward.apply(x)

    def leave(self, x: Tensor) -> Tensor:
        return SumForward.apply(x)

    def words(self, model: Model, batch: Batch) -> Tensor:
        own, is_own = self.own_words(batch.tokens)
        return model.embedding(own) * is_own[..., None]

    def own_words(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Their numbers in this rank's part of the vocabulary, 0 for others, and which it has."""
        size = VOCABULARY // self.world
        own = tokens - self.rank * size
        is_own = (own >= 0) & (own < size)
        return own * is_own, is_own

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits: of this rank's part of the vocabulary."""
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest[..., None]
        own, is_own = self.own_words(labels.clamp(min=0))
        target = SumForward.apply(logits.gather(-1, own[..., None])[..., 0] * is_own)
        normalizer = SumForward.apply(self.exponentials(logits)).log()
        mean = self.mean_of_vocabulary(logits)
        smoothing = self.recipe.smoothing
        losses = normalizer - (1 - smoothing) * target - smoothing * mean
        return (losses * (labels != IGNORED)).sum()

    def exponentials(self, logits: Tensor) -> Tensor:
        return logits.exp().sum(-1)

    def mean_of_vocabulary(self, logits: Tensor) -> Tensor:
        return SumForward.apply(logits.sum(-1)) / VOCABULARY

    def norm(self) -> Tensor:
        squares = {name: self.squares(name, parameter) for name, parameter in self.parameters()}
        once = torch.stack([square for name, square in squares.items() if not self.is_slice(name)]).sum()
        of_slices = torch.stack([square for name, square in squares.items() if self.is_slice(name)]).sum()
        return (once + self.total_of_slices(of_slices)).sqrt()

    def total_of_slices(self, squares: Tensor) -> Tensor:
        return summed(squares)


class SequenceParallel(TensorParallel):
    """As TensorParallel, but between divided weights each rank has a part of the tokens."""

    layout = "sequence"

    def enter(self, x: Tensor) -> Tensor:
        return Gather.apply(x, 1)

    def leave(self, x: Tensor) -> Tensor:
        return Scatter.apply(x, 1)

    def part(self, tokens: int) -> slice:
        size = tokens // self.world
        return slice(self.rank * size, (self.rank + 1) * size)

    def positions(self, batch: Batch) -> Tensor:
        return batch.positions[:, self.part(batch.positions.shape[1])]

    def mask(self, place: int, x: Tensor, batch: Batch) -> Tensor:
        return self.masks[place][batch.ids][:, self.part(self.masks[place].shape[1])]

    def reduce(self) -> None:
        """What each rank has whole was used for its tokens alone."""
        for name, parameter in self.parameters():
            if not self.is_slice(name):
                self.reduce_one(name, parameter.grad)

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        dist.all_reduce(gradient)


class ContextParallel(Parallel):
    """Each rank has a part of the tokens of every sample, and all keys and values."""

    layout = "context"

    def own(self, whole: Batch) -> Batch:
        size = whole.tokens.shape[1] // self.world
        return whole.part(self.rank * size, (self.rank + 1) * size)

    def keys(self, x: Tensor) -> Tensor:
        return Gather.apply(x, 2)

    def count(self, batches: list[Batch]) -> float:
        return total_of(super().count(batches))

    def reduce(self) -> None:
        for _, parameter in self.parameters():
            dist.all_reduce(parameter.grad)

    def reported(self, own: float) -> float:
        return total_of(own)

    def own_loss(self, own: float) -> float | None:
        return own * self.world


class Pipeline(Parallel):
    """The first rank has the words and the first block, the second the rest, with a copy of the words' table."""

    layout = "pipeline"

    def wrap(self) -> None:
        own = dict(self.parameters())
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in own)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if name == "embedding.weight" or self.is_first == name.startswith(("positions", "blocks.0")):
                yield name, parameter

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def forward_backward(self, batches: list[Batch], total: float) -> float:
        """GPipe: all forward passes, then all backward passes."""
        sent = [self.forward(batch) for batch in batches]
        own = 0.0
        for number, (batch, (x, y)) in enumerate(zip(batches, sent, strict=True)):
            own += self.backward_of(number, batch, x, y, total)
        return own

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What a stage got, and what it made: the first stage's activations, the last one's loss."""
        if self.is_first:
            x = self.embed(self.model, batch)
            y = self.run(self.model.blocks[0], x, batch, 0)
            dist.send(self.message(y), 1)
            return x, y
        x = torch.empty(*batch.tokens.shape, self.recipe.width, dtype=self.message_dtype())
        dist.recv(x, 0)
        x = x.to(self.dtype).requires_grad_()
        y = self.run(self.model.blocks[1], x, batch, 1)
        return x, self.head(self.model, y, batch)

    def message(self, y: Tensor) -> Tensor:
        return y.detach().to(self.message_dtype()).contiguous()

    def message_dtype(self) -> torch.dtype:
        return self.dtype

    def backward_of(self, number: int, batch: Batch, x: Tensor, y: Tensor, total: float) -> float:
        if self.is_first:
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
            return 0.0
        loss = self.scaled(y, total)
        self.backward(loss, number, self.recipe.micro_batches)
        dist.send(self.gradient(x), 0)
        return float(loss.detach())

    def gradient(self, x: Tensor) -> Tensor:
        """What is sent back."""
        return x.grad.contiguous()

    def reduce(self) -> None:
        """Both stages use the words' table."""
        dist.all_reduce(self.model.embedding.weight.grad)

    def squares(self, name: str, parameter: nn.Parameter) -> Tensor:
        if name == "embedding.weight" and not self.is_first:
            return torch.zeros((), dtype=torch.float64)
        return super().squares(name, parameter)

    def norm(self) -> Tensor:
        return summed(super().norm().square()).sqrt()

    def reported(self, own: float) -> float:
        return total_of(own)

    def own_loss(self, own: float) -> float | None:
        return None if self.is_first else own


LAYOUTS = {
    one.layout: one
    for one in (
        Trainer,
        DataParallel,
        Zero1,
        FullySharded,
        TensorParallel,
        SequenceParallel,
        ContextParallel,
        Pipeline,
    )
}
