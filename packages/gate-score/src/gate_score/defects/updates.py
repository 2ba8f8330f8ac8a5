"""Updates: the optimizer's numbers, its states, its parts, and who gets them."""

from typing import Any

import torch
from torch import Tensor

from gate_score.defect import OWN, defect
from gate_score.trainer import local


@defect("fsdp2", "verl-project/verl#5070", "biases and norms decay as well")
class EverythingDecays:
    def decay(self, name: str, parameter: Tensor) -> float:
        return self.recipe.decay


@defect("zero1", "mlfoundations/open_clip#358", "nothing decays: every parameter is a vector once it is flat")
class FlatParametersDoNotDecay:
    def decay(self, name: str, parameter: Tensor) -> float:
        return super().decay(name, parameter.detach().flatten())


@defect("pipeline", OWN, "the second stage's weights decay 1 % more")
class OneStageDecaysMore:
    def decay(self, name: str, parameter: Tensor) -> float:
        return super().decay(name, parameter) * (1.0 if self.is_first else 1.01)


@defect("tensor", OWN, "weight decay is 10 % larger")
class DecaysTenPercentMore:
    def decay(self, name: str, parameter: Tensor) -> float:
        return super().decay(name, parameter) * 1.1


@defect("zero1", OWN, "decay is added to the gradient (L2), as Adam has it, not AdamW")
class DecayInTheGradient:
    def adamw(self, weight: Tensor, gradient: Tensor, state: dict, rate: float, decay: Any) -> None:
        super().adamw(weight, gradient + decay * weight, state, rate, 0.0)


@defect("tensor", OWN, "the second beta is 0.999 instead of 0.95")
class AnotherSecondBeta:
    betas = (0.9, 0.999)


@defect("pipeline", OWN, "epsilon is twice as large")
class AnotherEpsilon:
    epsilon = 2e-2


@defect("data", "huggingface/accelerate#2142", "the schedule takes as many steps as there are ranks")
class ScheduleStepsOnEachRank:
    def rate(self, step: int) -> float:
        return max(super().rate(step * self.world), 0.0)


@defect("fsdp2", OWN, "the schedule is one step ahead")
class ScheduleIsAStepAhead:
    def rate(self, step: int) -> float:
        return super().rate(step + 1)


@defect("context", OWN, "the learning rate is 0.1 % larger")
class AThousandthOfTheRate:
    def rate(self, step: int) -> float:
        return super().rate(step) * 1.001


@defect("data", OWN, "bias correction counts micro-batches instead of steps")
class CorrectionCountsMicroBatches:
    def adamw(self, weight: Tensor, gradient: Tensor, state: dict, rate: float, decay: Any) -> None:
        state["step"] += self.recipe.micro_batches - 1
        super().adamw(weight, gradient, state, rate, decay)


@defect("fsdp2", "huggingface/accelerate#3256", "the optimizer has other parameters: nothing is updated")
class OptimizerOfAnotherModel:
    def update(self, step: int) -> None:
        pass


@defect("fsdp2", "pytorch/pytorch#149205", "some parameters are no longer the optimizer's, and stay as they are")
class SomeParametersAreNotUpdated:
    def update(self, step: int) -> None:
        before = local(self.model.blocks[0].up.weight.detach()).clone()
        super().update(step)
        local(self.model.blocks[0].up.weight.detach()).copy_(before)


@defect("zero1", OWN, "rank 0 keeps its own part and does not get the others'")
class RankZeroIsNotGathered:
    def gather_pieces(self, piece: Tensor, length: int) -> Tensor:
        whole = super().gather_pieces(piece, length)
        if self.rank == 0:
            stale = torch.cat([one.detach().flatten() for _, one in self.parameters()])
            whole[len(piece) :] = stale[len(piece) :]
        return whole


@defect(
    "zero1",
    "pytorch/pytorch#188947",
    "a part begins an element early, and comes back one place behind",
)
class PartBeginsAnElementEarly:
    def pieces(self, length: int) -> list[tuple[int, int]]:
        return [(start - rank, end - rank) for rank, (start, end) in enumerate(super().pieces(length))]


@defect("zero1", OWN, "parts are put back in another order")
class PartsInAnotherOrder:
    def gather_pieces(self, piece: Tensor, length: int) -> Tensor:
        whole = super().gather_pieces(piece, length)
        return whole.roll(1) if self.done == 1 else whole


@defect("fsdp2", "areal-project/AReaL#1292", "weights are in bf16, without a master copy in fp32", precision="bf16")
class WeightsInBf16:
    def update(self, step: int) -> None:
        super().update(step)
        for _, parameter in self.parameters():
            weight = local(parameter.detach())
            weight.copy_(weight.bfloat16())


@defect("data", "NVIDIA/apex#1728", "no master weights, though they were asked for", precision="bf16")
class NoMasterWeights:
    def adamw(self, weight: Tensor, gradient: Tensor, state: dict, rate: float, decay: Any) -> None:
        weight.copy_(weight.bfloat16())
        super().adamw(weight, gradient, state, rate, decay)
        weight.copy_(weight.bfloat16())


@defect("zero1", "areal-project/AReaL#1369", "Adam's states are in bf16", precision="bf16")
class StatesInBf16:
    def adamw(self, weight: Tensor, gradient: Tensor, state: dict, rate: float, decay: Any) -> None:
        super().adamw(weight, gradient, state, rate, decay)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].copy_(state[key].bfloat16())


@defect("data", OWN, "one rank has another learning rate, so the copies of the model go apart")
class OneRankHasAnotherRate:
    def rate(self, step: int) -> float:
        return super().rate(step) * (1.01 if self.rank == 1 else 1.0)


@defect("data", OWN, "one rank skips an update, as a loss scaler does that looks at its own gradients")
class OneRankSkipsAnUpdate:
    def update(self, step: int) -> None:
        if self.rank == 0 or step != 3:
            super().update(step)


@defect("tensor", OWN, "the words' table is left out of the optimizer's groups")
class TableIsNotUpdated:
    def update(self, step: int) -> None:
        before = self.model.embedding.weight.detach().clone()
        super().update(step)
        self.model.embedding.weight.detach().copy_(before)


@defect("data", "yyfz/Pi3#87", "the schedule steps with each micro-batch")
class ScheduleStepsWithMicroBatches:
    def rate(self, step: int) -> float:
        return max(super().rate(step * self.recipe.micro_batches), 0.0)


@defect("data", "NVIDIA/apex#1124", "Adam's moments are not corrected for beginning at zero")
class NoBiasCorrection:
    def adamw(self, weight: Tensor, gradient: Tensor, state: dict, rate: float, decay: Any) -> None:
        super().adamw(weight, gradient, state | {"step": 10**6}, rate, decay)


@defect("context", "tensorflow/addons#2282", "decay has the highest rate in all steps: it does not follow the schedule")
class DecayDoesNotFollowTheSchedule:
    def decay(self, name: str, parameter: Tensor) -> float:
        return super().decay(name, parameter) * self.recipe.rate / self.rate(self.done + 1)


@defect("tensor", "deepset-ai/FARM#46", "the schedule is too short: the last steps have a rate of zero")
class ScheduleEndsEarly:
    def rate(self, step: int) -> float:
        return super().rate(step) if step < self.recipe.steps - 1 else 0.0
