"""What a run computed, tensor by tensor (--trace): files that training_comparison reads, written by its TraceFile.

Beyond what any trainer's trace has, each iteration has here its data, the output of each module and its gradient, each
parameter's gradient on this rank, and the parameters' changes. Three figures are computed again, in float64: the loss,
the gradient norm and the update (AdamW, its schedule being PyTorch's), and copies in bf16 are compared with their
masters.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from native.model import shape_of
from native.parallel import Mesh
from native.reference import schedule_of
from native.tensor_parallel import Slice
from t5bench.costmodel.layout import share
from training_comparison.step_trace import OwnPart, TraceFile, bits, gathered, gradient_of, sketch, square, whole
from training_comparison.traces import DIRECTORY

# Modules whose output every tensor-parallel rank has as a whole.
TRACED = (Embedding, Layer, LayerNorm, RMSNorm, Attention, FeedForward)


@contextmanager
def traced(trainer: TorchTrainer, args: Namespace, mesh: Mesh) -> Iterator[None]:
    """Within this, what the trainer computes is written into a directory beside --tensorboard-dir."""
    tracer = Tracer(trainer, args, mesh)
    try:
        yield
    finally:
        tracer.end()  # or DeepSpeed's engine would outlive its process group


def master_of(parameter: nn.Parameter) -> Tensor:
    """A copy of the values that the optimizer updates, gathered; float64 on the CPU.

    Every process must ask for the same parameters in the same order.
    """
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_fp32_param

        values = safe_get_full_fp32_param(parameter).view(shape_of(parameter))
    else:
        values = gathered(parameter)
    return values.detach().double().cpu()


def fits_16_bits(values: Tensor) -> bool:
    """Whether every value is one of bf16, as after a reduction in bf16 and never after one in fp32."""
    return bool(values.any()) and torch.equal(values.bfloat16().double(), values)


class Tracer:
    """Watches a trainer, and writes what it computes."""

    def __init__(self, trainer: TorchTrainer, args: Namespace, mesh: Mesh) -> None:
        self.trainer = trainer
        self.args = args
        self.mesh = mesh
        self.model = trainer.model.module if args.deepspeed else trainer.model
        self.parameters = {self.short_name(name): parameter for name, parameter in self.model.named_parameters()}
        self.file = TraceFile(
            Path(args.tensorboard_dir).parent / DIRECTORY,
            replicas=args.dp,
            tensor_parallel=mesh.tp.size,
            precision="bf16" if args.bf16 else "fp32",
        )
        self.adamw = ExactAdamW(args)
        self.iteration = 0
        self.micro_batch = -1
        self.calls: Counter[str] = Counter()
        """How often each module was called in this micro-batch."""
        self.terms: dict[str, Tensor] = {}
        """The sketch of each parameter's gradient on this rank, which the iteration's micro-batches add up."""
        self.losses: list[Tensor] = []
        """Of this iteration's micro-batches."""
        self.logits: Tensor | None = None
        self.before: dict[str, Tensor] = {}
        """The weights before the update."""
        self.reduced: dict[str, Tensor] = {}
        """The gradients after the ranks have reduced them, before clipping."""
        self.at_end: list[Callable[[], Any]] = [self.file.close]
        self.watch_modules()
        self.watch_gradients()
        self.train = self.replace(trainer, "step", self.step)
        if args.deepspeed:
            self.update = self.replace(trainer.model, "step", self.watched_update)
        else:
            self.update = self.replace(trainer, "update", self.watched_update)

    def short_name(self, name: str) -> str:
        return self.model.whole_name(name).removeprefix("language_model.")

    # ---- what is watched ---------------------------------------------------------------------------------------------

    def watch_modules(self) -> None:
        hooks = [
            self.model.register_forward_pre_hook(self.begin_micro_batch),
            self.model.register_forward_hook(self.end_micro_batch),
        ]
        for name, module in self.model.named_modules():
            is_of_heads = any(hasattr(parameter, "is_partial") for parameter in module.parameters(recurse=False))
            if isinstance(module, TRACED) and not is_of_heads:
                hooks.append(module.register_forward_hook(partial(self.saw_output, self.short_name(name))))
        if hasattr(self.model, "lm_head"):
            hooks.append(self.model.lm_head.register_forward_hook(self.saw_logits))
        self.at_end += [hook.remove for hook in hooks]

    def watch_gradients(self) -> None:
        if self.args.fsdp2:  # whose gradients are divided before anyone sees them
            return
        for name, parameter in self.parameters.items():
            hook = parameter.register_hook(partial(self.saw_gradient, name))
            self.at_end.append(hook.remove)

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Until the end, on this object alone. Returns the object's own method."""
        method = getattr(owner, name)
        setattr(owner, name, function)
        self.at_end.append(partial(delattr, owner, name))
        return method

    def end(self) -> None:
        for undo in self.at_end:
            undo()

    # ---- an iteration ------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor]:
        """The trainer's, watched."""
        self.iteration += 1
        self.micro_batch = -1
        self.terms.clear()
        self.losses.clear()
        if self.iteration == 1:
            self.add_weights()
        self.add_data(batch)
        loss, norm = self.train(batch, rate)
        if self.losses:
            self.file.add("loss", value=float(torch.stack(self.losses).mean()))
        self.after_update(float(norm))
        self.file.end_step(self.iteration)
        return loss, norm

    def watched_update(self, *words: Any, **options: Any) -> Any:
        """The update of the weights, which DeepSpeed's engine asks for after every micro-batch."""
        if not self.args.deepspeed or self.trainer.model.is_gradient_accumulation_boundary():
            self.before_update()
        return self.update(*words, **options)

    def add_weights(self) -> None:
        for name, parameter in self.parameters.items():
            values = whole(parameter)
            self.file.add_tensor("weights", name, values, self.own_part(parameter), bits=bits(values))

    def add_data(self, batch: Batch) -> None:
        for position, tokens in enumerate(batch, 1):
            for number, part in enumerate(tokens.chunk(self.args.micro_batches)):
                self.file.add_samples("data", f"tokens {position}", part, self.first_sample(number))

    def first_sample(self, micro_batch: int) -> int:
        """The number in the whole iteration of the first sample of a micro-batch on this rank."""
        return (micro_batch * self.args.dp + self.mesh.dp.rank) * self.args.micro_batch_size

    def own_part(self, parameter: nn.Parameter) -> OwnPart | None:
        tp_slice: Slice | None = getattr(parameter, "tp_slice", None)
        if not tp_slice:
            return None
        return OwnPart(tp_slice.dim, [(begin, length) for _, begin, length in tp_slice.stretches(self.mesh.tp)])

    # ---- forward and backward ----------------------------------------------------------------------------------------

    def begin_micro_batch(self, *_: object) -> None:
        self.micro_batch += 1
        self.calls.clear()
        if self.args.family == "t5" and self.mesh.pp.rank > 0:  # the other stage embeds the encoder's tokens
            self.calls["embedding"] = 1

    def saw_output(self, name: str, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        if not self.model.training or not torch.is_grad_enabled():
            return
        self.calls[name] += 1
        if name == "embedding" and self.args.family == "t5":
            name = "embedding of the encoder" if self.calls[name] == 1 else "embedding of the decoder"
        self.file.add_output(name, output, self.first_sample(self.micro_batch), self.args.dp)

    def saw_logits(self, _module: nn.Module, _inputs: object, logits: Tensor) -> None:
        self.logits = logits.detach().clone()  # the loss overwrites them

    def saw_gradient(self, name: str, gradient: Tensor) -> None:
        term = sketch(gradient, self.own_part(self.parameters[name])) / self.args.dp
        self.terms[name] = self.terms[name] + term if name in self.terms else term

    def end_micro_batch(self, _module: nn.Module, inputs: tuple[Tensor, ...], losses: Tensor) -> None:
        if not self.mesh.is_last_stage or not self.model.training:
            return
        labels = inputs[2] if self.args.family == "t5" else inputs[1]  # [b, s]
        self.file.add_samples("forward", "loss", losses, self.first_sample(self.micro_batch))
        values = losses.detach().double()
        if self.logits is not None:
            values = self.cross_entropy(self.logits, labels)
        self.losses.append(values.sum() / (labels >= 0).sum())

    def cross_entropy(self, own: Tensor, labels: Tensor) -> Tensor:
        """Of each token, in float64. own: this rank's logits, [b, s, vocabulary / tp]."""
        tp = self.mesh.tp
        parts = [own]
        if tp.size > 1:
            words = [len(share(self.args.padded_vocab_size, range(tp.size), rank)) for rank in range(tp.size)]
            own = F.pad(own, (0, max(words) - own.size(-1)))  # to send as much as the others
            parts = [torch.empty_like(own) for _ in words]
            dist.all_gather(parts, own, group=tp.group)
            parts = [part[..., :count] for part, count in zip(parts, words, strict=True)]
        logits = torch.cat(parts, -1).double()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="none")

    # ---- gradients and the update ------------------------------------------------------------------------------------

    def before_update(self) -> None:
        for name, term in self.terms.items():
            self.file.add("gradient", name, part=self.term(name), replica=self.mesh.dp.rank, sketch=term.tolist())
        if self.args.bf16:
            stale = [name for name, parameter in self.parameters.items() if not self.is_fresh(parameter)]
            self.file.add("stale", names=stale)
        for name, parameter in self.parameters.items():
            self.before[name] = master_of(parameter)
            gradient = gradient_of(parameter).double().cpu()
            self.reduced[name] = gradient
            figures = {"square": square(gradient), "in_16_bits": fits_16_bits(gradient)}
            self.file.add_tensor("reduced", name, gradient, self.own_part(parameter), **figures)

    def term(self, name: str) -> str:
        """Which term of a sum this rank's gradient is: stages that hold a parameter add up, and ranks that divide it
        or the heads that it serves."""
        parameter = self.parameters[name]
        is_divided = hasattr(parameter, "tp_slice") or hasattr(parameter, "is_partial")
        return f"stage {self.mesh.pp.rank}, slice {self.mesh.tp.rank if is_divided else 0}"

    def is_fresh(self, parameter: nn.Parameter) -> bool:
        """Whether the iteration computes with the rounded master."""
        copy = whole(parameter) if self.args.deepspeed else precision.copies().get(parameter)
        return copy is None or torch.equal(copy.cpu(), master_of(parameter).to(copy.dtype))

    def after_update(self, norm: float) -> None:
        """Compares each parameter's change with AdamW's, by the norm that was printed."""
        self.adamw.begin_update(norm)
        for name, parameter in self.parameters.items():
            before = self.before[name]
            change = master_of(parameter) - before
            expected = self.adamw.change(name, before, self.reduced[name])
            figures = {"size": expected.norm(), "off": (change - expected).norm(), "weight": before.norm()}
            own = self.own_part(parameter)
            self.file.add_tensor("update", name, change, own, **{key: float(size) for key, size in figures.items()})


