"""Trains one case by transformers' Trainer, and compares it with plain PyTorch in one process. Prints both as JSON.

    torchrun --nproc_per_node 2 by_trainer.py '{"base": "trainer", "choices": {"model": "t5", "targets": "unequal"}}'

The loss of a step is what TrainingArguments promises: the mean over the target tokens of all its micro-batches and
processes, or, where a setting says so, the mean of the processes' or of the micro-batches' means. The last number of
a curve is a loss after the last update.
"""

import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from t5bench.text import guard_streams
from t5bench_ledger.pairs.reference import Batch, Plan, Window, check, clip, plan, trained_plainly, windows
from t5bench_ledger.pairs.settings import Case, settings_of

SAMPLES = 2  # of a micro-batch of a process
LENGTH = 12
WORDS = 32
WIDTH = 16
CLASSES = 3
IGNORED = -100
FIRST_TARGET = 4
RATE = 0.1  # of SGD
SLOWER_RATE = 0.02  # of optimizers that divide by the gradient's size
# Large enough that rounding in a small gradient moves no weight by much.
EPSILON = 1e-2
DECAYS = "weight_decay"


# ---- the data --------------------------------------------------------------------------------------------------------


def samples(case: Case, count: int, *, seed: int = 5678) -> list[Batch]:
    """Each: tokens and targets, [LENGTH] or fewer, or a class. The first two tokens say which it is."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(least: int) -> int:
        return int(torch.randint(least, LENGTH, (), generator=generator))

    made = []
    for number in range(count):
        length = 1 + drawn(FIRST_TARGET + 1) if "lengths" in case.choices else LENGTH
        tokens = torch.randint(3, WORDS, (length,), generator=generator)
        tokens[0] = number % WORDS
        tokens[1] = number // WORDS
        targets = tokens.clone()
        match case.choices.get("targets"):
            case "unequal":
                targets[: min(drawn(1), length - 1)] = IGNORED
            case "none in a sample":
                targets[: FIRST_TARGET if number else length] = IGNORED
            case "all":
                pass
            case _:
                targets[:FIRST_TARGET] = IGNORED
        if case.choices.get("model") == "classifier":
            targets = tokens[2] % CLASSES
        made.append({"input_ids": tokens, "labels": targets})
    return made


def padded(own: Sequence[Batch]) -> Batch:
    """A batch of samples of unequal lengths."""
    longest = max(len(sample["input_ids"]) for sample in own)

    def filled(name: str, value: int) -> Tensor:
        rows = [sample[name] for sample in own]
        return torch.stack([F.pad(row, (0, longest - len(row)), value=value) for row in rows])

    ones = [{"mask": torch.ones_like(sample["input_ids"])} for sample in own]
    mask = torch.stack([F.pad(each["mask"], (0, longest - len(each["mask"]))) for each in ones])
    has_classes = own[0]["labels"].dim() == 0
    labels = torch.stack([sample["labels"] for sample in own]) if has_classes else filled("labels", IGNORED)
    return {"input_ids": filled("input_ids", 0), "attention_mask": mask, "labels": labels}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples, of which nobody knows the number."""

    def __init__(self, own: Sequence[Batch]) -> None:
        self.own = own

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.own)


# ---- the model -------------------------------------------------------------------------------------------------------


def model_of(case: Case) -> nn.Module:
    import transformers as tf

    torch.manual_seed(1234)
    common: dict[str, Any] = {"vocab_size": WORDS, "use_cache": False, "pad_token_id": 0}
    common["attn_implementation"] = case.choices.get("attention", "eager")
    common["tie_word_embeddings"] = "ties" in case.choices
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
    made: Any
    match case.choices.get("model"):
        case "t5":
            smooth = {"feed_forward_proj": "gated-gelu"}  # rounding cannot switch a neuron off, as it may with ReLU
            shape = {"d_model": WIDTH, "d_kv": WIDTH // 2, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 2}
            made = tf.T5ForConditionalGeneration(
                tf.T5Config(dropout_rate=0.0, decoder_start_token_id=0, **common, **smooth, **shape)
            )
        case "bart":
            layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
            heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 2 * LENGTH}
            tokens = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
            made = tf.BartForConditionalGeneration(
                tf.BartConfig(d_model=WIDTH, dropout=0.0, init_std=0.1, **common, **layers, **heads, **tokens)
            )
        case "bert":
            made = tf.BertForMaskedLM(tf.BertConfig(max_position_embeddings=LENGTH, **common, **sizes, **bert))
        case "classifier":
            config = tf.BertConfig(max_position_embeddings=LENGTH, num_labels=CLASSES, **common, **sizes, **bert)
            made = tf.BertForSequenceClassification(config)
        case "gpt2":
            dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
            config = tf.GPT2Config(
                n_embd=WIDTH, n_layer=2, n_head=2, n_positions=LENGTH, initializer_range=0.1, **common, **dropout
            )
            made = tf.GPT2LMHeadModel(config)
        case _:
            made = tf.LlamaForCausalLM(
                tf.LlamaConfig(max_position_embeddings=LENGTH, initializer_range=0.1, **common, **sizes)
            )
    if "freezes" in case.choices:
        made.get_input_embeddings().weight.requires_grad_(requires_grad=False)
    if "does not use" in case.choices:
        made.extra = nn.Linear(WIDTH, WIDTH)
    if "accepts_loss_kwargs" in case.choices:
        made.accepts_loss_kwargs = case.choices["accepts_loss_kwargs"]
    return made  # type: ignore[no-any-return]


