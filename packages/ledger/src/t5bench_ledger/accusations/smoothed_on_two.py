"""With label smoothing two processes of four micro-batches train with twice, or 8 times, the gradient.

Library: transformers
Strategies: trainer
Modes: smoothed targets
Promised: gradient_accumulation_steps "simulates larger batch sizes without additional memory", and two processes train
what one trains on the samples of both.
Not by design: as in smoothed_not_divided; average_tokens_across_devices multiplies by the processes too.
Today: take 5.15.0 or a later release, or do not accumulate.
"""

import copy
import os
import tempfile
from importlib.metadata import version

import torch
import transformers as tf
from torch import distributed as dist
from torch import multiprocessing
from torch.nn import functional as F

RECIPE = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "label_smoothing_factor": 0.1}


def train(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=32, **sizes))
    model = copy.deepcopy(plain)
    tokens = torch.randint(32, (16, 12))
    labels = torch.cat([torch.full((16, 4), -100), tokens[:, 4:]], dim=1)
    logits = plain(input_ids=tokens).logits[:, :-1]  # all sixteen samples at once
    F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    arguments = tf.TrainingArguments(folder, use_cpu=True, report_to=[], save_strategy="no", **BATCH, **RECIPE)
    samples = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    tf.Trainer(model, arguments, train_dataset=samples).train()
    applied = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    share = float(applied @ expected / (expected @ expected))
    said = "as promised" if abs(share - 1) < 0.01 else "NOT as promised"
    if rank == 0:
        print(f"the gradient that is applied is {share:.3f} of PyTorch's: {said}", flush=True)


if __name__ == "__main__":
    print("transformers", version("transformers"), "accelerate", version("accelerate"), "torch", version("torch"))
    multiprocessing.start_processes(train, (tempfile.mkdtemp(),), nprocs=2, start_method="fork")
