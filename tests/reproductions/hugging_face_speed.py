"""What an iteration of the native engine costs beside plain Hugging Face, on one thread of a CPU, in one process.

    PYTHONPATH=. python tests/reproductions/hugging_face_speed.py [--kind KIND] [--bf16]

6 layers of 512 (of encoder-decoders 6 + 6), batch 2, 512 tokens (and 128 of the decoder). Hugging Face's model is the
same architecture, with the fastest attention that it has (sdpa, and for T5 its own), autocast for bf16, and PyTorch's
fused AdamW and clipping. Both train in turn; the ratio is of processor seconds, which other programs on the machine
disturb less than time.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from native.arguments import parse
from native.data_parallel import TorchTrainer
from native.parallel import Mesh
from native.reference import build
from t5bench.costmodel.transformers_config import architecture_of
from t5bench.imports import import_transformers

PAIRS = 8
VOCABULARY = 32128
PAD = 0
LENGTH = 512
DECODER_LENGTH = 128
# By kind; the launchers' own T5 is Blenderbot's model.
CONFIGS = {
    "llama": {
        "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1408, "vocab_size": VOCABULARY,
    },
    "t5-v1.1": {
        "model_type": "t5", "num_layers": 6, "num_decoder_layers": 6, "d_model": 512, "num_heads": 8, "d_kv": 64,
        "d_ff": 1024, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "vocab_size": VOCABULARY,
        "dropout_rate": 0.0,
    },
}  # fmt: skip
OWN = "own-t5"
SIZES = """--hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 2048 --max-position-embeddings 512
--encoder-num-layers 6 --decoder-num-layers 6 --encoder-seq-length 512 --decoder-seq-length 128
--tokenizer-model none"""
TRAINING = """--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 2 --train-iters 100
--lr 1e-4 --data-path none --distributed-backend gloo"""


def arguments_of(kind: str, *, is_bf16: bool) -> argparse.Namespace:
    """The engine's."""
    family = "gpt" if kind == "llama" else "t5"
    sizes = SIZES.split()
    if kind != OWN:
        lengths = (LENGTH,) if family == "gpt" else (LENGTH, DECODER_LENGTH)
        model = architecture_of(CONFIGS[kind], *lengths)
        sizes = ["--model-description", model.description(), "--hidden-size", model.hidden]
        sizes += ["--num-attention-heads", model.heads, "--ffn-hidden-size", model.ffn]
        sizes += ["--max-position-embeddings", model.position_rows]
        if family == "t5":
            sizes += ["--encoder-num-layers", model.encoder_layers, "--decoder-num-layers", model.decoder_layers]
            sizes += [
                "--encoder-seq-length",
                LENGTH,
                "--decoder-seq-length",
                DECODER_LENGTH,
                "--tokenizer-model",
                "none",
            ]
        else:
            sizes += ["--num-layers", model.decoder_layers, "--seq-length", LENGTH, "--vocab-file", "none"]
    args = parse([*map(str, sizes), *TRAINING.split(), *["--bf16"] * is_bf16], family)
    args.padded_vocab_size = VOCABULARY
    args.pad_token = PAD
    return args


def batch_of(args: argparse.Namespace) -> tuple[Tensor, ...]:
    """Random tokens; an eighth of an encoder's and a fifth of its decoder's are padding."""
    torch.manual_seed(0)
    if args.family == "gpt":
        text = torch.randint(5, 32000, (2, args.seq_length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    encoder = torch.randint(5, 32000, (2, args.encoder_seq_length))
    decoder, labels = torch.randint(5, 32000, (2, 2, args.decoder_seq_length))
    encoder[:, 448:] = args.pad_token
    decoder[:, 102:] = args.pad_token
    labels[:, 102:] = -1
    return encoder, decoder, labels


def hugging_face_model(kind: str, args: argparse.Namespace) -> nn.Module:
    """With its own random weights."""
    if kind == OWN:
        return build(args, "sdpa").train()
    transformers = import_transformers()
    options = dict(CONFIGS[kind])
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options, use_cache=False)
    if kind == "llama":
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    return transformers.AutoModelForSeq2SeqLM.from_config(config).train()


def hugging_face_step(kind: str, args: argparse.Namespace, batch: tuple[Tensor, ...]) -> Callable[[], None]:
    model = hugging_face_model(kind, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    if args.family == "gpt":
        tokens, labels = batch
        inputs = {"input_ids": tokens, "shift_labels": labels, "labels": labels}
    else:
        encoder, decoder, labels = batch
        mask = (encoder != args.pad_token).long()
        ignored = labels.masked_fill(labels < 0, -100)
        inputs = {"input_ids": encoder, "attention_mask": mask, "decoder_input_ids": decoder, "labels": ignored}

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            output = model(**inputs)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


def processor_seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--kind", choices=(OWN, *CONFIGS), default=OWN)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    args = arguments_of(asked.kind, is_bf16=asked.bf16)
    batch = batch_of(args)
    trainer = TorchTrainer(args, Mesh())
    hugging_face = hugging_face_step(asked.kind, args, batch)

    def native() -> None:
        trainer.step(batch, args.lr)

    pairs = [(processor_seconds(native), processor_seconds(hugging_face)) for _ in range(PAIRS + 1)][1:]
    ratios = sorted(native_seconds / other for native_seconds, other in pairs)
    ours, theirs = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    print(f"native {ours:.3f} s, Hugging Face {theirs:.3f} s of a processor an iteration,", end=" ")
    print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