def loss_sum(case: Case, logits: Tensor, targets: Tensor) -> Tensor:
    """Over the target tokens, or the samples of a classifier."""
    if case.choices.get("model", "gpt2") == "gpt2":  # the logits of a token are for the next one
        logits = logits[:, :-1]
        targets = targets[:, 1:]
    smoothing = 0.0 if "compute_loss_func" in case.choices else case.choices.get("label_smoothing_factor", 0.0)
    return F.cross_entropy(
        logits.float().flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORED,
        label_smoothing=float(smoothing),
        reduction="sum",
    )


def target_count(case: Case, batch: Batch) -> int:
    targets = batch["labels"]
    if case.choices.get("model", "gpt2") == "gpt2":
        targets = targets[:, 1:]
    return int(targets.ne(IGNORED).sum())


# ---- the Trainer -----------------------------------------------------------------------------------------------------


def arguments_of(case: Case, planned: Plan, directory: str, steps: int) -> dict[str, Any]:
    """Of TrainingArguments."""
    in_steps = "counts" not in case.choices
    made: dict[str, Any] = {
        "output_dir": directory,
        "use_cpu": True,
        "max_steps": steps if in_steps else -1,
        "num_train_epochs": planned.epochs,
        "per_device_train_batch_size": SAMPLES,
        "gradient_accumulation_steps": planned.micro_batches,
        "optim": "sgd",
        "learning_rate": rate(case),
        "adam_epsilon": EPSILON,
        "logging_steps": 1,
        "eval_steps": 1,
        "save_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": "mixed precision" in case.choices,
    }
    places = {setting.name: setting.place for setting in settings_of(case.base)}
    for name, value in case.choices.items():
        place = made
        for key in places[name][:-1]:
            place = place.setdefault(key, {})
        for key in places[name][-1:]:
            place[key] = value
    if "gradient_checkpointing" in case.choices:
        is_reentrant = case.choices["gradient_checkpointing"] == "reentrant"
        made |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": is_reentrant}}
    if "resumes" in case.choices:
        made["save_strategy"] = "steps"
    return made


def rate(case: Case) -> float:
    is_slower = case.choices.get("own optimizer") == "Adagrad"
    is_slower |= "optim" in case.choices and "own optimizer" not in case.choices
    return SLOWER_RATE if is_slower else RATE


def own_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer | None:
    """That is given to the Trainer; None if it makes one."""
    match case.choices.get("own optimizer"):
        case "momentum":
            return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        case "Adagrad":
            return torch.optim.Adagrad(model.parameters(), lr=SLOWER_RATE, eps=EPSILON)
    return None


def summed_over_items(case: Case) -> Callable[..., Tensor]:
    """A compute_loss_func: "accepts the raw model outputs, labels, and the number of items in the entire batch"."""

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return loss_sum(case, outputs.logits, labels) / num_items_in_batch

    return loss


