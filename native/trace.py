"""What a run computed, module by module: a small file per rank from which another run's first difference can be found.

Every tensor is kept as a sketch: its products with a few fixed random vectors. The mean square of two sketches'
difference estimates that of the tensors, and sketches of slices, shards and micro-batches add up to the whole's. So a
run of any layout can be compared with one process (t5bench/compare/traces.py).

A line of rank<R>.jsonl is one sketch. In each iteration come, in the order in which they are computed: the output of
each module (forward), its gradient (backward), each parameter's gradient on this rank (gradient), reduced over the
ranks (reduced), and the parameter's change (update). Three figures are computed again, in float64: the loss, the
gradient norm and the update (AdamW, its schedule being PyTorch's), and copies in bf16 are compared with their masters.
"""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from native import precision
from native.data import Batch
from native.data_parallel import TorchTrainer
from native.layers import Attention, Embedding, FeedForward, Layer, LayerNorm, RMSNorm
from native.model import seed_of, shape_of
from native.parallel import Mesh
from native.reference import schedule_of
from native.tensor_parallel import Slice
from t5bench.costmodel.layout import share

DIRECTORY = "trace"  # beside --tensorboard-dir
VECTORS = 8
# Modules whose output every tensor-parallel rank has as a whole.
TRACED = (Embedding, Layer, LayerNorm, RMSNorm, Attention, FeedForward)


def random_vectors(name: str, shape: tuple[int, ...]) -> Tensor:
    """[VECTORS, *shape], always the same for a name and a shape."""
    generator = torch.Generator().manual_seed(seed_of(f"{name}:{shape}"))
    return torch.randn(VECTORS, *shape, generator=generator, dtype=torch.float64)


@contextmanager
def traced(trainer: TorchTrainer, args: Namespace, mesh: Mesh) -> Iterator[None]:
    """Within this, what the trainer computes is written into a directory (--trace)."""
    tracer = Tracer(trainer, args, mesh)
    try:
        yield
    finally:
        tracer.end()  # or DeepSpeed's engine would outlive its process group


