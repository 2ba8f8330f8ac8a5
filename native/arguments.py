"""The command line: Megatron-DeepSpeed's, as the launchers build it, with --compile, --share-gpus, --trace and --fsdp2.

An unknown flag is an error. --help names the few flags that are accepted but have no effect.
"""

import argparse
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from t5bench import Problem, note
from t5bench.costmodel.job import beyond_native
from t5bench.costmodel.schedule import (
    GATHERED_AGAIN,
    INTERLEAVED,
    ONE_F_ONE_B,
    SCHEDULES,
    ZERO_BUBBLE,
    interleaving_fault,
)

EXIT_CONFIGURATION = 2


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Problem(message, "python -m native.pretrain_t5 --help lists the flags")


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def shares(text: str) -> list[float]:
    """Three non-negative numbers, not all zero, from "949,50,1"; omitted ones are 0."""
    numbers = [float(number) for number in text.split(",")]
    if len(numbers) > 3 or min(numbers) < 0 or not 0 < sum(numbers) < float("inf"):
        raise ValueError
    return [*numbers, 0.0, 0.0][:3]


# A flag, its type or choices (bool is a switch), its default (REQUIRED if it must be given), and its meaning.
Flag = tuple[str, Any, Any, str]
REQUIRED: Any = object()
FLAGS: list[Flag] = [
    ("--tensor-model-parallel-size", positive, 1, "processes that share each layer"),
    ("--sequence-parallel", bool, False, "tensor-parallel processes share the tokens between the layers, too"),
    ("--pipeline-model-parallel-size", positive, 1, "stages of layers, on separate processes"),
    (
        "--pipeline-schedule",
        SCHEDULES,
        ONE_F_ONE_B,
        "order in which stages take micro-batches (this engine's own flag)",
    ),
    ("--virtual-pipeline-stages", positive, 1, "model parts per stage (this engine's own flag)"),
    ("--fsdp2", bool, False, "shard parameters, gradients and optimizer states with FSDP2 (this engine's own flag)"),
    ("--fsdp2-keep-parameters", bool, False, "gather parameters once per iteration and keep them until its end"),
    ("--fsdp2-shard-size", int, 0, "processes that share one copy of the states; 0: all data-parallel processes"),
    (
        "--model-description",
        str,
        None,
        "the model's parts as JSON, which say all but the lengths of sequences (this engine's own flag)",
    ),
    ("--hidden-size", positive, REQUIRED, "hidden dimension"),
    ("--num-attention-heads", positive, REQUIRED, "attention heads"),
    ("--kv-channels", positive, None, "dimension per head (default: hidden size / heads)"),
    ("--ffn-hidden-size", positive, REQUIRED, "feed-forward dimension"),
    ("--max-position-embeddings", positive, REQUIRED, "number of position embeddings"),
    ("--attention-dropout", float, 0.1, "dropout of attention weights"),
    ("--hidden-dropout", float, 0.1, "dropout of hidden states"),
    ("--no-bias-gelu-fusion", bool, False, "exact GELU instead of the tanh form of Megatron's fused kernel"),
    ("--init-method-std", float, 0.02, "standard deviation of initial weights"),
    ("--micro-batch-size", positive, REQUIRED, "samples per forward pass on a data-parallel rank"),
    ("--global-batch-size", positive, REQUIRED, "samples per iteration"),
    ("--train-iters", positive, REQUIRED, "number of iterations"),
    ("--skip-train", bool, False, "only evaluate the checkpoint of --load"),
    ("--exit-interval", positive, None, "stop (and save) after an iteration divisible by this"),
    ("--lr", float, REQUIRED, "peak learning rate"),
    ("--min-lr", float, 0.0, "learning rate at the end"),
    ("--lr-decay-style", ("constant", "linear", "cosine"), "linear", "shape of the decay over --lr-decay-iters"),
    ("--lr-decay-iters", positive, None, "iterations until the rate is --min-lr (default: --train-iters)"),
    ("--lr-warmup-iters", int, 0, "iterations of linear warm-up"),
    ("--weight-decay", float, 0.01, "AdamW weight decay, except for biases and LayerNorms"),
    ("--adam-beta1", float, 0.9, "AdamW's decay of the gradient average"),
    ("--adam-beta2", float, 0.999, "AdamW's decay of the squared-gradient average"),
    ("--adam-eps", float, 1e-8, "AdamW's epsilon"),
    ("--clip-grad", float, 1.0, "largest global gradient norm; 0 turns clipping off"),
    ("--recompute-granularity", ("selective", "full"), None, "recompute attention or layers in the backward pass"),
    ("--recompute-method", ("uniform",), None, "no effect: comes with --recompute-granularity full"),
    ("--recompute-num-layers", int, None, "no effect: each layer is recomputed alone"),
    ("--seed", positive, 1234, "seed of weights, data order and dropout"),
    ("--bf16", bool, False, "compute in bfloat16 with float32 master weights (default: float32)"),
    ("--compile", bool, False, "torch.compile each layer (this engine's own flag; not with ZeRO-3)"),
    ("--data-path", str, REQUIRED, "<path> of <path>.bin and <path>.idx"),
    ("--data-impl", ("mmap", "infer"), "mmap", "the only supported format"),
    ("--split", shares, [969.0, 30.0, 1.0], "shares of train, validation and test documents"),
    ("--num-workers", int, 2, "processes per rank that prepare samples"),
    ("--make-vocab-size-divisible-by", positive, 128, "the vocabulary is padded to a multiple of this times TP"),
    ("--log-interval", positive, 100, "iterations between log lines"),
    ("--eval-interval", positive, 1000, "iterations between evaluations"),
    ("--eval-iters", int, 100, "batches per evaluation; 0 turns evaluation off"),
    ("--distributed-backend", ("nccl", "gloo"), "nccl", "nccl runs on GPUs, gloo on CPUs"),
    ("--share-gpus", bool, False, "let processes of a node share its GPUs, over gloo (this engine's own flag)"),
    ("--distributed-timeout-minutes", positive, 10, "minutes after which a stuck collective ends the run"),
    ("--tensorboard-dir", str, None, "directory of TensorBoard events"),
    ("--tensorboard-log-interval", positive, 1, "no effect: every iteration is written when the log line is"),
    ("--wandb-project", str, "", "W&B project; without one nothing goes to W&B"),
    ("--wandb-exp-name", str, "", "W&B run name"),
    ("--wandb-save-dir", str, "", "directory of W&B's local files"),
    ("--trace", bool, False, "record what each module computes, in trace/ beside --tensorboard-dir; slow"),
    ("--save", str, None, "directory of checkpoints"),
    ("--save-interval", positive, None, "iterations between checkpoints"),
    ("--load", str, None, "directory of checkpoints to continue from"),
    ("--initial-weights", str, None, "a checkpoint's folder whose weights a new run begins with (own flag)"),
    ("--deepspeed", bool, False, "train with DeepSpeed's ZeRO"),
    ("--deepspeed_config", str, None, "DeepSpeed's JSON"),
    ("--zero-stage", int, None, "no effect: the JSON sets the stage"),
    ("--zero-reduce-once", bool, False, "reduce ZeRO-2's and 3's gradients once an iteration (this engine's own flag)"),
    ("--layout-independent-init", bool, False, "no effect: every layout always starts from the same weights"),
    ("--cpu-optimizer", bool, False, "no effect: the JSON sets what is offloaded; PyTorch's AdamW updates it"),
    ("--no-pipeline-parallel", bool, False, "no effect: this engine has no ZeRO with pipelines"),
    ("--DDP-impl", str, "local", "no effect: data parallelism is PyTorch's DDP"),
    ("--use-flash-attn-v2", bool, False, "no effect: PyTorch picks the fastest attention, including flash"),
    ("--no-masked-softmax-fusion", bool, False, "no effect: softmax is part of PyTorch's fused attention"),
    ("--no-bias-dropout-fusion", bool, False, "no effect: use --compile to fuse operators"),
    ("--no-gradient-accumulation-fusion", bool, False, "no effect: this engine has no such fusion"),
    ("--fp16", bool, False, "refused: this engine has no loss scaling"),
    ("--initial-loss-scale", float, None, "no effect: comes with --fp16"),
]
FLAGS_OF: dict[str, list[Flag]] = {
    "t5": [
        ("--pipeline-model-parallel-split-rank", int, 1, "the decoder's first stage"),
        ("--encoder-num-layers", positive, REQUIRED, "encoder depth"),
        ("--decoder-num-layers", positive, REQUIRED, "decoder depth"),
        ("--encoder-seq-length", positive, REQUIRED, "encoder input length"),
        ("--decoder-seq-length", positive, REQUIRED, "decoder output length"),
        ("--mask-prob", float, 0.15, "share of tokens in corrupted spans"),
        ("--short-seq-prob", float, 0.1, "share of samples that are shortened"),
        ("--tokenizer-type", ("HFTokenizer",), "HFTokenizer", "the only supported type"),
        ("--tokenizer-model", str, REQUIRED, "Hugging Face name or directory"),
    ],
    "gpt": [
        ("--num-layers", positive, REQUIRED, "depth"),
        ("--seq-length", positive, REQUIRED, "sequence length"),
        ("--document-samples", bool, False, "a sample is the beginning of one document, padded (own flag)"),
        ("--tokenizer-type", ("GPT2BPETokenizer", "HFTokenizer"), "GPT2BPETokenizer", "GPT-2's own or Hugging Face's"),
        ("--tokenizer-model", str, None, "Hugging Face name or directory, for HFTokenizer"),
        ("--vocab-file", str, None, "vocabulary file, for GPT2BPETokenizer"),
        ("--merge-file", str, None, "no effect: the data are already token ids"),
    ],
}


