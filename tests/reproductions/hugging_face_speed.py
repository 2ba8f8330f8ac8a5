"""What an iteration of the native engine costs beside plain Hugging Face, on one thread of a CPU, in one process.

    PYTHONPATH=. python tests/reproductions/hugging_face_speed.py [--bf16]

6 + 6 layers of 512, batch 2, 512 and 128 tokens. Hugging Face's model is the same architecture (native/reference.py),
with its own attention (sdpa), autocast for bf16, and PyTorch's fused AdamW and clipping. Both train in turn; the ratio
is of processor seconds, which other programs on the machine disturb less than time.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from native.arguments import parse
from native.data_parallel import TorchTrainer
from native.parallel import Mesh
from native.reference import build

PAIRS = 8
FLAGS = """--hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 2048 --max-position-embeddings 512
--encoder-num-layers 6 --decoder-num-layers 6 --encoder-seq-length 512 --decoder-seq-length 128
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 2 --train-iters 100 --lr 1e-4
--data-path none --tokenizer-model none --distributed-backend gloo"""


def batch_of(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens; an eighth of the encoder's and a fifth of the decoder's are padding."""
    torch.manual_seed(0)
    encoder = torch.randint(5, 32000, (2, args.encoder_seq_length))
    decoder, labels = torch.randint(5, 32000, (2, 2, args.decoder_seq_length))
    encoder[:, 448:] = args.pad_token
    decoder[:, 102:] = args.pad_token
    labels[:, 102:] = -1
    return encoder, decoder, labels


def hugging_face_step(args: argparse.Namespace, batch: tuple[Tensor, Tensor, Tensor]) -> Callable[[], None]:
    model = build(args, "sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    encoder, decoder, labels = batch
    mask = (encoder != args.pad_token).long()
    ignored = labels.masked_fill(labels < 0, -100)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            output = model(input_ids=encoder, attention_mask=mask, decoder_input_ids=decoder, labels=ignored)
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
    is_bf16 = parser.parse_args().bf16
    torch.set_num_threads(1)
    args = parse(FLAGS.split() + ["--bf16"] * is_bf16)
    args.padded_vocab_size = 32128
    args.pad_token = 0
    batch = batch_of(args)
    trainer = TorchTrainer(args, Mesh())
    hugging_face = hugging_face_step(args, batch)

    def native() -> None:
        trainer.step(batch, args.lr)

    pairs = [(processor_seconds(native), processor_seconds(hugging_face)) for _ in range(PAIRS + 1)][1:]
    ratios = sorted(native_seconds / other for native_seconds, other in pairs)
    ours, theirs = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    print(f"native {ours:.3f} s, Hugging Face {theirs:.3f} s of a processor an iteration,", end=" ")
    print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
