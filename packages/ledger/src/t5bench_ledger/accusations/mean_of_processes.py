"""A process whose samples have few target tokens weighs as much as one with many.

Library: transformers
Strategies: trainer
Modes: unequal at once, unequal targets
Promised: since transformers#34191 "the loss is calculated as the mean of all tokens of the batch", which two processes
share.
Not by design: transformers#34242 and #39395 mend it: average_tokens_across_devices is true by default since 4.54.0.
Today: take 4.54.0 or a later release, or set average_tokens_across_devices (since 4.46.2).
"""

import copy
import os
import tempfile
from importlib.metadata import version

import torch
import transformers
from torch import distributed as dist
from torch import multiprocessing


def train(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    tokens = torch.randint(1, 32, (4, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    for number, row in enumerate(labels):
        row[: 1 + 3 * number] = -100
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    by_plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    by_trainer = copy.deepcopy(by_plain)
    by_plain(input_ids=tokens, labels=labels).loss.backward()  # all four samples at once
    expected = torch.cat([p.grad.flatten() for p in by_plain.parameters()])
    before = torch.cat([p.detach().flatten() for p in by_trainer.parameters()])
    arguments = transformers.TrainingArguments(
        folder, max_steps=1, per_device_train_batch_size=2, optim="sgd", learning_rate=1.0, use_cpu=True,
        lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    samples = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    transformers.Trainer(by_trainer, arguments, train_dataset=samples).train()
    applied = before - torch.cat([p.detach().flatten() for p in by_trainer.parameters()])
    error = float((applied - expected).norm() / expected.norm())
    said = "as promised" if error < 0.01 else "NOT as promised"
    if rank == 0:
        print(f"the gradient that two processes applied is {100 * error:.2f} % off: {said}", flush=True)


if __name__ == "__main__":
    print("transformers", version("transformers"), "accelerate", version("accelerate"), "torch", version("torch"))
    multiprocessing.start_processes(train, (tempfile.mkdtemp(),), nprocs=2, start_method="fork")