def start(run: Callable[[argparse.Namespace], None], family: str = "t5") -> None:
    """Runs with the command line's arguments. A Problem ends the process, and is printed once per node."""
    try:
        run(parse(family=family))
    except Problem as problem:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            note(problem.report)
        raise SystemExit(EXIT_CONFIGURATION) from None


def make_parser(family: str = "t5", *, is_complete: bool = True) -> FlagParser:
    """is_complete: the command line has all flags that must be given, and may ask for --help."""
    usage = f"torchrun ... native/pretrain_{family}.py FLAGS"
    parser = FlagParser(usage=usage, description=__doc__, allow_abbrev=False, add_help=is_complete)
    for flag, kind, default, meaning in FLAGS_OF[family] + FLAGS:
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=meaning)
        elif isinstance(kind, tuple):
            parser.add_argument(flag, choices=kind, default=default, help=meaning)
        else:
            must_be_given = is_complete and default is REQUIRED
            parser.add_argument(flag, type=kind, default=default, required=must_be_given, help=meaning)
    return parser


def parse(argv: list[str] | None = None, family: str = "t5") -> argparse.Namespace:
    """Reads, checks and completes the arguments. Raises Problem if this engine cannot train the request.

    Adds family, rank, local_rank, world_size, the sizes tp, pp and dp, micro_batches (of one rank and iteration),
    dtype, device and deepspeed_json. Launchers have checked that the sizes divide.
    """
    import torch

    args = make_parser(family).parse_args(argv)
    args.family = family
    args.rank = int(os.environ.get("RANK", 0))
    args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    args.dtype = torch.bfloat16 if args.bf16 else torch.float32
    args.device = choose_device(args)
    args.tp = args.tensor_model_parallel_size
    args.pp = args.pipeline_model_parallel_size
    args.dp = args.world_size // (args.tp * args.pp)
    args.micro_batches = args.global_batch_size // (args.micro_batch_size * args.dp)
    read_deepspeed_json(args)
    check_schedule(args)
    check_zero_bubble(args)
    check_trace(args)
    zero_stage = args.deepspeed_json["zero_optimization"]["stage"] if args.deepspeed else 0
    check_compile(args, zero_stage)
    reason = beyond_native(args.tp, args.pp, args.deepspeed, args.micro_batches, args.fp16, args.fsdp2)
    if reason:
        raise Problem(reason)
    if args.fsdp2:
        check_fsdp2(args)
    if args.sequence_parallel:
        check_sequence_parallel(args)
    if family == "t5":
        check_t5(args)
    else:
        check_gpt(args)
    if args.skip_train and not (args.load and args.eval_iters):
        raise Problem("--skip-train needs --load and --eval-iters")
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    if not 0 <= args.lr_warmup_iters < args.lr_decay_iters or not 0 <= args.min_lr <= args.lr:
        raise Problem("the learning rate needs 0 <= --min-lr <= --lr and 0 <= --lr-warmup-iters < --lr-decay-iters")
    return args


