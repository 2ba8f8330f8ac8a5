"""A classifier's gradient is the sum over the micro-batches, not their mean.

Library: transformers
Strategies: trainer
Modes: classifier, classifier on one process
Pairs: trainer on one process, model=classifier
Promised: gradient_accumulation_steps "simulates larger batch sizes without additional memory": a batch in four parts
trains what the batch trains at once.
Not by design: the model divides its loss on its own, and the Trainer takes it for one that uses num_items_in_batch.
Other models of the library set accepts_loss_kwargs = False for this reason.
Reported: transformers#47688, which is open.
Today: set type(model).accepts_loss_kwargs = False before the Trainer is made.
"""

import copy
import tempfile
from importlib.metadata import version

import torch
import transformers

torch.manual_seed(0)
tokens = torch.randint(1, 32, (8, 12), generator=torch.Generator().manual_seed(1))
labels = tokens[:, 2] % 3


def tiny_model() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


model = tiny_model()
by_trainer = copy.deepcopy(model)
model(input_ids=tokens, labels=labels).loss.backward()
expected = torch.cat([p.grad.flatten() for p in model.parameters()])

before = torch.cat([p.detach().flatten() for p in by_trainer.parameters()])
arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="sgd",
    learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no",
    logging_steps=1, disable_tqdm=True,
)  # fmt: skip
samples = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
transformers.Trainer(by_trainer, arguments, train_dataset=samples).train()
applied = before - torch.cat([p.detach().flatten() for p in by_trainer.parameters()])
print("transformers", version("transformers"), "accelerate", version("accelerate"), "torch", version("torch"))
share = float(applied @ expected / (expected @ expected))
error = float((applied - expected).norm() / expected.norm())
said = "as promised" if error < 0.01 else "NOT as promised"
print(f"the gradient that the Trainer applied is {share:.3f} of PyTorch's, {100 * error:.2f} % off: {said}")
