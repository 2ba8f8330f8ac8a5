"""TRL's trainers inherit the Trainer: under transformers 5.2.0 SFT and DPO apply a quarter of the gradient.

Library: transformers, beneath trl; needs datasets and tokenizers
Promised: gradient_accumulation_steps "simulates larger batch sizes without additional memory", and two processes train
what one trains on the samples of both.
Not by design: under 5.23.0 and 5.24.0 the same release of TRL applies the whole gradient.
Today: take another release of transformers than 5.2.0 to 5.5.3, whose Trainer divides twice (accumulated_twice.py).
"""

import os
import tempfile

import datasets
import tokenizers
import torch
import transformers as tf
import trl

RECIPE = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "use_cpu": True, "bf16": False}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = tf.LlamaConfig(vocab_size=32, pad_token_id=0, eos_token_id=1, **SIZES)


def train(rank: int, folder: str, processes: int, batch: int, steps: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    torch.distributed.init_process_group("gloo", f"file://{folder}/{processes}", rank=rank, world_size=processes)
    torch.manual_seed(0)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(32)}, unk_token="2"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own = tf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    rows = [" ".join(str(int(n)) for n in torch.randint(3, 32, (8,))) + " " for _ in range(48)]
    dpo_rows = {"prompt": rows[:16], "chosen": rows[16:32], "rejected": rows[32:]}
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
    sft = (trl.SFTTrainer, trl.SFTConfig, {"text": rows[:16]}, {})
    dpo = (trl.DPOTrainer, trl.DPOConfig, dpo_rows, {"ref_model": tf.LlamaForCausalLM(LLAMA)})
    for trainer, config, data, against in (sft, dpo):
        model = tf.LlamaForCausalLM(LLAMA)
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        samples, arguments = datasets.Dataset.from_dict(data), config(folder, **RECIPE, **sizes)
        trainer(model, args=arguments, train_dataset=samples, processing_class=own, **against).train()
        applied = before - torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        if processes == 1:
            torch.save(applied, f"{folder}/{trainer.__name__}")
        elif rank == 0:
            expected = torch.load(f"{folder}/{trainer.__name__}")  # one process, all samples at once
            share = float(applied @ expected / (expected @ expected))
            said = "as promised" if abs(share - 1) < 0.01 else "NOT as promised"
            print(f"{trainer.__name__}: {share:.3f} of the gradient at once is applied: {said}", flush=True)


if __name__ == "__main__":
    print("transformers", tf.__version__, "trl", trl.__version__, "torch", torch.__version__, flush=True)
    directory = tempfile.mkdtemp()
    for shape in ((1, 16, 1), (2, 2, 4)):
        torch.multiprocessing.start_processes(train, (directory, *shape), shape[0], start_method="fork")
