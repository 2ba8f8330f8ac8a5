"""The learning rate of an iteration."""

import math
from argparse import Namespace


def learning_rate(args: Namespace, iteration: int) -> float:
    """The rate after `iteration` updates: linear warm-up, then the decay to --min-lr at --lr-decay-iters."""
    warmup = args.lr_warmup_iters
    if warmup > 0 and iteration <= warmup:
        return args.lr * iteration / warmup
    if args.lr_decay_style == "constant":
        return args.lr
    done = min(1.0, (iteration - warmup) / (args.lr_decay_iters - warmup))
    if args.lr_decay_style == "linear":
        left = 1.0 - done
    else:
        left = 0.5 * (math.cos(math.pi * done) + 1.0)
    return args.min_lr + left * (args.lr - args.min_lr)
