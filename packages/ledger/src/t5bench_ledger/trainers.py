"""transformers' Trainer and accelerate's loop on two processes, compared with plain PyTorch in one.

The reference trains on the samples that the processes took for a step, all at once. Its loss is the mean of the
cross-entropy over all target tokens of the step, whichever process and micro-batch they are in. SGD, six steps. Of the
project it needs only the guard of its output, so the libraries' developers can try it:

    torchrun --nproc_per_node 2 packages/ledger/src/t5bench_ledger/trainers.py --by trainer --case "unequal targets"
"""

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader

from t5bench.text import guard_streams

ITERATIONS = 6
SAVED_AFTER = 3
SAMPLES = 2  # of a micro-batch of a process
LENGTH = 12
WORDS = 32
WIDTH = 16
RATE = 0.1
CLIP_NORM = 0.8
IGNORED = -100  # a token that is no target
SMOOTHING = 0.1
CLASSES = 3
BY_ITS_SHARE = "weighs a short last window by its share"


@dataclass(frozen=True)
class Case:
    """What is special in a training."""

    micro_batches: int = 4
    targets: str = "equal"
    """equal: every sample has as many target tokens; unequal; all: every token is one, also the first of a sample;
    class: a sample has one target, its class."""
    model: str = "llama"
    """Of transformers: llama, whose loss the Trainer divides, or t5, bart and classifier, which divide their own."""
    smoothing: float = 0.0
    resumes: bool = False
    """Saved after half of the steps, and continued."""
    micro_batches_of_epoch: int = 0
    """0: one epoch is the whole training."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What it adds to TrainingArguments, or to accelerate's DataLoaderConfiguration."""


CASES = {
    "equal targets": Case(),
    "unequal targets": Case(targets="unequal"),
    "unequal at once": Case(targets="unequal", micro_batches=1),
    "averaged tokens": Case(targets="unequal", options={"average_tokens_across_devices": True}),
    "all targets": Case(targets="all"),
    "equal targets bf16": Case(),
    "encoder-decoder": Case(model="t5"),
    "unequal encoder-decoder": Case(model="t5", targets="unequal"),
    "one process": Case(),
    "unequal on one process": Case(targets="unequal"),
    "bart": Case(model="bart"),
    "encoder-decoder on one process": Case(model="t5"),
    "classifier": Case(model="classifier", targets="class"),
    "classifier on one process": Case(model="classifier", targets="class"),
    "smoothed targets": Case(smoothing=SMOOTHING),
    "last window": Case(micro_batches_of_epoch=6),
    "continued": Case(resumes=True),
    "split batches": Case(options={"split_batches": True}),
    "dispatched batches": Case(options={"dispatch_batches": True}),
}
Batch = dict[str, Tensor]


def samples(case: Case, processes: int) -> list[Batch]:
    """A data set: tokens, [LENGTH], and targets, [LENGTH], or a class."""
    micro_batches = case.micro_batches_of_epoch or ITERATIONS * case.micro_batches
    generator = torch.Generator().manual_seed(5678)
    made = []
    for number in range(micro_batches * processes * SAMPLES):
        tokens = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        targets = tokens.clone()
        first = 4
        if case.targets == "unequal":
            first = 1 + int(torch.randint(LENGTH - 1, (1,), generator=generator))
        if case.targets != "all":
            targets[:first] = IGNORED
        tokens[0] = number % WORDS
        tokens[1] = number // WORDS  # together they say which sample it is
        if case.targets == "class":
            targets = tokens[2] % CLASSES
        made.append({"input_ids": tokens, "labels": targets})
    return made


def loss_of(
    logits: Tensor, targets: Tensor, *, shifts: bool, smoothing: float = 0.0, takes_mean: bool = True
) -> Tensor:
    """The mean over the target tokens, or their sum. shifts: the logits of a token are for the next one."""
    if shifts:
        logits = logits[:, :-1]
        targets = targets[:, 1:]
    return F.cross_entropy(
        logits.float().flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="mean" if takes_mean else "sum",
    )


