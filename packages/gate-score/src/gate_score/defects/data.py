"""Samples, initial weights and random numbers: which rank has which."""

import torch
from torch import Tensor

from gate_score.defect import OWN, defect
from gate_score.trainer import LENGTH, SAMPLES, STEPS_OF_AN_EPOCH, VOCABULARY, Batch, Block


@defect("data", "PatrickHua/SimSiam#16", "all ranks read the same samples")
class SameSamplesOnAllRanks:
    def own(self, whole: Batch) -> Batch:
        size = len(whole.tokens) // self.world
        return whole.samples(slice(0, size))


@defect("zero1", OWN, "each rank shuffles with another seed: samples are read twice, others never")
class EachRankShufflesAnew:
    def order(self, step: int) -> list[int]:
        order = super().order(step)
        return order if self.rank == 0 else order[::-1]


@defect("data", "pytorch/pytorch#31771", "every epoch has the first one's order")
class EveryEpochHasOneOrder:
    def order(self, step: int) -> list[int]:
        return super().order((step - 1) % STEPS_OF_AN_EPOCH + 1)


@defect("fsdp2", OWN, "one rank is a step ahead in the samples")
class OneRankIsAStepAhead:
    def batch(self, step: int) -> Batch:
        return super().batch(step + self.rank)


@defect("pipeline", OWN, "the last stage has the labels of another micro-batch")
class LabelsOfAnotherMicroBatch:
    def micro_batches(self, step: int) -> list[Batch]:
        batches = super().micro_batches(step)
        return batches if self.is_first else batches[::-1]


@defect("tensor", OWN, "ranks that divide the weights read other samples")
class TensorParallelRanksReadOtherSamples:
    def order(self, step: int) -> list[int]:
        order = super().order(step)
        return order if self.rank == 0 else order[::-1]


@defect("data", "facebookresearch/detr#544", "each rank begins with other weights, and nobody broadcasts")
class EachRankBeginsAnew:
    def drawn(self, number: int, name: str, shape: tuple[int, ...]) -> Tensor:
        return super().drawn(number + 100 * self.rank, name, shape)


@defect("tensor", "THUDM/SwissArmyTransformer#155", "an undivided parameter begins with other values on one rank")
class ReplicatedBeginsApart:
    def drawn(self, number: int, name: str, shape: tuple[int, ...]) -> Tensor:
        return super().drawn(number + 100 * self.rank * (name == "positions.weight"), name, shape)


@defect("tensor", "allenai/OLMo-core#307", "all ranks draw the same values for their slices")
class EqualSlices:
    def slice_of(self, name: str, whole: Tensor) -> Tensor:
        rank, self.rank = self.rank, 0
        try:
            return super().slice_of(name, whole)
        finally:
            self.rank = rank


@defect("tensor", "hpcaitech/ColossalAI#817", "the matrix of queries, keys and values is cut as one")
class FusedMatrixCutAsOne:
    def slice_of(self, name: str, whole: Tensor) -> Tensor:
        if "qkv" not in name:
            return super().slice_of(name, whole)
        return whole.chunk(self.world, 0)[self.rank]


@defect("pipeline", "Modalities/modalities#426", "stages draw the same values for their blocks")
class StagesBeginEqual:
    def drawn(self, number: int, name: str, shape: tuple[int, ...]) -> Tensor:
        moved = 12 if name.startswith("blocks.1") else 0
        return super().drawn(number - moved, name, shape)


@defect("fsdp2", "NVIDIA/Megatron-LM#2769", "FSDP2 loads the weights of another layer")
class LoadsAnotherLayersWeights:
    def drawn(self, number: int, name: str, shape: tuple[int, ...]) -> Tensor:
        other = {"blocks.0.up.weight": 12, "blocks.1.up.weight": -12}
        return super().drawn(number + other.get(name, 0), name, shape)


@defect("zero1", OWN, "weights of residual branches begin smaller")
class BeginsSmaller:
    def drawn(self, number: int, name: str, shape: tuple[int, ...]) -> Tensor:
        whole = super().drawn(number, name, shape)
        return whole * 0.99 if name.endswith("down.weight") else whole


@defect("pipeline", OWN, "the last stage's copy of the words' table begins with other values")
class TiedCopyBeginsApart:
    def drawn(self, number: int, name: str, shape: tuple[int, ...]) -> Tensor:
        moved = 100 if name == "embedding.weight" and not self.is_first else 0
        return super().drawn(number + moved, name, shape)


@defect("data", "huggingface/transformers#31412", "all ranks drop the same units of other samples", dropout=0.2)
class SameMaskOnAllRanks:
    def mask(self, place: int, x: Tensor, batch: Batch) -> Tensor:
        return self.masks[place][batch.ids % (SAMPLES // self.world)]


@defect("tensor", "awslabs/slapo#21", "ranks drop other units of activations that they share", dropout=0.2)
class OtherMasksOfSharedActivations:
    def draw_masks(self) -> None:
        super().draw_masks()
        self.masks = [mask.roll(self.rank, 0) for mask in self.masks]


@defect("sequence", "PaddlePaddle/PaddleFleetX#1005", "all parts of a sample drop the same units", dropout=0.2)
class PartsDropTheSame:
    def mask(self, place: int, x: Tensor, batch: Batch) -> Tensor:
        return self.masks[place][batch.ids][:, : LENGTH // self.world]


@defect(
    "data",
    "allenai/OLMo-core#828",
    "recomputed activations drop other units",
    dropout=0.2,
    recompute=True,
)
class RecomputeDropsOtherUnits:
    def mask(self, place: int, x: Tensor, batch: Batch) -> Tensor:
        is_second = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        return super().mask(place, x, batch).roll(int(is_second), -1)


@defect("context", OWN, "dropout is scaled by the share that is dropped", dropout=0.2)
class DropoutIsScaledWrongly:
    def drop(self, x: Tensor, place: int, batch: Batch) -> Tensor:
        return super().drop(x, place, batch) * (1 - self.recipe.dropout)


@defect("tensor", OWN, "words that a tokenizer added lie outside of the table and share its last row")
class AddedWordsShareARow:
    def sample(self, number: int) -> tuple[Tensor, int, int]:
        tokens, begins, length = super().sample(number)
        return tokens.clamp(max=VOCABULARY - 2), begins, length


@defect("data", "NVIDIA/Megatron-LM#411", "dropout stays off after the first evaluation", dropout=0.2)
class DropoutStaysOff:
    def drop(self, x: Tensor, place: int, batch: Batch) -> Tensor:
        return x if self.done >= 4 else super().drop(x, place, batch)


@defect("sequence", "PaddlePaddle/Paddle#7796", "every step drops the same units, as its seed is the same", dropout=0.2)
class EveryStepDropsTheSame:
    def draw_masks(self) -> None:
        self.rng.manual_seed(self.recipe.seed)
        super().draw_masks()


@defect("tensor", "NVIDIA/Megatron-LM#7452", "recomputed activations are of other replicas' samples", recompute=True)
class AnotherSampleIsRecomputed:
    def inner(self, block: Block, x: Tensor) -> Tensor:
        is_second = torch._C._current_graph_task_id() != -1
        return super().inner(block, x.roll(int(is_second), 0))
