"""Trains one case by accelerate's loop, and compares it with plain PyTorch in one process. Prints both as JSON.

    torchrun --nproc_per_node 2 by_accelerate.py '{"base": "accelerate", "choices": {"split_batches": true}}'

The model and its reference are those of train.py, on the samples that accelerate's loaders gave. The loop is that of
accelerate's guides. The last number of a curve is the loss after the last update.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from t5bench.text import guard_streams
from t5bench_ledger.judge import BY_ITS_SHARE
from t5bench_ledger.pairs import train
from t5bench_ledger.pairs.reference import Window, check, clip, plan, trained_plainly, windows
from t5bench_ledger.pairs.settings import PROCESSES, Case, settings_of

FALLS = 0.5  # of the learning rate, by the scheduler
DDP = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters", "broadcast_buffers")
Sample = tuple[Tensor, Tensor, Tensor]
"""Tokens and targets, [LENGTH] each, and the sample's number."""


@dataclass(frozen=True)
class MicroBatch:
    """Of a process."""

    tokens: Tensor
    """[samples, LENGTH], as targets."""
    targets: Tensor
    fills_window: bool
    """Whether it is the last one that a step has room for."""


def samples(count: int, *, seed: int = 5678) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        return torch.randint(train.VOCABULARY, (train.LENGTH,), generator=generator)

    return [(drawn(), drawn(), torch.tensor(number)) for number in range(count)]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples, of which nobody knows the number."""

    def __init__(self, own: Sequence[Sample]) -> None:
        self.own = own

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.own)


def accelerator_of(case: Case, micro_batches: int) -> Any:
    import accelerate
    from accelerate import utils

    options: dict[str, dict[str, Any]] = {}
    places = {setting.name: setting.place for setting in settings_of(case.base)}
    for name, value in case.choices.items():
        if len(places[name]) > 1:
            options.setdefault(places[name][0], {})[name] = value
    accumulation = utils.GradientAccumulationPlugin(
        num_steps=micro_batches, **options.get("GradientAccumulationPlugin", {})
    )
    of_ddp = {name: case.choices[name] for name in DDP if name in case.choices}
    return accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_plugin=accumulation,
        mixed_precision="bf16" if "mixed precision" in case.choices else "no",
        dataloader_config=accelerate.DataLoaderConfiguration(**options.get("DataLoaderConfiguration", {})),
        kwargs_handlers=[utils.DistributedDataParallelKwargs(**of_ddp)] if of_ddp else [],
        **options.get("Accelerator", {}),
    )


class Training:
    """One training by accelerate's loop, and what it took."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.planned = plan(case, train.SAMPLES, drops="drop_last" in case.choices)
        self.accelerator = accelerator_of(case, self.planned.micro_batches)
        self.own = train.Model(case)
        kind, options = train.optimizer_class(case)
        optimizer: Any = kind(train.groups(case, train.trained(self.own)), **options)
        self.scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of_count)
        data: Any = samples(self.planned.samples)
        if "iterable" in case.choices:
            data = Stream(data)
        # With split_batches the size is that of all processes together.
        loader: Any = DataLoader(
            data,
            batch_size=train.SAMPLES,
            shuffle="shuffles" in case.choices if "iterable" not in case.choices else None,
            drop_last=self.planned.drops,
        )
        self.model: Any = self.own
        if "prepares one by one" in case.choices:
            self.model = self.accelerator.prepare(self.own)
            self.optimizer = self.accelerator.prepare(optimizer)
            self.loader = self.accelerator.prepare(loader)
            self.scheduler = self.accelerator.prepare(self.scheduler)
        else:
            prepared = self.accelerator.prepare(self.own, optimizer, loader, self.scheduler)
            self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.taken: list[list[MicroBatch]] = [[]]
        self.numbers: list[list[int]] = []
        """Of the samples, by epoch."""
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.total = torch.zeros(())
        self.others = train.batches(PROCESSES)

    @property
    def carries_over(self) -> bool:
        """Whether a short last window goes on in the next epoch."""
        return bool(self.case.choices.keys() & {"sync_with_dataloader", "no_sync by hand"})

    def run(self, directory: str) -> None:
        while len(self.losses) < self.case.iterations and len(self.numbers) < 2 * self.case.iterations:
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(len(self.numbers))
            self.numbers.append([])
            for batch in self.loader:
                self.train_micro_batch(batch, directory)
                if len(self.losses) == self.case.iterations:
                    break

    @contextlib.contextmanager
    def accumulating(self, *, fills_window: bool) -> Iterator[bool]:
        """Whether this micro-batch ends a step."""
        if "no_sync by hand" not in self.case.choices:
            with self.accelerator.accumulate(self.model):
                yield self.accelerator.sync_gradients
            return
        with contextlib.nullcontext() if fills_window else self.accelerator.no_sync(self.model):
            yield fills_window

    def train_micro_batch(self, batch: Any, directory: str) -> None:
        fills_window = len(self.taken[-1]) + 1 == self.planned.micro_batches
        self.taken[-1].append(MicroBatch(batch[0], batch[1], fills_window))
        self.numbers[-1] += batch[2].tolist()
        self.own.is_last_micro_batch = fills_window
        with self.accumulating(fills_window=fills_window) as ends_step:
            loss = self.model(batch[0], batch[1])
            self.accelerator.backward(loss)
            if ends_step:
                self.norms.append(self.clip())
            # By hand the loop says when to step; else accelerate passes over the steps between.
            if ends_step or "no_sync by hand" not in self.case.choices:
                self.step(ends_step=ends_step)
        self.total += loss.detach().float()
        self.between("between micro-batches", directory)
        if ends_step:
            self.losses.append(self.mean_loss())
            self.taken.append([])
            self.between("between steps", directory)
            if "resumes" in self.case.choices and len(self.losses) == self.case.iterations // 2:
                self.save_and_load(directory)

    def clip(self) -> float:
        """The norm before."""
        parameters = [parameter for _, parameter in train.trained(self.own)]
        norm = self.accelerator.clip_grad_norm_(parameters, train.clip_norm(self.case))
        if "clips by value" in self.case.choices:
            self.accelerator.clip_grad_value_(parameters, self.case.choices["clips by value"])
        return float(norm)

    def step(self, *, ends_step: bool) -> None:
        self.optimizer.step()
        # Without step_scheduler_with_optimizer the loop says when.
        if "scheduler" in self.case.choices and (ends_step or "step_scheduler_with_optimizer" not in self.case.choices):
            self.scheduler.step()
        self.optimizer.zero_grad()

    def between(self, when: str, directory: str) -> None:
        if self.case.choices.get("evaluates") == when:
            self.model.eval()
            with torch.no_grad():
                self.model(*next(self.others))
            self.model.train()
        if self.case.choices.get("saves") == when:
            self.accelerator.save_state(directory)

    def save_and_load(self, directory: str) -> None:
        """Forgets the weights in between."""
        self.accelerator.save_state(directory)
        self.accelerator.wait_for_everyone()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.accelerator.load_state(directory)

    def mean_loss(self) -> float:
        """Of the micro-batches of a step."""
        mean = self.total / len(self.taken[-1]) / self.case.processes
        self.total = torch.zeros(())
        if dist.is_initialized():
            dist.all_reduce(mean)
        return float(mean)