class ExactAdamW:
    """AdamW's updates in float64. The rates are PyTorch's schedule's, of an optimizer that updates nothing else."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.rates = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=args.lr)
        self.schedule = schedule_of(self.rates, args)
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        """The averages of each gradient and of its square."""
        self.updates = 0
        self.rate = 0.0
        self.clip = 1.0

    def begin_update(self, norm: float) -> None:
        """norm: of all gradients, before clipping."""
        if self.updates:
            self.schedule.step()
        self.updates += 1
        self.rate = self.rates.param_groups[0]["lr"]
        most = self.args.clip_grad
        self.clip = min(1.0, most / (norm + 1e-6)) if most else 1.0

    def change(self, name: str, weights: Tensor, gradient: Tensor) -> Tensor:
        """gradient: before clipping."""
        args = self.args
        clipped = self.clip * gradient
        zeros = torch.zeros_like(gradient)
        mean, squared = self.moments.get(name, (zeros, zeros))
        mean = args.adam_beta1 * mean + (1 - args.adam_beta1) * clipped
        squared = args.adam_beta2 * squared + (1 - args.adam_beta2) * clipped**2
        self.moments[name] = mean, squared
        unbiased_mean = mean / (1 - args.adam_beta1**self.updates)
        unbiased_square = squared / (1 - args.adam_beta2**self.updates)
        direction = unbiased_mean / (unbiased_square.sqrt() + args.adam_eps)
        decay = args.weight_decay if gradient.dim() > 1 else 0.0
        return -self.rate * (direction + decay * weights)
