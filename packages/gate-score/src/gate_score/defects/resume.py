"""Checkpoints: what a resumed training lacks, has twice, or has from elsewhere."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gate_score.defect import OWN, defect
from gate_score.trainer import Batch, local

RESUMED = {"resume_after": 4}


def zeroed(states: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {name: state | {key: torch.zeros_like(state[key]) for key in keys} for name, state in states.items()}


@defect("data", "EvolvingLMMs-Lab/OneVision-Encoder#65", "the optimizer begins anew", **RESUMED)
class OptimizerBeginsAnew:
    def load_states(self, states: dict[str, Any]) -> None:
        pass


@defect("zero1", "areal-project/AReaL#1468", "Adam's moments are dropped, its count of steps goes on", **RESUMED)
class MomentsAreDropped:
    def load_states(self, states: dict[str, Any]) -> None:
        super().load_states(zeroed(states, ("exp_avg", "exp_avg_sq")))


@defect("fsdp2", "NVIDIA-NeMo/Megatron-Bridge#3832", "Adam's count of steps begins at 0", **RESUMED)
class CountOfStepsBeginsAnew:
    def load_states(self, states: dict[str, Any]) -> None:
        super().load_states({name: state | {"step": 0} for name, state in states.items()})


@defect("tensor", OWN, "the second moments are missing from the checkpoint", **RESUMED)
class SecondMomentsAreMissing:
    def load_states(self, states: dict[str, Any]) -> None:
        super().load_states(zeroed(states, ("exp_avg_sq",)))


@defect("zero1", "ISEEKYAN/Megatron-LM#104", "one rank's part of the moments is of an earlier step", **RESUMED)
class StaleMomentsOnOneRank:
    def update(self, step: int) -> None:
        if step == 4:
            parameters = dict(self.parameters())
            self.stale = super().saved_states(parameters)
        super().update(step)

    def saved_states(self, parameters: dict[str, nn.Parameter]) -> dict[str, Any]:
        return self.stale if self.rank == 1 else super().saved_states(parameters)


@defect("zero1", "NCAR/miles-credit#407", "all ranks load rank 0's part of the moments", **RESUMED)
class OnlyRankZeroIsSaved:
    def load_states(self, states: dict[str, Any]) -> None:
        super().load_states(states)
        for key in ("exp_avg", "exp_avg_sq"):
            dist.broadcast(self.optimizer.state["piece"][key], 0)


@defect("tensor", "huggingface/transformers#48569", "the moments of another slice come back", **RESUMED)
class MomentsOfAnotherSlice:
    def load_states(self, states: dict[str, Any]) -> None:
        moved = {}
        for name, state in states.items():
            keys = ("exp_avg", "exp_avg_sq") if self.is_slice(name) else ()
            moved[name] = state | {key: state[key].roll(1, 0) for key in keys}
        super().load_states(moved)


@defect("data", "NVIDIA-NeMo/Automodel#763", "the schedule begins anew", **RESUMED)
class ScheduleBeginsAnew:
    def rate(self, step: int) -> float:
        return super().rate(step - 4 if step > 4 else step)


@defect("data", "radixark/miles#1627", "the schedule is stepped once more for all that was done", **RESUMED)
class ScheduleCountsTwice:
    def rate(self, step: int) -> float:
        return super().rate(min(step + 4, self.recipe.steps) if step > 4 else step)


@defect("fsdp2", "Lightning-AI/pytorch-lightning#1772", "the schedule is one step behind", **RESUMED)
class ScheduleIsAStepBehind:
    def rate(self, step: int) -> float:
        return super().rate(step - 1 if step > 4 else step)


@defect("data", "KempnerInstitute/KempnerForge#51", "the samples begin anew", **RESUMED)
class SamplesBeginAnew:
    def batch(self, step: int) -> Batch:
        return super().batch(step - 4 if step > 4 else step)


@defect("fsdp2", "huggingface/accelerate#2016", "the samples go on in the order of the first epoch", **RESUMED)
class SamplesOfTheFirstEpoch:
    def order(self, step: int) -> list[int]:
        return super().order((step - 1) % 3 + 1 if step > 4 else step)


@defect("context", OWN, "one step's samples are skipped", **RESUMED)
class SamplesAreSkipped:
    def batch(self, step: int) -> Batch:
        return super().batch(step + 1 if step > 4 else step)


@defect("data", "vllm-project/speculators#1027", "random numbers of dropout begin anew", dropout=0.2, **RESUMED)
class RandomNumbersBeginAnew:
    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved | {"rng": torch.Generator().manual_seed(self.recipe.seed).get_state()})


@defect("tensor", "NVIDIA/Megatron-LM#6858", "one rank goes on with another's random numbers", dropout=0.2, **RESUMED)
class AnotherRanksRandomNumbers:
    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        if self.rank == 1:
            self.rng.manual_seed(99)


@defect("data", "TensorAuto/OpenTau#185", "fp32 weights come back from copies in bf16", precision="bf16", **RESUMED)
class MasterWeightsFromBf16:
    def load(self, saved: dict[str, Any]) -> None:
        weights = {name: weight.bfloat16().float() for name, weight in saved["weights"].items()}
        super().load(saved | {"weights": weights})


@defect("tensor", "AI-Hypercomputer/maxdiffusion#484", "the last step before the checkpoint is done again", **RESUMED)
class TheLastStepAgain:
    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved | {"step": saved["step"] - 1})


@defect("pipeline", OWN, "the last stage's copy of the words' table is not loaded", **RESUMED)
class TiedCopyIsNotLoaded:
    def load(self, saved: dict[str, Any]) -> None:
        begun = self.model.embedding.weight.detach().clone()
        super().load(saved)
        if not self.is_first:
            self.model.embedding.weight.detach().copy_(begun)


@defect("pipeline", "NVIDIA/Megatron-LM#7468", "weight decay is another one in the first step after it", **RESUMED)
class StaleDecayInOneStep:
    def decay(self, name: str, parameter: Tensor) -> float:
        return super().decay(name, parameter) * (0.5 if self.done == 4 else 1.0)


@defect("fsdp2", OWN, "one layer's weights are of an earlier checkpoint", **RESUMED)
class OneLayerIsStale:
    def load(self, saved: dict[str, Any]) -> None:
        begun = {name: parameter.detach()._local_tensor.clone() for name, parameter in self.parameters()}
        super().load(saved | {"weights": saved["weights"] | {"blocks.1.norm2.weight": begun["blocks.1.norm2.weight"]}})


@defect("zero1", "NVIDIA/Megatron-LM#174", "the first update takes weights from before it was loaded", **RESUMED)
class StaleMasterWeights:
    def wrap(self) -> None:
        super().wrap()
        self.begun: dict[str, Tensor] = {}

    def load(self, saved: dict[str, Any]) -> None:
        self.begun = {name: parameter.detach().clone() for name, parameter in self.parameters()}
        super().load(saved)

    def update(self, step: int) -> None:
        for name, parameter in self.parameters():
            if self.begun:
                parameter.detach().copy_(self.begun[name])
        self.begun = {}
        super().update(step)


@defect("fsdp2", "NVIDIA-NeMo/Megatron-Bridge#3397", "its first step computes with the initial weights", **RESUMED)
class LoadedWeightsComeAStepLate:
    def wrap(self) -> None:
        super().wrap()
        self.begun: dict[str, Tensor] = {}

    def load(self, saved: dict[str, Any]) -> None:
        self.begun = {name: local(parameter.detach()).clone() for name, parameter in self.parameters()}
        super().load(saved)

    def forward_backward(self, batches: list[Batch], total: float) -> float:
        weights = {name: local(parameter.detach()) for name, parameter in self.parameters()}
        loaded = {name: weights[name].clone() for name in self.begun}
        for name, initial in self.begun.items():
            weights[name].copy_(initial)
        own = super().forward_backward(batches, total)
        for name, weight in loaded.items():
            weights[name].copy_(weight)
        self.begun = {}
        return own


@defect(
    "zero1",
    "NVIDIA-NeMo/Megatron-Bridge#5680",
    "fresh moments, and Adam's count of steps begins at 1",
    **RESUMED,
)
class FreshStatesThatHaveTakenAStep:
    def load_states(self, states: dict[str, Any]) -> None:
        fresh = zeroed(states, ("exp_avg", "exp_avg_sq"))
        super().load_states({name: state | {"step": 1} for name, state in fresh.items()})