def rate_of_count(count: int) -> float:
    return 1 / (1 + FALLS * count)


def counts_of_step(case: Case) -> int:
    """By how much a step of the optimizer moves the scheduler: "num_processes steps per training step"."""
    if "scheduler" not in case.choices:
        return 0
    is_one = case.choices.keys() & {"split_batches", "step_scheduler_with_optimizer"}
    return 1 if is_one else case.processes


def plain(case: Case, steps: Sequence[Window], share_of: Callable[[Window], float]) -> train.Curve:
    """share_of: what a step's gradient is multiplied by."""
    model = train.Model(case)
    kind, options = train.optimizer_class(case)
    optimizer = kind(train.groups(case, train.trained(model)), **options)

    def backward(window: Window) -> float:
        own = [each for of_process in window for each in of_process]
        total = 0.0
        for each in own:
            model.is_last_micro_batch = each.fills_window
            with torch.autocast("cpu", torch.bfloat16, enabled="mixed precision" in case.choices):
                loss = model(each.tokens, each.targets) / len(own)
            (loss * share_of(window)).backward()
            total += float(loss.detach())
        return total

    def clips() -> float:
        norm = clip(model, train.clip_norm(case))
        if "clips by value" in case.choices:
            nn.utils.clip_grad_value_(model.parameters(), float(case.choices["clips by value"]))
        return norm

    counts = counts_of_step(case)
    losses, norms = trained_plainly(optimizer, steps, backward, lambda number: rate_of_count(counts * number), clips)
    return [*losses, loss_after(model)], norms


def loss_after(model: nn.Module) -> float:
    """Of some other samples."""
    model.eval()
    model.is_last_micro_batch = True
    with torch.no_grad():
        return float(model(*next(train.batches(PROCESSES + 1))))


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    training = Training(case)
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(names)  # every process must name the same directory
        training.run(names[0])
        steps = windows(training.taken)
        ends_whole = case.iterations % training.planned.steps == 0 and not training.carries_over
        check(training.planned, training.numbers, len(steps), case.iterations, ends_whole=ends_whole)
        if dist.is_initialized():
            dist.barrier()
    if os.environ["RANK"] == "0":
        losses = [*training.losses, loss_after(training.own)]

        def printed(share_of: Callable[[Window], float]) -> dict[str, list[float]]:
            expected, expected_norms = plain(case, steps, share_of)
            return {"losses": losses, "expected": expected, "norms": training.norms, "expected_norms": expected_norms}

        of_all: dict[str, Any] = printed(lambda window: 1.0)
        by_share = printed(lambda window: len(window[0]) / training.planned.micro_batches)
        of_all["otherwise"] = {BY_ITS_SHARE: by_share}
        print(json.dumps(of_all), flush=True)


if __name__ == "__main__":
    guard_streams()
    main()
