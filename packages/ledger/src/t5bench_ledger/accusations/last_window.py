"""The short window at the end of an epoch goes on in the next one, divided by that one's count of tokens.

Library: transformers
Strategies: trainer
Modes: last window
Promised: gradient_accumulation_steps is the "number of updates steps to accumulate the gradients for, before performing
a backward/update pass"; a step's loss is the mean of its tokens.
Not by design: 4.47.0 makes the window end with the epoch.
Today: take 4.48.1 or a later release, without 5.2.0 to 5.5.3.
"""

import copy
import tempfile
from importlib.metadata import version

import torch
import transformers

torch.manual_seed(0)
tokens = torch.randint(1, 32, (1, 12), generator=torch.Generator().manual_seed(1))
labels = torch.cat([torch.full((1, 4), -100), tokens[:, 4:]], dim=1)


def tiny_model() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


model = tiny_model()
by_trainer = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
for _ in range(2):  # all samples are the same, so a step trains the same, whatever it takes
    optimizer.zero_grad()
    model(input_ids=tokens, labels=labels).loss.backward()
    optimizer.step()
expected = torch.cat([p.detach().flatten() for p in model.parameters()]) - before

arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="sgd",
    learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no",
    logging_steps=1, disable_tqdm=True,
)  # fmt: skip
samples = [{"input_ids": tokens[0], "labels": labels[0]}] * 12  # an epoch is four micro-batches, then two
transformers.Trainer(by_trainer, arguments, train_dataset=samples).train()
applied = torch.cat([p.detach().flatten() for p in by_trainer.parameters()]) - before
print("transformers", version("transformers"), "accelerate", version("accelerate"), "torch", version("torch"))
share = float(applied @ expected / (expected @ expected))
error = float((applied - expected).norm() / expected.norm())
said = "as promised" if error < 0.01 else "NOT as promised"
print(f"the change by two steps is {share:.3f} of PyTorch's, {100 * error:.2f} % off: {said}")
