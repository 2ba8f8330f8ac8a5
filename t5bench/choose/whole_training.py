"""From a time per iteration to a whole training: tokens per second, hours and money to a number of tokens."""

import argparse
from dataclasses import dataclass

from t5bench import Problem
from t5bench.arguments import at_least
from t5bench.costmodel.job import Job

SECONDS_OF_AN_HOUR = 3600


@dataclass(frozen=True)
class WholeTraining:
    """What a training is to have, and what an hour of a GPU costs."""

    tokens: float
    price: float | None = None
    """Of a GPU for an hour, in any currency."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> "WholeTraining | None":
        """None where nothing is asked. Raises Problem."""
        if not args.tokens:
            if args.price:
                raise Problem("--price is given without --tokens", "Say how many tokens: --tokens 20e9")
            return None
        return cls(args.tokens, args.price)

    def figures(self, job: Job, seconds: float) -> dict[str, float]:
        """By what they are. seconds: of an iteration, whose samples have the tokens of both stacks."""
        a = job.architecture
        rate = job.global_batch * (a.encoder_length + a.decoder_length) / seconds
        hours = self.tokens / rate / SECONDS_OF_AN_HOUR
        found = {"tokens/s": rate, f"hours to {self.tokens:.3g} tokens": hours}
        if self.price:
            found[f"price at {self.price:g} an hour"] = hours * job.parallel.world * self.price
        return found


def add_whole_training(parser: argparse.ArgumentParser) -> None:
    tokens = "also say the hours of a training of so many tokens, such as 20e9, and its tokens per second"
    price = "with --tokens: what a GPU costs for an hour, in any currency; also say what the training costs"
    parser.add_argument("--tokens", type=at_least(1, float), metavar="N", help=tokens)
    parser.add_argument("--price", type=at_least(1e-9, float), metavar="AMOUNT", help=price)
