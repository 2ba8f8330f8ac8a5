"""With T5, samples with few target tokens weigh as much as those with many.

Library: transformers
Strategies: trainer
Modes: unequal encoder-decoder
Promised: since transformers#34191 "the loss is calculated as the mean of all tokens of the batch".
Not by design: transformers#37766 changes T5 with other models; T5 takes the Trainer's count of tokens and drops it.
Today: take samples of equal length, or a loss of your own by compute_loss_func.
"""

import copy
import tempfile
from importlib.metadata import version

import torch
import transformers

torch.manual_seed(0)
tokens = torch.randint(1, 32, (8, 12), generator=torch.Generator().manual_seed(1))
labels = tokens.clone()
for number, row in enumerate(labels):
    row[: 1 + number] = -100


def tiny_model() -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


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