class Training:
    """One training by the Trainer, or two where it resumes, and what it took and logged."""

    def __init__(self, case: Case) -> None:
        self.case = case
        drops = "dataloader_drop_last" in case.choices
        self.planned = plan(case, int(case.choices.get("per_device_train_batch_size", SAMPLES)), drops=drops)
        self.steps = case.iterations if "counts" not in case.choices else self.planned.epochs * self.planned.steps
        self.taken: list[list[Batch]] = [[]]
        self.numbers: dict[int, list[int]] = defaultdict(list)
        """Of the samples, by epoch."""
        self.losses: list[float] = []
        self.norms: list[float] = []

    def trainer(self, model: nn.Module, directory: str, *, stops_after: int) -> Any:
        import transformers

        own = self
        total = 0.0

        class Ends(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                own.taken.append([])
                control.should_training_stop |= state.global_step == stops_after

        class Recorded(transformers.Trainer):  # type: ignore[misc]
            def training_step(self, model: nn.Module, inputs: Batch, *rest: Any) -> Tensor:
                own.taken[-1].append({name: tensor.clone() for name, tensor in inputs.items()})
                rows = inputs["input_ids"][:, :2].tolist()
                own.numbers[int(round(self.state.epoch or 0.0, 6))] += [
                    first + WORDS * second for first, second in rows
                ]
                return super().training_step(model, inputs, *rest)

            def log(self, logs: dict[str, float], *rest: Any) -> None:
                nonlocal total
                if "loss" in logs:
                    # It rounds the loss, but adds it up without.
                    own.losses.append(self._total_loss_scalar - total)
                    total = self._total_loss_scalar
                    own.norms.append(float(logs.get("grad_norm", math.nan)))
                super().log(logs, *rest)

        arguments = transformers.TrainingArguments(**arguments_of(self.case, self.planned, directory, self.steps))
        data: Any = samples(self.case, self.planned.samples)
        if "iterable" in self.case.choices:
            data = Stream(data)
        made = Recorded(
            model=model, args=arguments, train_dataset=data, eval_dataset=samples(self.case, 5, seed=99),
            callbacks=[Ends()], optimizers=(own_optimizer(self.case, model), None),
            data_collator=padded if "lengths" in self.case.choices else None,
            compute_loss_func=summed_over_items(self.case) if "compute_loss_func" in self.case.choices else None,
        )  # fmt: skip
        made.remove_callback(transformers.PrinterCallback)
        return made

    def run(self, directory: str) -> nn.Module:
        """The trained model."""
        middle = self.steps // 2
        resumes = "resumes" in self.case.choices and middle > 0
        model = model_of(self.case)
        self.trainer(model, directory, stops_after=middle if resumes else self.steps).train()
        if resumes:
            model = model_of(self.case)
            again = self.trainer(model, directory, stops_after=self.steps)
            again.train(resume_from_checkpoint=f"{directory}/checkpoint-{middle}")
        return model


# ---- plain PyTorch ---------------------------------------------------------------------------------------------------


def groups(case: Case, window: Window) -> list[list[Batch]]:
    """Whose means over the target tokens are averaged: all micro-batches of a step, unless a setting says otherwise."""
    takes_own_mean = case.choices.get("accepts_loss_kwargs") is False and "compute_loss_func" not in case.choices
    if takes_own_mean:
        return [[batch] for own in window for batch in own]
    if case.choices.get("average_tokens_across_devices") is False:
        return window
    return [[batch for own in window for batch in own]]


def rate_of(case: Case, steps: int) -> Callable[[int], float]:
    """What a step's learning rate is multiplied by."""
    warmup = int(case.choices.get("warmup_steps", 0))
    kind = case.choices.get("lr_scheduler_type", "linear")

    def of(number: int) -> float:
        if kind == "constant":
            return 1.0
        if number < warmup:
            return number / warmup
        share = (number - warmup) / max(1, steps - warmup)
        match kind:
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * share))
            case "constant_with_warmup":
                return 1.0
        return 1 - share

    return of


def plain_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    given = own_optimizer(case, model)
    if given:
        return given
    # "all layers except all bias and LayerNorm weights"
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decays = [parameter for name, parameter in named if "bias" not in name and parameter.dim() > 1]
    others = [parameter for name, parameter in named if "bias" in name or parameter.dim() <= 1]
    decay = float(case.choices.get(DECAYS, 0.0))
    made = [{"params": decays, DECAYS: decay}, {"params": others, DECAYS: 0.0}]
    if "optim" in case.choices:
        return torch.optim.AdamW(made, lr=rate(case), eps=EPSILON)
    return torch.optim.SGD(made, lr=rate(case))


def plain(case: Case, model: nn.Module, steps: Sequence[Window]) -> tuple[list[float], list[float]]:
    in_bf16 = "mixed precision" in case.choices

    def backward(window: Window) -> float:
        own = groups(case, window)
        total = 0.0
        for group in own:
            count = sum(target_count(case, batch) for batch in group)
            for batch in group:
                with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
                    logits = model(**batch).logits
                loss = loss_sum(case, logits, batch["labels"]) / count / len(own)
                loss.backward()
                total += float(loss.detach())
        return total

    limit = float(case.choices.get("max_grad_norm", 1.0))
    optimizer = plain_optimizer(case, model)
    return trained_plainly(optimizer, steps, backward, rate_of(case, len(steps)), lambda: clip(model, limit))


def loss_after(case: Case, model: nn.Module) -> float:
    """Of some other samples."""
    batch = padded(samples(case, 4, seed=77))
    model.eval()
    with torch.no_grad():
        return float(loss_sum(case, model(**batch).logits, batch["labels"])) / target_count(case, batch)


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    reference = model_of(case)
    training = Training(case)
    with tempfile.TemporaryDirectory() as own:
        directory = own if case.processes == 1 else shared(own)
        model = training.run(directory)
        steps = windows(training.taken)
        epochs = [training.numbers[epoch] for epoch in sorted(training.numbers)]
        ends_whole = training.steps % training.planned.steps == 0
        check(training.planned, epochs, len(steps), training.steps, ends_whole=ends_whole)
        if dist.is_initialized():
            dist.barrier()
    if os.environ["RANK"] == "0":
        expected, expected_norms = plain(case, reference, steps)
        printed = {
            "losses": [*training.losses, loss_after(case, model)],
            "expected": [*expected, loss_after(case, reference)],
            "norms": training.norms,
            "expected_norms": expected_norms,
        }
        print(json.dumps(printed), flush=True)


def shared(directory: str) -> str:
    """That of the first process."""
    dist.init_process_group("gloo")
    names = [directory]
    dist.broadcast_object_list(names)
    return names[0]


if __name__ == "__main__":
    guard_streams()
    main()