def read_deepspeed_json(args: argparse.Namespace) -> None:
    """Adds deepspeed_json, empty without --deepspeed. Raises Problem if no file is named."""
    args.deepspeed_json = {}
    if not args.deepspeed:
        return
    if not args.deepspeed_config:
        raise Problem("--deepspeed needs --deepspeed_config")
    args.deepspeed_json = json.loads(Path(args.deepspeed_config).read_text())


def check_t5(args: argparse.Namespace) -> None:
    """Raises Problem if T5's own arguments do not fit together; adds num_layers, as Megatron does."""
    args.num_layers = args.encoder_num_layers
    split = args.pipeline_model_parallel_split_rank
    last = args.pp * args.virtual_pipeline_stages - 1
    if args.pp > 1 and not 0 < split <= last:
        raise Problem(f"--pipeline-model-parallel-split-rank {split} is not one of 1 to {last}")
    encoder = args.encoder_seq_length
    decoder = args.decoder_seq_length
    if encoder < 4 or decoder < args.mask_prob * (encoder - 2) + 2:
        raise Problem(f"a decoder of {decoder} tokens is too short for an encoder of {encoder}")


def check_gpt(args: argparse.Namespace) -> None:
    """Raises Problem if there is no tokenizer; tokenizer_model is what it is read from, of either type."""
    args.tokenizer_model = args.tokenizer_model or args.vocab_file
    if not args.tokenizer_model:
        remedy = "Give --vocab-file, or --tokenizer-type HFTokenizer --tokenizer-model"
        raise Problem("the tokenizer is missing", remedy)


