"""Two processes of four micro-batches train two models: the last micro-batch's gradient stays in its process.

Library: transformers
Strategies: trainer
Modes: equal targets, equal targets bf16, averaged tokens
Promised: DistributedDataParallel, which the Trainer uses, "synchronizes gradients across each model replica", and
no_sync, which leaves that out, is for all micro-batches of a step but the last.
Not by design: the condition is the wrong way round; 4.46.3 has i != len(batch_samples) - 1 where 4.46.2 has ==.
Today: take 4.46.3 or a later release, or do not accumulate.
"""

import copy
import os
import tempfile
from importlib.metadata import version

import torch
import transformers as tf
from torch import distributed as dist
from torch import multiprocessing

RECIPE = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def train(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=32, **sizes))
    plain = copy.deepcopy(model)
    tokens = torch.randint(32, (16, 12))
    plain(input_ids=tokens, labels=tokens).loss.backward()  # all sixteen samples at once
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    arguments = tf.TrainingArguments(folder, use_cpu=True, report_to=[], save_strategy="no", **BATCH, **RECIPE)
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    tf.Trainer(model, arguments, train_dataset=samples).train()
    applied = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(applied) for _ in range(2)]
    dist.all_gather(both, applied)
    apart = float((both[0] - both[1]).norm() / expected.norm())
    said = "as promised" if apart < 0.01 else "NOT as promised"
    if rank == 0:
        print(f"the gradients that two processes applied are {100 * apart:.2f} % apart: {said}", flush=True)


if __name__ == "__main__":
    print("transformers", version("transformers"), "accelerate", version("accelerate"), "torch", version("torch"))
    multiprocessing.start_processes(train, (tempfile.mkdtemp(),), nprocs=2, start_method="fork")
