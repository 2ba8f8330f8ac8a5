"""With label smoothing the gradient is the sum over the micro-batches, not their mean.

Library: transformers
Strategies: trainer
Modes: smoothed targets
Promised: gradient_accumulation_steps "simulates larger batch sizes without additional memory": a batch in four parts
trains what the batch trains at once.
Not by design: transformers#46731 and #47261 mend it: the smoother takes the mean, and nobody divides the sum.
Today: take 5.15.1 or a later release, or do not accumulate.
"""

import copy
import tempfile
from importlib.metadata import version

import torch
import transformers
from torch.nn import functional as F

torch.manual_seed(0)
tokens = torch.randint(1, 32, (8, 12), generator=torch.Generator().manual_seed(1))
labels = torch.cat([torch.full((8, 4), -100), tokens[:, 4:]], dim=1)


def smoothed_loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def tiny_model() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


model = tiny_model()
by_trainer = copy.deepcopy(model)
smoothed_loss(model(input_ids=tokens).logits).backward()
expected = torch.cat([p.grad.flatten() for p in model.parameters()])

before = torch.cat([p.detach().flatten() for p in by_trainer.parameters()])
arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="sgd",
    learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no",
    logging_steps=1, disable_tqdm=True, label_smoothing_factor=0.1,
)  # fmt: skip
samples = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
transformers.Trainer(by_trainer, arguments, train_dataset=samples).train()
applied = before - torch.cat([p.detach().flatten() for p in by_trainer.parameters()])
print("transformers", version("transformers"), "accelerate", version("accelerate"), "torch", version("torch"))
share = float(applied @ expected / (expected @ expected))
error = float((applied - expected).norm() / expected.norm())
said = "as promised" if error < 0.01 else "NOT as promised"
print(f"the gradient that the Trainer applied is {share:.3f} of PyTorch's, {100 * error:.2f} % off: {said}")
