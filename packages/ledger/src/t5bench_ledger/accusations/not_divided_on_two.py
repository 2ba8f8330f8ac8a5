"""On two processes of four micro-batches T5, BART and a classifier train with twice, or 8 times, their gradient.

Library: transformers
Strategies: trainer
Modes: encoder-decoder, bart, classifier
Pairs: trainer, model=t5; trainer, model=bart; trainer, model=classifier
Promised: gradient_accumulation_steps "simulates larger batch sizes without additional memory", and two processes train
what one trains on the samples of both.
Not by design: as in t5_not_divided; and since average_tokens_across_devices is true, the processes are multiplied too.
Reported: transformers#47688, which is open.
Today: set type(model).accepts_loss_kwargs = False before the Trainer is made.
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
    t5 = tf.T5Config(vocab_size=32, d_model=16, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
    bart = tf.BartConfig(vocab_size=32, d_model=16, encoder_layers=2, decoder_layers=2, dropout=0.0, pad_token_id=0)
    bert = tf.BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_labels=3)
    bert.hidden_dropout_prob = bert.attention_probs_dropout_prob = 0.0
    tokens = torch.randint(3, 32, (16, 12))
    for name, plain, labels in (
        ("encoder-decoder", tf.T5ForConditionalGeneration(t5), tokens),
        ("bart", tf.BartForConditionalGeneration(bart), tokens),
        ("classifier", tf.BertForSequenceClassification(bert), tokens[:, 2] % 3),
    ):
        model = copy.deepcopy(plain)
        plain(input_ids=tokens, labels=labels).loss.backward()  # all sixteen samples at once
        expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        arguments = tf.TrainingArguments(folder, use_cpu=True, report_to=[], save_strategy="no", **BATCH, **RECIPE)
        samples = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
        tf.Trainer(model, arguments, train_dataset=samples).train()
        applied = before - torch.cat([p.detach().flatten() for p in model.parameters()])
        share = float(applied @ expected / (expected @ expected))
        said = "as promised" if abs(share - 1) < 0.01 else "NOT as promised"
        if rank == 0:
            print(f"{name}: the gradient that is applied is {share:.3f} of PyTorch's: {said}", flush=True)


if __name__ == "__main__":
    print("transformers", version("transformers"), "accelerate", version("accelerate"), "torch", version("torch"))
    multiprocessing.start_processes(train, (tempfile.mkdtemp(),), nprocs=2, start_method="fork")