def plain(
    model: nn.Module,
    forward: Callable[[nn.Module, Batch], Tensor],
    steps: Sequence[Batch],
    rate_of: Callable[[int], float],
    *,
    in_bf16: bool,
    share_of: Callable[[int], float] = lambda number: 1.0,
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step, on its whole batch at once. forward: its loss. rate_of: a step's.
    share_of: what a step's gradient is multiplied by."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    norms = []
    for number, batch in enumerate(steps):
        optimizer.param_groups[0]["lr"] = rate_of(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            loss = forward(model, batch)
        optimizer.zero_grad()
        (loss * share_of(number)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return losses, norms


def whole_steps(own: Sequence[Sequence[Batch]]) -> list[Batch]:
    """The batch of each step, from the micro-batches that each process took for it."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    steps = []
    for of_processes in zip(*gathered, strict=True):
        batches = [batch for micro_batches in of_processes for batch in micro_batches]
        steps.append({name: torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels")})
    return steps


def must_be_whole(case: Case, steps: Sequence[Batch]) -> None:
    """Every sample must have been taken once. Raises ValueError."""
    if case.micro_batches_of_epoch:
        return
    taken = [tuple(row.tolist()) for step in steps for row in step["input_ids"][:, :2]]
    wanted = ITERATIONS * case.micro_batches * dist.get_world_size() * SAMPLES
    if len(taken) != wanted or len(set(taken)) != wanted:
        raise ValueError(f"it took {len(taken)} samples, {len(set(taken))} different ones, of {wanted}")


# ---- transformers' Trainer -------------------------------------------------------------------------------------------


def model_of(case: Case) -> nn.Module:
    import transformers

    torch.manual_seed(1234)
    if case.model == "t5":
        config = transformers.T5Config(
            vocab_size=WORDS, d_model=WIDTH, d_kv=WIDTH // 2, d_ff=2 * WIDTH, num_layers=2, num_heads=2,
            feed_forward_proj="gated-gelu",  # smooth: rounding cannot switch a neuron off, as it may with ReLU
            dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)
    if case.model == "bart":
        config = transformers.BartConfig(
            vocab_size=WORDS, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=2 * WIDTH,
            decoder_ffn_dim=2 * WIDTH, encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0,
            max_position_embeddings=2 * LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=2, init_std=0.1, use_cache=False, attn_implementation="eager",
        )  # fmt: skip
        return transformers.BartForConditionalGeneration(config)
    if case.model == "classifier":
        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, initializer_range=0.1, num_labels=CLASSES, attn_implementation="eager",
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH, initializer_range=0.1, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trained_by_trainer(case: Case, directory: Path, *, in_bf16: bool) -> dict[str, list[float]]:
    """What the Trainer logs of each step, and what is expected."""
    import transformers

    model = model_of(case)
    taken: list[list[Batch]] = [[]]
    losses = []
    norms = []
    logged = [0.0]

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            taken.append([])
            control.should_training_stop |= case.resumes and len(losses) < SAVED_AFTER == state.global_step

    class Recorded(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Batch, *rest: Any) -> Tensor:
            taken[-1].append({name: tensor.clone() for name, tensor in inputs.items()})
            return super().training_step(model, inputs, *rest)

        def log(self, logs: dict[str, float], *rest: Any) -> None:
            if "loss" in logs:
                # It rounds the loss to four digits, but adds it up without.
                loss = self._total_loss_scalar - logged[0]
                logged[0] = self._total_loss_scalar
                is_same = abs(loss - float(logs["loss"])) < 1e-4
                losses.append(loss if is_same else float(logs["loss"]))
                norms.append(float(logs["grad_norm"]))
            super().log(logs, *rest)

    arguments = transformers.TrainingArguments(
        output_dir=str(directory), use_cpu=True, max_steps=ITERATIONS, per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=case.micro_batches, optim="sgd", learning_rate=RATE, lr_scheduler_type="linear",
        max_grad_norm=CLIP_NORM, bf16=in_bf16, label_smoothing_factor=case.smoothing, logging_steps=1,
        save_strategy="steps" if case.resumes else "no", save_steps=SAVED_AFTER, report_to=[], disable_tqdm=True,
        remove_unused_columns=False, **case.options,
    )  # fmt: skip
    data = samples(case, int(os.environ["WORLD_SIZE"]))
    reference = copy.deepcopy(model)
    trainer = Recorded(model=model, args=arguments, train_dataset=data, callbacks=[Ends()])
    trainer.train()
    if case.resumes:
        logged[0] = 0.0
        again = Recorded(model=model_of(case), args=arguments, train_dataset=data, callbacks=[Ends()])
        again.train(resume_from_checkpoint=str(directory / f"checkpoint-{SAVED_AFTER}"))
    if not dist.is_initialized():  # one process, which the Trainer leaves alone
        dist.init_process_group("gloo")
    steps = whole_steps([step for step in taken if step])
    must_be_whole(case, steps)
    is_causal = case.model == "llama"

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(**batch).logits
        if case.targets == "class":
            return F.cross_entropy(logits.float(), batch["labels"])
        return loss_of(logits, batch["labels"], shifts=is_causal, smoothing=case.smoothing)

    expected, expected_norms = plain(
        reference, forward, steps, lambda number: RATE * (1 - number / ITERATIONS), in_bf16=in_bf16
    )
    return {"losses": losses, "expected": expected, "norms": norms, "expected_norms": expected_norms}


# ---- accelerate's loop -----------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A small model that needs no other library."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1234)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = 4 * self.head(torch.tanh(self.middle(self.embedding(tokens))))
        return logits


def accelerator_of(case: Case, stage: int, *, in_bf16: bool) -> Any:
    """An Accelerator; with DeepSpeed if there is a ZeRO stage."""
    import accelerate

    precision = "bf16" if in_bf16 else "no"
    if not stage:
        options = accelerate.DataLoaderConfiguration(**case.options)
        return accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=case.micro_batches,
            mixed_precision=precision,
            dataloader_config=options,
        )
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    import deepspeed

    # Its all-reduce on a CPU is for inference alone, and would first be compiled.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo")
    plugin = accelerate.DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=case.micro_batches, gradient_clipping=CLIP_NORM
    )
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = SAMPLES
    plugin.deepspeed_config["train_batch_size"] = SAMPLES * case.micro_batches * dist.get_world_size()
    plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
    return accelerate.Accelerator(
        deepspeed_plugin=plugin, mixed_precision=precision, gradient_accumulation_steps=case.micro_batches
    )


class Loop:
    """accelerate's loop, as its guides have it. losses and norms are those of the steps so far."""

    def __init__(self, case: Case, accelerator: Any, model: Any, optimizer: Any) -> None:
        self.case = case
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.taken: list[list[Batch]] = [[]]
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.total = torch.zeros(())

    def train_epoch(self, loader: Any, *, until: int = ITERATIONS) -> None:
        window: list[Batch] = []
        for batch in loader:
            window.append(batch)
            if self.case.targets == "equal":
                self.train_micro_batch(batch)
            elif len(window) == self.case.micro_batches:
                self.train_window(window)
                window = []
            if len(self.losses) == until:
                return

    def train_micro_batch(self, batch: Batch) -> None:
        """With accelerate's own accumulation."""
        self.taken[-1].append(batch)
        with self.accelerator.accumulate(self.model):
            loss = loss_of(self.model(batch["input_ids"]), batch["labels"], shifts=False)
            self.accelerator.backward(loss)
            norm = None
            if self.accelerator.sync_gradients:
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.total += loss.detach()
        if self.accelerator.sync_gradients:
            self.total /= len(self.taken[-1]) * dist.get_world_size()
            self.end_step(self.model.get_global_grad_norm() if hasattr(self.model, "get_global_grad_norm") else norm)

    def train_window(self, window: Sequence[Batch]) -> None:
        """As the guide for samples of variable size: the sum, divided by the target tokens of all processes."""
        processes = dist.get_world_size()
        own_count = torch.tensor(sum(int(batch["labels"].ne(IGNORED).sum()) for batch in window))
        count = self.accelerator.gather(own_count).sum()
        for number, batch in enumerate(window):
            self.taken[-1].append(batch)
            is_last = number == len(window) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self.model):
                summed = loss_of(self.model(batch["input_ids"]), batch["labels"], shifts=False, takes_mean=False)
                self.accelerator.backward(summed * self.case.micro_batches * processes / count)
            self.total += summed.detach() / count
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.end_step(norm)

    def end_step(self, norm: Any) -> None:
        dist.all_reduce(self.total)
        self.losses.append(float(self.total))
        self.norms.append(float("nan") if norm is None else float(norm))
        self.total = torch.zeros(())
        self.taken.append([])

    def save_and_load(self, directory: Path) -> None:
        """Forgets the weights in between."""
        self.accelerator.save_state(str(directory))
        self.accelerator.wait_for_everyone()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.accelerator.load_state(str(directory))


def trained_by_accelerate(case: Case, stage: int, directory: Path, *, in_bf16: bool) -> dict[str, Any]:
    """Loss and norm of each step of the loop, and what is expected."""
    accelerator = accelerator_of(case, stage, in_bf16=in_bf16)
    processes = dist.get_world_size()
    model: Any = Model()
    reference = copy.deepcopy(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
    data = samples(case, processes)
    loader: Any
    if stage:  # on a CPU accelerate takes it for one process, and would not divide the data
        model, optimizer = accelerator.prepare(model, optimizer)
        loader = DataLoader(data[dist.get_rank() :: processes], batch_size=SAMPLES)  # type: ignore[arg-type]
    else:
        size = SAMPLES * processes if case.options.get("split_batches") else SAMPLES
        loader = DataLoader(data, batch_size=size)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loop = Loop(case, accelerator, model, optimizer)
    if case.resumes:
        import accelerate

        loop.train_epoch(loader, until=SAVED_AFTER)
        loop.save_and_load(directory)
        loader = accelerate.skip_first_batches(loader, SAVED_AFTER * case.micro_batches)
    while len(loop.losses) < ITERATIONS:
        loop.train_epoch(loader)
    steps = whole_steps([step for step in loop.taken if step])
    must_be_whole(case, steps)

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model(batch["input_ids"]), batch["labels"], shifts=False)

    of_each_step = [len(window) / case.micro_batches for window in loop.taken if window]

    def expected_of(share_of: Callable[[int], float]) -> dict[str, list[float]]:
        model = copy.deepcopy(reference)
        expected, norms = plain(model, forward, steps, lambda number: RATE, in_bf16=in_bf16, share_of=share_of)
        return {"losses": loop.losses, "expected": expected, "norms": loop.norms, "expected_norms": norms}

    printed: dict[str, Any] = expected_of(lambda number: 1.0)
    if case.micro_batches_of_epoch:
        printed["otherwise"] = {BY_ITS_SHARE: expected_of(of_each_step.__getitem__)}
    return printed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--by", choices=["trainer", "accelerate"], default="accelerate")
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO; 0: DDP")
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--directory", type=Path, help="of checkpoints, the same for all processes")
    args = parser.parse_args()
    case = CASES[args.case]
    directory = args.directory or Path(tempfile.gettempdir(), f"trainers-{os.environ['MASTER_PORT']}")
    if args.by == "trainer":
        printed = trained_by_trainer(case, directory, in_bf16=args.bf16)
    else:
        printed = trained_by_accelerate(case, args.stage, directory, in_bf16=args.bf16)
    if dist.get_rank() == 0:
        print(json.dumps(printed), flush=True)


if __name__ == "__main__":
    guard_streams()
    main()
