"""One small trainer for every defect: a GPT of two blocks, in a few hundred lines, on one process.

Each method is a seam: layouts.py replaces some to divide the work over two processes, and a defect replaces one to make
a mistake. What is random is drawn whole from the recipe's seed and then divided, so every layout trains the same model
on the same samples, and curves differ by rounding alone.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 32
LENGTH = 12  # tokens of a sample
HEADS = 4
BLOCKS = 2
SAMPLES = 8  # of a step, all ranks together
STEPS_OF_AN_EPOCH = 3
WARM_UP = 2
IGNORED = -100  # the label of a position that no loss is computed for
STARTS = {"norm1.weight": 1.0, "norm2.weight": 1.0, "norm.weight": 1.0}  # the mean of what is drawn; 0 of the others


@dataclass(frozen=True)
class Recipe:
    """A training. Its numbers are such that each of them moves the curves: see docs/parity_evidence.md."""

    seed: int = 1
    width: int = 16
    steps: int = 8
    micro_batches: int = 2
    """Of a rank and step."""
    uneven: bool = False
    """Whether samples have other lengths, so that ranks and micro-batches have other numbers of labels."""
    precision: str = "fp32"
    """fp32 or bf16, of what forward and backward passes compute; weights, gradients and states are fp32."""
    dropout: float = 0.0
    smoothing: float = 0.0
    """Of the labels."""
    short: bool = False
    """Whether the last step of each epoch has half of the samples, and so of the micro-batches."""
    recompute: bool = False
    """Whether a block's activations are computed again in the backward pass."""
    resume_after: int = 0
    """The step after which the training stops, and a new trainer goes on from its checkpoint; 0: never."""
    global_seed: int = 0
    """PyTorch's own, which must not matter."""
    rate: float = 0.02
    decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-2
    clip: float = 1.2
    std: float = 0.2
    """Of the initial weights."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch, or a rank's part of one: [samples, tokens] each."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    """Of the tokens in their documents."""
    documents: Tensor
    """Two are packed into each sample."""
    ids: Tensor
    """The numbers of the samples in the step, [samples]."""
    start: int = 0
    """The first of this rank's tokens in the sample, where ranks divide the tokens."""

    def samples(self, chosen: slice) -> "Batch":
        parts = (self.tokens, self.labels, self.positions, self.documents, self.ids)
        return Batch(*(part[chosen] for part in parts), self.start)

    def part(self, start: int, end: int) -> "Batch":
        """Some of the tokens of each sample; the documents stay whole, for the mask of attention."""
        return Batch(
            self.tokens[:, start:end],
            self.labels[:, start:end],
            self.positions[:, start:end],
            self.documents,
            self.ids,
            start,
        )


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Norm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, divided: int) -> None:
        """divided: over how many ranks the heads and the inner layer are."""
        super().__init__()
        self.norm1 = Norm(width)
        self.qkv = Linear(width, 3 * width // divided)
        self.out = Linear(width // divided, width)
        self.norm2 = Norm(width)
        self.up = Linear(width, 4 * width // divided)
        self.down = Linear(4 * width // divided, width)

    def forward(self, x: Tensor, batch: Batch, trainer: "Trainer", number: int) -> Tensor:
        return trainer.block(self, x, batch, number)


class Model(nn.Module):
    """Words, positions, blocks and a last norm; the head shares the words' table."""

    def __init__(self, width: int, divided: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY // divided, width)
        self.positions = nn.Embedding(LENGTH + 1, width)  # an odd number, which two ranks cannot divide evenly
        self.blocks = nn.ModuleList(Block(width, divided) for _ in range(BLOCKS))
        self.norm = Norm(width)

    def forward(self, batch: Batch, trainer: "Trainer") -> Tensor:
        return trainer.losses(self, batch)


@dataclass
class AdamW:
    """The states of each parameter, or of this rank's part of all."""

    state: dict[Any, dict[str, Any]] = field(default_factory=dict)

    def of(self, key: Any, weight: Tensor) -> dict[str, Any]:
        if key not in self.state:
            self.state[key] = {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        return self.state[key]


class Trainer:
    """In one process: the reference of all layouts."""

    layout = "one"
    rank = 0
    world = 1
    divided = 1
    """Over how many ranks weights are divided."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        torch.manual_seed(recipe.global_seed)
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.precision]
        self.model = self.make_model()
        self.optimizer = AdamW()
        self.rng = torch.Generator().manual_seed(recipe.seed)  # of dropout
        self.done = 0
        """Steps."""
        self.masks: list[Tensor] = []
        self.wrap()

    def wrap(self) -> None:
        """What a layout does with the model before it trains."""

    # ---- the model ---------------------------------------------------------------------------------------------------

    def make_model(self) -> Model:
        model = Model(self.recipe.width, self.divided)
        with torch.no_grad():
            for number, (name, parameter) in enumerate(model.named_parameters()):
                parameter.copy_(self.slice_of(name, self.drawn(number, name, self.whole_shape(name, parameter))))
        return model

    def drawn(self, number: int, name: str, shape: tuple[int, ...]) -> Tensor:
        """A whole parameter's initial values."""
        generator = torch.Generator().manual_seed(1000 * self.recipe.seed + number)
        mean = next((start for ending, start in STARTS.items() if name.endswith(ending)), 0.0)
        return mean + self.recipe.std * torch.randn(shape, generator=generator)

    def whole_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def slice_of(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this rank trains, by name."""
        yield from self.model.named_parameters()

    # ---- samples -----------------------------------------------------------------------------------------------------

    def order(self, step: int) -> list[int]:
        """The samples of a step, in the order of its epoch."""
        epoch, place = divmod(step - 1, STEPS_OF_AN_EPOCH)
        generator = torch.Generator().manual_seed(100 * self.recipe.seed + epoch)
        shuffled = torch.randperm(SAMPLES * STEPS_OF_AN_EPOCH, generator=generator).tolist()
        return shuffled[place * SAMPLES : (place + 1) * SAMPLES]

    def sample(self, number: int) -> tuple[Tensor, int, int]:
        """Its tokens, one more than LENGTH, where its second document begins, and how many tokens have a label."""
        generator = torch.Generator().manual_seed(10_000 * self.recipe.seed + number)
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        begins = int(torch.randint(2, LENGTH - 2, (), generator=generator))
        length = int(torch.randint(2, LENGTH, (), generator=generator)) if self.recipe.uneven else LENGTH
        return tokens, begins, length

    def batch(self, step: int) -> Batch:
        """The whole step's samples."""
        chosen = [self.sample(number) for number in self.order(step)]
        if self.is_short(step):
            chosen = chosen[: SAMPLES // 2]
        words = torch.stack([tokens for tokens, _, _ in chosen])
        places = torch.arange(LENGTH)
        begins = torch.tensor([begin for _, begin, _ in chosen])[:, None]
        lengths = torch.tensor([length for _, _, length in chosen])[:, None]
        documents = (places >= begins).long()
        labels = words[:, 1:].masked_fill(places >= lengths, IGNORED)
        return Batch(words[:, :-1], labels, places - begins * documents, documents, torch.arange(len(words)))

    def is_short(self, step: int) -> bool:
        return self.recipe.short and step % STEPS_OF_AN_EPOCH == 0

    def own(self, whole: Batch) -> Batch:
        """This rank's part of a step."""
        return whole

    def micro_batches(self, step: int) -> list[Batch]:
        whole = self.batch(step)
        own = self.own(whole)
        size = SAMPLES * len(own.tokens) // len(whole.tokens) // self.recipe.micro_batches
        return [own.samples(slice(start, start + size)) for start in range(0, len(own.tokens), size)]

    def labels_of(self, batch: Batch) -> int:
        return int((batch.labels != IGNORED).sum())

    def count(self, batches: list[Batch]) -> float:
        """The labels of the step on all ranks."""
        return float(sum(map(self.labels_of, batches)))

    # ---- the forward pass --------------------------------------------------------------------------------------------

    def draw_masks(self) -> None:
        """Dropout's, of a whole step, for every place that has one."""
        self.masks = []
        if self.recipe.dropout:
            shape = (1 + 2 * BLOCKS, SAMPLES, LENGTH, self.recipe.width)
            self.masks = list(torch.empty(shape).bernoulli_(1 - self.recipe.dropout, generator=self.rng))

    def mask(self, place: int, x: Tensor, batch: Batch) -> Tensor:
        return self.masks[place][batch.ids, batch.start : batch.start + x.shape[1]]

    def drop(self, x: Tensor, place: int, batch: Batch) -> Tensor:
        if not self.recipe.dropout:
            return x
        return x * self.mask(place, x, batch).to(x.dtype) / (1 - self.recipe.dropout)

    def enter(self, x: Tensor) -> Tensor:
        """Before weights that ranks divide."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """The sum of what the ranks' parts of weights made."""
        return x

    def embed(self, model: Model, batch: Batch) -> Tensor:
        words = self.leave(self.words(model, batch))
        return self.drop((words + model.positions(self.positions(batch))).to(self.dtype), 0, batch)

    def words(self, model: Model, batch: Batch) -> Tensor:
        return model.embedding(batch.tokens)

    def positions(self, batch: Batch) -> Tensor:
        return batch.positions

    def block(self, block: Block, x: Tensor, batch: Batch, number: int) -> Tensor:
        x = x + self.drop(self.attention(block, block.norm1(x), batch), 1 + 2 * number, batch)
        return x + self.drop(self.inner(block, block.norm2(x)), 2 + 2 * number, batch)

    def attention(self, block: Block, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = (self.heads(part) for part in block.qkv(self.enter(x)).chunk(3, -1))
        k, v = self.keys(k), self.keys(v)
        scores = (q @ k.transpose(-1, -2)).float() * self.scale(q.shape[-1])
        scores = scores.masked_fill(~self.seen(batch, q.shape[2])[:, None], -1e9)
        mixed = (scores.softmax(-1).to(x.dtype) @ v).transpose(1, 2).flatten(2)
        return self.row(block.out, mixed)

    def scale(self, size: int) -> float:
        """Of the scores. size: of a head."""
        return size**-0.5

    def heads(self, x: Tensor) -> Tensor:
        """[samples, heads, tokens, size of a head]."""
        return x.unflatten(-1, (HEADS // self.divided, -1)).transpose(1, 2)

    def keys(self, x: Tensor) -> Tensor:
        """The keys or values of all tokens."""
        return x

    def seen(self, batch: Batch, tokens: int) -> Tensor:
        """Which tokens each of this rank's tokens sees, [samples, own, all]: earlier ones of its document."""
        own = slice(batch.start, batch.start + tokens)
        places = torch.arange(batch.documents.shape[1])
        is_earlier = places[None, :] <= places[own, None]
        return is_earlier & (batch.documents[:, own, None] == batch.documents[:, None, :])

    def inner(self, block: Block, x: Tensor) -> Tensor:
        return self.row(block.down, F.gelu(block.up(self.enter(x))))

    def row(self, linear: Linear, x: Tensor) -> Tensor:
        return self.leave(F.linear(x, linear.weight.to(x.dtype))) + linear.bias.to(x.dtype)

    def losses(self, model: Model, batch: Batch) -> Tensor:
        """The sum of a micro-batch's losses."""
        x = self.embed(model, batch)
        for number, block in enumerate(model.blocks):
            x = self.run(block, x, batch, number)
        return self.head(model, x, batch)

    def run(self, block: Block, x: Tensor, batch: Batch, number: int) -> Tensor:
        if not self.recipe.recompute:
            return block(x, batch, self, number)
        return checkpoint(block, x, batch, self, number, use_reentrant=False, determinism_check="none")

    def head(self, model: Model, x: Tensor, batch: Batch) -> Tensor:
        logits = F.linear(self.enter(model.norm(x)), model.embedding.weight.to(x.dtype))
        return self.cross_entropy(logits.float(), batch.labels)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        smoothing = self.recipe.smoothing
        arguments = (logits.flatten(0, 1), labels.flatten())
        return F.cross_entropy(*arguments, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def step(self, observe: Callable[[float, float], None]) -> None:
        """observe: is called before clipping, with this rank's part of the loss and the gradient norm."""
        number = self.done + 1
        batches = self.micro_batches(number)
        total = self.count(batches)
        self.clear()
        self.draw_masks()
        own = self.forward_backward(batches, total)
        self.reduce()
        norm = self.norm()
        observe(own, float(norm))
        self.clip(norm)
        self.update(number)
        self.done = number

    def scaled(self, loss: Tensor, total: float) -> Tensor:
        """A micro-batch's part of the step's mean, from the sum of its losses."""
        return loss / total

    def forward_backward(self, batches: list[Batch], total: float) -> float:
        """All micro-batches; returns this rank's part of the loss."""
        own = 0.0
        for number, batch in enumerate(batches):
            loss = self.scaled(self.model(batch, self), total)
            self.backward(loss, number, len(batches))
            own += float(loss.detach())
        return own

    def backward(self, loss: Tensor, number: int, count: int) -> None:
        loss.backward()

    def clear(self) -> None:
        """The gradients, before a step."""
        for _, parameter in self.parameters():
            parameter.grad = None

    def reduce(self) -> None:
        """Gradients, over the ranks."""

    def squares(self, name: str, parameter: nn.Parameter) -> Tensor:
        """The sum of squares of this rank's part of a gradient."""
        return local(parameter.grad).double().square().sum()

    def norm(self) -> Tensor:
        """Of all gradients, in fp64."""
        return torch.stack([self.squares(name, one) for name, one in self.parameters()]).sum().sqrt()

    def factor(self, norm: Tensor) -> Tensor:
        """By which gradients are clipped."""
        return (self.recipe.clip / (norm + 1e-6)).clamp(max=1.0)

    def clip(self, norm: Tensor) -> None:
        for _, parameter in self.parameters():
            local(parameter.grad).mul_(self.factor(norm))

    def rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to a tenth."""
        if step <= WARM_UP:
            return self.recipe.rate * step / WARM_UP
        return self.recipe.rate * (1 - 0.9 * (step - WARM_UP) / (self.recipe.steps - WARM_UP))

    @property
    def betas(self) -> tuple[float, float]:
        return self.recipe.betas

    @property
    def epsilon(self) -> float:
        return self.recipe.epsilon

    def decay(self, name: str, parameter: Tensor) -> float:
        """Of weights, not of biases and norms."""
        return self.recipe.decay if parameter.dim() > 1 else 0.0

    def update(self, step: int) -> None:
        for name, parameter in self.parameters():
            weight, gradient = local(parameter.detach()), local(parameter.grad)
            state = self.optimizer.of(parameter, weight)
            self.adamw(weight, gradient, state, self.rate(step), self.decay(name, parameter))

    def adamw(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], rate: float, decay: Any) -> None:
        """Loshchilov and Hutter (2019), algorithm 2. decay: a number, or one for each element."""
        first, second = self.betas
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
        mean = state["exp_avg"] / (1 - first ** state["step"])
        root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt()
        weight.mul_(1 - rate * decay).add_(mean / (root + self.epsilon), alpha=-rate)

    def reported(self, own: float) -> float:
        """The step's loss, from each rank's part."""
        return own

    # ---- a checkpoint ------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """This rank's."""
        parameters = dict(self.parameters())
        return {
            "step": self.done,
            "weights": {name: local(parameter.detach()).clone() for name, parameter in parameters.items()},
            "states": self.saved_states(parameters),
            "rng": self.rng.get_state(),
        }

    def saved_states(self, parameters: dict[str, nn.Parameter]) -> dict[str, Any]:
        return {name: copy.deepcopy(self.optimizer.state[parameter]) for name, parameter in parameters.items()}

    @torch.no_grad()
    def load(self, saved: dict[str, Any]) -> None:
        self.done = saved["step"]
        for name, parameter in self.parameters():
            local(parameter.detach()).copy_(saved["weights"][name])
        self.load_states(saved["states"])
        self.rng.set_state(saved["rng"])

    def load_states(self, states: dict[str, Any]) -> None:
        self.optimizer.state = {parameter: copy.deepcopy(states[name]) for name, parameter in self.parameters()}

    # ---- what gates see ----------------------------------------------------------------------------------------------

    def part_of(self, name: str) -> tuple[int, list[tuple[int, int]]] | None:
        """What this rank has of a parameter that ranks divide by hand: the dimension, and where each stretch of it
        begins in the whole, with its length; None of one that it has whole."""
        return None

    def is_slice(self, name: str) -> bool:
        return self.part_of(name) is not None

    def own_loss(self, own: float) -> float | None:
        """This rank's loss, such that the mean over ranks is the step's; None if it has none."""
        return own


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that FSDP2 divides."""
    return getattr(tensor, "_local_tensor", tensor)
