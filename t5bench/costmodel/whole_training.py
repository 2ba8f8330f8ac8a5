"""From a rate to a whole training: tokens per second, hours and money to a number of tokens."""

from dataclasses import dataclass

from t5bench.costmodel.job import Job

SECONDS_OF_AN_HOUR = 3600


@dataclass(frozen=True)
class WholeTraining:
    """What a training is to have, and what an hour of a GPU costs."""

    tokens: float
    price: float | None = None
    """Of a GPU for an hour, in any currency."""

    @property
    def title_of_hours(self) -> str:
        return f"hours to {self.tokens:.3g} tokens"

    @property
    def title_of_price(self) -> str:
        return f"price at {self.price:g} an hour" if self.price else ""

    def hours(self, rate: float) -> float:
        """rate: tokens per second."""
        return self.tokens / rate / SECONDS_OF_AN_HOUR

    def cost(self, rate: float, gpus: int) -> float | None:
        """None without a price. rate: tokens per second of all GPUs together."""
        return self.hours(rate) * gpus * self.price if self.price else None

    def figures(self, job: Job, seconds: float) -> dict[str, float]:
        """By what they are. seconds: of an iteration, whose samples have the tokens of both stacks."""
        model = job.architecture
        rate = job.global_batch * (model.encoder_length + model.decoder_length) / seconds
        found = {"tokens/s": rate, self.title_of_hours: self.hours(rate)}
        cost = self.cost(rate, job.parallel.world)
        if cost is not None:
            found[self.title_of_price] = cost
        return found
