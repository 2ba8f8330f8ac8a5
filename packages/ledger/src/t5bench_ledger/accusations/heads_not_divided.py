"""The gradient of BERT's heads is the sum over the micro-batches, not their mean; that of ViT's is right.

Library: transformers
Pairs: trainer, model=bert; trainer on one process, model=bert
Promised: gradient_accumulation_steps "simulates larger batch sizes without additional memory": a batch in four parts
trains what the batch trains at once.
Not by design: as in t5_not_divided, these heads divide their loss on their own and set no accepts_loss_kwargs.
Reported: transformers#47688, which is open.
Today: set type(model).accepts_loss_kwargs = False before the Trainer is made.
"""

import copy
import tempfile
from importlib.metadata import version

import torch
import transformers as tf

print("transformers", version("transformers"), "accelerate", version("accelerate"), "torch", version("torch"))
torch.manual_seed(0)
tokens = torch.randint(3, 32, (8, 12))
pixels = torch.randn(8, 3, 8, 8)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
bert = tf.BertConfig(vocab_size=32, **sizes, **options)
vit = tf.ViTConfig(image_size=8, patch_size=4, **sizes, **options)
arguments = tf.TrainingArguments(
    tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="sgd",
    learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no",
)  # fmt: skip
for plain, name, inputs, labels in (
    (tf.BertForMaskedLM(bert), "input_ids", tokens, tokens),
    (tf.BertForTokenClassification(bert), "input_ids", tokens, tokens % 3),
    (tf.BertForMultipleChoice(bert), "input_ids", torch.stack([tokens, tokens.flip(1)], dim=1), tokens[:, 0] % 2),
    (tf.ViTForImageClassification(vit), "pixel_values", pixels, tokens[:, 0] % 3),
):
    model = copy.deepcopy(plain)
    plain(**{name: inputs}, labels=labels).loss.backward()  # all eight samples at once
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    samples = [{name: row, "labels": label} for row, label in zip(inputs, labels, strict=True)]
    tf.Trainer(model, arguments, train_dataset=samples).train()
    share = float((before - torch.cat([p.detach().flatten() for p in model.parameters()])) @ expected)
    share /= float(expected @ expected)
    said = "as promised" if abs(share - 1) < 0.01 else "NOT as promised"
    print(f"{type(model).__name__}: the gradient that is applied is {share:.3f} of PyTorch's: {said}", flush=True)