class Masters:
    """The fp32 parameters and reduced gradients of any trainer, of this process's tensor- and pipeline-parallel part.

    Every process must ask for the same parameters in the same order: some are gathered.
    """

    def __init__(self, args: Namespace) -> None:
        self.is_deepspeed = args.deepspeed

    def value(self, parameter: nn.Parameter) -> Tensor:
        if self.is_deepspeed:
            from deepspeed.utils import safe_get_full_fp32_param

            return safe_get_full_fp32_param(parameter).detach().double().cpu().view(shape_of(parameter))
        return whole(parameter.detach()).double().cpu()

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """After the ranks have reduced it, before clipping."""
        if self.is_deepspeed:
            from deepspeed.utils import safe_get_full_grad

            return safe_get_full_grad(parameter).detach().double().cpu().view(shape_of(parameter))
        return whole(parameter.grad.detach()).double().cpu()

    def copy(self, parameter: nn.Parameter) -> Tensor | None:
        """The copy with which an iteration computes, if there is one."""
        if not self.is_deepspeed:
            copied = precision.copies().get(parameter)
            return copied.detach() if copied is not None else None
        if hasattr(parameter, "ds_shape"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                return parameter.detach().clone()
        return parameter.detach()


def whole(tensor: Tensor) -> Tensor:
    """A copy of the tensor, gathered if FSDP2 has divided it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def fits_16_bits(values: Tensor) -> bool:
    """Whether every value is one of bf16, as after a reduction in bf16 and never after one in fp32."""
    return bool(values.any()) and torch.equal(values.bfloat16().double(), values)


class Tracer:
    """Watches a trainer, and writes what it computes into a directory."""

    def __init__(self, trainer: TorchTrainer, args: Namespace, mesh: Mesh) -> None:
        self.trainer = trainer
        self.args = args
        self.mesh = mesh
        self.train = trainer.step
        self.model = trainer.model.module if args.deepspeed else trainer.model
        self.masters = Masters(args)
        self.vocabulary = args.padded_vocab_size
        self.parameters = {self.model.whole_name(name): p for name, p in self.model.named_parameters()}
        self.vectors: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        """The random vectors, [VECTORS, elements], by a parameter's name ("" for samples) and a shape."""
        self.iteration = 0
        self.micro_batch = -1
        self.hooks: list[Any] = []
        self.replaced: list[tuple[Any, str]] = []
        """Objects, and their methods that are replaced until the end."""
        self.calls: Counter[str] = Counter()
        """How often each module was called in this micro-batch."""
        self.local: dict[str, Tensor] = {}
        """The sketch of each parameter's gradient on this rank, by its name as in what follows."""
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        """AdamW's averages of the gradient and of its square."""
        self.before: dict[str, Tensor] = {}
        """The weights before the update."""
        self.reduced: dict[str, Tensor] = {}
        """The reduced gradients."""
        self.losses: list[Tensor] = []
        """Of this iteration's micro-batches."""
        self.logits: Tensor | None = None
        # The rates are PyTorch's schedule's, of an optimizer that updates nothing else.
        self.rates = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=args.lr)
        self.schedule = schedule_of(self.rates, args)
        directory = Path(args.tensorboard_dir).parent / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        self.file = (directory / f"rank{args.rank}.jsonl").open("w")
        self.write(
            "layout",
            tp=mesh.tp.rank,
            dp=mesh.dp.rank,
            pp=mesh.pp.rank,
            dp_size=args.dp,
            precision="bf16" if args.bf16 else "fp32",
        )
        self.watch()

    def write(self, phase: str, **content: Any) -> None:
        self.file.write(json.dumps({"phase": phase, "iteration": self.iteration} | content) + "\n")

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        keep = self.hooks.append
        keep(self.model.register_forward_pre_hook(self.begin_micro_batch))
        keep(self.model.register_forward_hook(self.end_micro_batch))
        for name, module in self.model.named_modules():
            is_of_heads = any(hasattr(own, "is_partial") for own in module.parameters(recurse=False))
            if isinstance(module, TRACED) and not is_of_heads:
                whole_name = self.model.whole_name(name).removeprefix("language_model.")
                keep(module.register_forward_hook(lambda _, __, output, name=whole_name: self.saw(name, output)))
        if hasattr(self.model, "lm_head"):
            keep(self.model.lm_head.register_forward_hook(self.saw_logits))
        if not self.args.fsdp2:  # whose gradients are divided before anyone sees them
            for name, parameter in self.parameters.items():
                keep(parameter.register_hook(lambda gradient, name=name: self.saw_gradient(name, gradient)))
        # What computes the gradients, and what updates the weights.
        self.replace(self.trainer, "step", self.step)
        if self.args.deepspeed:
            self.update = self.trainer.model.step
            self.replace(self.trainer.model, "step", self.watched_update)
        else:
            self.update = self.trainer.update
            self.replace(self.trainer, "update", self.watched_update)

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Until the end, on this object alone."""
        setattr(owner, name, function)
        self.replaced.append((owner, name))

    def watched_update(self, *words: Any, **options: Any) -> Any:
        """The update of the weights, which DeepSpeed's engine asks for after every micro-batch."""
        if not self.args.deepspeed or self.trainer.model.is_gradient_accumulation_boundary():
            self.before_update()
        return self.update(*words, **options)

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for owner, name in self.replaced:
            delattr(owner, name)
        self.file.close()

    def saw_logits(self, _: nn.Module, __: object, logits: Tensor) -> None:
        self.logits = logits.detach()

    def begin_micro_batch(self, *_: object) -> None:
        self.micro_batch += 1
        self.calls.clear()
        if self.args.family == "t5" and self.mesh.pp.rank > 0:  # the other stage embeds the encoder's tokens
            self.calls["embedding"] = 1

    def end_micro_batch(self, _: nn.Module, inputs: tuple[Tensor, ...], losses: Tensor) -> None:
        if not self.mesh.is_last_stage or not self.model.training:
            return
        labels = inputs[2] if self.args.family == "t5" else inputs[1]  # [b, s]
        self.sketch_samples("forward", "loss", losses.detach(), self.micro_batch)
        values = losses.detach().double()
        if self.logits is not None:
            values = self.cross_entropy(labels)
        self.losses.append(values.sum() / (labels >= 0).sum())

    def cross_entropy(self, labels: Tensor) -> Tensor:
        """Of each token, in float64."""
        assert self.logits is not None
        tp = self.mesh.tp
        parts = [self.logits]  # [b, s, vocabulary / tp] each
        if tp.size > 1:
            words = [len(share(self.vocabulary, range(tp.size), rank)) for rank in range(tp.size)]
            own = F.pad(self.logits, (0, max(words) - self.logits.size(-1)))  # to send as much as the others
            parts = [torch.empty_like(own) for _ in words]
            dist.all_gather(parts, own, group=tp.group)
            parts = [part[..., :count] for part, count in zip(parts, words, strict=True)]
        logits = torch.cat(parts, -1).double()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="none")

    def saw(self, name: str, output: Tensor) -> None:
        """A module's output, and later its gradient."""
        if not self.model.training or not torch.is_grad_enabled():
            return
        self.calls[name] += 1
        if name == "embedding" and self.args.family == "t5":
            name = "embedding of the encoder" if self.calls[name] == 1 else "embedding of the decoder"
        number = self.micro_batch
        self.sketch_samples("forward", name, output.detach(), number)
        if output.requires_grad:
            output.register_hook(
                lambda gradient: self.sketch_samples("backward", name, gradient / self.args.dp, number)
            )

    def saw_gradient(self, name: str, gradient: Tensor) -> None:
        sketch = self.sketch(name, gradient) / self.args.dp
        if name in self.local:
            sketch = self.local[name] + sketch
        self.local[name] = sketch

    # ---- sketches ----------------------------------------------------------------------------------------------------

    def sketch_samples(self, phase: str, name: str, values: Tensor, micro_batch: int) -> None:
        """values: [samples, ...]. Samples have the numbers that they have in the whole iteration."""
        shape = tuple(values.shape[1:])
        if ("", shape) not in self.vectors:
            self.vectors["", shape] = random_vectors("", shape).flatten(1)
        sketches = values.double().cpu().flatten(1) @ self.vectors["", shape].T
        first = (micro_batch * self.args.dp + self.mesh.dp.rank) * self.args.micro_batch_size
        for number, sketch in enumerate(sketches.tolist(), first):
            self.write(phase, name=name, sample=number, sketch=sketch)

    def sketch(self, name: str, values: Tensor) -> Tensor:
        """Of values of a parameter's shape, or of this tensor-parallel rank's slice of it; [VECTORS]."""
        parameter = self.parameters[name]
        shape = shape_of(parameter)
        key = (name, shape)
        if key not in self.vectors:
            self.vectors[key] = self.vectors_of(name, parameter).flatten(1).contiguous()
        return self.vectors[key] @ values.detach().double().cpu().flatten()

    def vectors_of(self, name: str, parameter: nn.Parameter) -> Tensor:
        """[VECTORS, *shape]: of the whole parameter's vectors what this tensor-parallel rank has of the parameter."""
        tp_slice: Slice | None = getattr(parameter, "tp_slice", None)
        if not tp_slice:
            return random_vectors(name, shape_of(parameter))
        vectors = random_vectors(name, tp_slice.whole_shape(shape_of(parameter)))
        behind_vectors = tp_slice._replace(dim=tp_slice.dim + 1)
        return behind_vectors.cut(vectors, self.mesh.tp)

    def parameter_line(self, phase: str, name: str, sketch: Tensor, **more: Any) -> None:
        parameter = self.parameters[name]
        tp_slice: Slice | None = getattr(parameter, "tp_slice", None)
        is_term = phase == "gradient"  # of a sum over the ranks, even where several hold the same part
        is_slice = self.mesh.tp.size > 1 and bool(tp_slice or (is_term and hasattr(parameter, "is_partial")))
        if tp_slice and not is_term and not tp_slice.is_first_copy(self.mesh.tp):
            sketch = torch.zeros_like(sketch)
            more |= {"square": 0.0} if "square" in more else {}
        self.write(phase, name=name.removeprefix("language_model."), slice=is_slice, sketch=sketch.tolist(), **more)

    # ---- an iteration ------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor]:
        """The trainer's, watched."""
        self.iteration += 1
        self.micro_batch = -1
        self.local = {}
        self.losses = []
        if self.iteration == 1:
            for name, parameter in self.parameters.items():
                self.parameter_line("weights", name, self.sketch(name, self.masters.value(parameter)))
        for position, tokens in enumerate(batch, 1):
            for number, part in enumerate(tokens.chunk(self.args.micro_batches)):
                self.sketch_samples("data", f"tokens {position}", part, number)
        loss, norm = self.train(batch, rate)
        if self.losses:
            self.write("loss", value=float(torch.stack(self.losses).mean()))
        self.after_update(float(norm))
        self.schedule.step()
        self.file.flush()
        return loss, norm

    def before_update(self) -> None:
        for name in self.local:
            self.parameter_line("gradient", name, self.local[name])
        stale = [name for name, p in self.parameters.items() if self.args.bf16 and not self.is_fresh(p)]
        self.write("stale", names=stale)
        for name, parameter in self.parameters.items():
            self.before[name] = self.masters.value(parameter)
            self.reduced[name] = self.masters.gradient(parameter)
            figures = {
                "square": float(self.reduced[name].square().sum()),
                "in_16_bits": fits_16_bits(self.reduced[name]),
            }
            self.parameter_line("reduced", name, self.sketch(name, self.reduced[name]), **figures)

    def is_fresh(self, parameter: nn.Parameter) -> bool:
        """Whether the iteration computes with the rounded master."""
        copy = self.masters.copy(parameter)
        if copy is None:
            return True
        return torch.equal(copy.cpu(), self.masters.value(parameter).to(copy.dtype))

    def after_update(self, norm: float) -> None:
        """Compares each parameter's change with AdamW's in float64, by the norm that was printed."""
        max_norm = self.args.clip_grad
        factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
        rate = self.rates.param_groups[0]["lr"]
        for name, parameter in self.parameters.items():
            change = self.masters.value(parameter) - self.before[name]
            expected = self.adamw(name, factor * self.reduced[name], rate)
            self.parameter_line(
                "update",
                name,
                self.sketch(name, change),
                size=float(expected.norm()),
                off=float((change - expected).norm()),
                weight=float(self.before[name].norm()),
            )

    def adamw(self, name: str, gradient: Tensor, rate: float) -> Tensor:
        """The change of a parameter."""
        args = self.args
        zeros = torch.zeros_like(gradient)
        mean, square = self.moments.get(name, (zeros, zeros))
        mean = args.adam_beta1 * mean + (1 - args.adam_beta1) * gradient
        square = args.adam_beta2 * square + (1 - args.adam_beta2) * gradient**2
        self.moments[name] = mean, square
        unbiased_mean = mean / (1 - args.adam_beta1**self.iteration)
        unbiased_square = square / (1 - args.adam_beta2**self.iteration)
        direction = unbiased_mean / (unbiased_square.sqrt() + args.adam_eps)
        decay = args.weight_decay if gradient.dim() > 1 else 0.0
        return -rate * (direction + decay * self.before[name])