def check_schedule(args: argparse.Namespace) -> None:
    """Raises Problem if the pipeline's schedule does not fit."""
    is_interleaved = args.pipeline_schedule == INTERLEAVED
    if is_interleaved != (args.virtual_pipeline_stages > 1) or (is_interleaved and args.pp == 1):
        remedy = "Give --pipeline-schedule interleaved, at least 2 --virtual-pipeline-stages and pipeline stages"
        raise Problem("only the interleaved schedule has virtual pipeline stages, and it needs them", remedy)
    fault = interleaving_fault(args.pp, args.micro_batches)
    if is_interleaved and fault:
        raise Problem(fault, "Change the batch sizes, or the schedule")


def check_zero_bubble(args: argparse.Namespace) -> None:
    """Raises Problem if the gradients of weights cannot be put off."""
    if args.pipeline_schedule != ZERO_BUBBLE:
        return
    reasons = {
        "sequence_parallel": GATHERED_AGAIN,
        "compile": "a compiled layer computes all gradients in one pass",
        "trace": "it watches autograd, which does not see most of the weights' gradients",
    }
    for name, reason in reasons.items():
        if getattr(args, name):
            flag = "--" + name.replace("_", "-")
            found = f"--pipeline-schedule {ZERO_BUBBLE} does not work with {flag}: {reason}"
            raise Problem(found, "Leave one of them out")


def check_trace(args: argparse.Namespace) -> None:
    """Raises Problem if the run cannot be traced as asked."""
    if args.trace and not args.tensorboard_dir:
        raise Problem("--trace needs --tensorboard-dir: it writes beside it", "Give --tensorboard-dir")
    if args.trace and args.virtual_pipeline_stages > 1:
        raise Problem("--trace cannot follow the interleaved schedule", "Choose another --pipeline-schedule")
    if args.trace and args.load:
        raise Problem("--trace must see the first iteration, but --load resumes a run", "Leave one of them out")


def check_fsdp2(args: argparse.Namespace) -> None:
    """Raises Problem if FSDP2 cannot train the request."""
    if importlib.util.find_spec("torch.distributed.fsdp._fully_shard") is None:
        raise Problem("this PyTorch has no fully_shard", "FSDP2 needs torch 2.6 or newer")
    if args.share_gpus:
        raise Problem("--fsdp2 does not work with --share-gpus", "Give each process a GPU, or set DEVICE=cpu")
    if args.fsdp2_shard_size and args.dp % args.fsdp2_shard_size:
        found = f"--fsdp2-shard-size {args.fsdp2_shard_size} does not divide {args.dp} data-parallel processes"
        raise Problem(found, "Choose a divisor")


def check_sequence_parallel(args: argparse.Namespace) -> None:
    """Raises Problem if the processes cannot share the tokens."""
    if args.tp == 1:
        raise Problem("--sequence-parallel needs tensor parallelism", "Leave it out, or give a tensor-parallel size")
    if args.fsdp2 or args.trace:
        other = "--fsdp2" if args.fsdp2 else "--trace"
        raise Problem(f"--sequence-parallel with {other} is not supported", "Leave one of them out")
    lengths = [args.seq_length] if args.family == "gpt" else [args.encoder_seq_length, args.decoder_seq_length]
    for length in lengths:
        if length % args.tp:
            raise Problem(
                f"a sequence of {length} tokens does not divide over {args.tp} processes", "Choose a multiple"
            )


def choose_device(args: argparse.Namespace) -> Any:
    """This process's own GPU with NCCL, a shared one with --share-gpus, else the CPU."""
    import torch

    if args.distributed_backend == "gloo" and not args.share_gpus:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 0 or (args.local_rank >= gpus and not args.share_gpus):
        found = f"process {args.local_rank} of this node has no GPU: PyTorch sees {gpus}"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            found += f" with CUDA_VISIBLE_DEVICES={visible}"
        raise Problem(f"{found}; DEVICE=cpu trains without GPUs")
    return torch.device("cuda", args.local_rank % gpus)


def check_compile(args: argparse.Namespace, zero_stage: int) -> None:
    """Raises Problem if these layers cannot be compiled as asked."""
    if args.compile and zero_stage == 3:
        found = "--compile does not work with ZeRO-3, whose hooks between the layers cannot be compiled"
        raise Problem(found, "Leave it out")
    if args.compile and args.trace:
        raise Problem("--trace records each module, but --compile fuses them", "Leave one of them out")
    if args.compile and (args.fsdp2 or args.recompute_granularity or args.sequence_parallel):
        other = "--fsdp2" if args.fsdp2 else "--recompute-granularity"
        if args.sequence_parallel:
            other = "--sequence-parallel"
        raise Problem(f"--compile with {other} is untested", "Leave one of them out")
