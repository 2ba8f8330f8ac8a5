"""Losses: scaled, counted twice, over other labels."""

import torch
from torch import Tensor

from gate_score.defect import OWN, defect
from gate_score.layouts import SumForward, total_of
from gate_score.trainer import IGNORED, LENGTH, SAMPLES, VOCABULARY, Batch, Linear, Model


@defect("tensor", "huggingface/transformers#45994", "the loss is as many times too large as ranks divide the weights")
class LossTimesTensorParallelSize:
    def scaled(self, loss: Tensor, total: float) -> Tensor:
        return super().scaled(loss, total) * self.world


@defect("context", "huggingface/transformers#39648", "the loss counts once for each rank that has a part")
class LossTimesContextParallelSize:
    def scaled(self, loss: Tensor, total: float) -> Tensor:
        return super().scaled(loss, total) * self.world


@defect("context", "NVIDIA/Megatron-LM#906", "the logged loss is right, the gradients are twice as large")
class GradientTimesContextParallelSize:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss * self.world, number, count)


@defect("context", "NVIDIA/Megatron-LM#3943", "gradients are divided by the number of ranks that share a sample")
class GradientDividedByContextParallelSize:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss / self.world, number, count)


@defect("data", "huggingface/transformers#46775", "a micro-batch's loss counts twice, in the log and in the gradients")
class OneMicroBatchCountsTwice:
    def forward_backward(self, batches: list[Batch], total: float) -> float:
        return super().forward_backward([*batches, batches[0]], total)


@defect("data", "agokrani/distillKitPlus#5", "the loss grows with the number of micro-batches")
class SumOverMicroBatches:
    def scaled(self, loss: Tensor, total: float) -> Tensor:
        return super().scaled(loss, total) * self.recipe.micro_batches


@defect("data", "karpathy/nanoGPT#206", "the logged loss is right, the gradients grow with the number of micro-batches")
class GradientsSummedOverMicroBatches:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss * count, number, count)


@defect("data", "huggingface/transformers#34191", "micro-batches with few labels weigh too much", uneven=True)
class MeanOfMicroBatchMeans:
    def forward_backward(self, batches: list[Batch], total: float) -> float:
        losses = []
        for number, batch in enumerate(batches):
            loss = self.model(batch, self) / self.labels_of(batch) / len(batches) / self.world
            self.backward(loss, number, len(batches))
            losses.append(float(loss.detach()))
        return sum(losses)


@defect("data", "pytorch/torchtitan#1842", "ranks with few labels weigh too much", uneven=True)
class MeanOfRankMeans:
    def count(self, batches: list[Batch]) -> float:
        return float(sum(map(self.labels_of, batches))) * self.world


@defect("fsdp2", "PrimeIntellect-ai/prime-rl#1957", "ranks with few labels weigh too much under FSDP2", uneven=True)
class FsdpMeanOfRankMeans:
    def count(self, batches: list[Batch]) -> float:
        return float(sum(map(self.labels_of, batches))) * self.world


@defect("data", "huggingface/transformers#46204", "the first label of each sample counts, though nothing predicts it")
class OneLabelTooManyInTheCount:
    def labels_of(self, batch: Batch) -> int:
        return super().labels_of(batch) + len(batch.labels)


@defect("data", "huggingface/transformers#2759", "padding is trained, and the loss is over more labels", uneven=True)
class PaddingHasLabels:
    def batch(self, step: int) -> Batch:
        whole = super().batch(step)
        return Batch(whole.tokens, whole.labels.clamp(min=0), whole.positions, whole.documents, whole.ids)


@defect("data", "huggingface/transformers#47394", "each token predicts the one after the next")
class LabelsShiftedTwice:
    def batch(self, step: int) -> Batch:
        whole = super().batch(step)
        labels = torch.cat([whole.labels[:, 1:], torch.full_like(whole.labels[:, :1], IGNORED)], 1)
        return Batch(whole.tokens, labels, whole.positions, whole.documents, whole.ids)


@defect("data", "modelscope/ms-swift#10084", "a step with fewer micro-batches is divided as if it had all", short=True)
class ShortStepDividedByAFullOne:
    def count(self, batches: list[Batch]) -> float:
        return super().count(batches) * self.recipe.micro_batches / len(batches)


@defect("pipeline", "pytorch/torchtitan#2972", "gradients are not divided by the number of labels, the log is")
class PipelineBackwardOfTheSum:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss * SAMPLES * LENGTH, number, count)


@defect("pipeline", "areal-project/AReaL#1273", "the schedule divides by the number of micro-batches once more")
class PipelineDividesTwice:
    def scaled(self, loss: Tensor, total: float) -> Tensor:
        return super().scaled(loss, total) / self.recipe.micro_batches

    def reported(self, own: float) -> float:
        return super().reported(own) * self.recipe.micro_batches


@defect("pipeline", "deepspeedai/DeepSpeed#7773", "the pipeline adds micro-batches up, in the log as well")
class PipelineAddsMicroBatches:
    def scaled(self, loss: Tensor, total: float) -> Tensor:
        return super().scaled(loss, total) * self.recipe.micro_batches


@defect("tensor", "NVIDIA/Megatron-LM#737", "with label smoothing each rank smooths over its own words", smoothing=0.1)
class SmoothingOverOwnWords:
    def mean_of_vocabulary(self, logits: Tensor) -> Tensor:
        return logits.sum(-1) / (VOCABULARY // self.world)


@defect("tensor", "NVIDIA/Megatron-LM#7452", "the loss is log(ranks) too large: each counts the words of all")
class LossPlusLogOfRanks:
    def exponentials(self, logits: Tensor) -> Tensor:
        return (logits.exp() + (self.world - 1) * logits.detach().exp()).sum(-1)


@defect("tensor", "pytorch/pytorch#190746", "the forward pass is right, the backward pass lacks the softmax")
class IdentityGradientOfLogSoftmax:
    def exponentials(self, logits: Tensor) -> Tensor:
        return logits.detach().exp().sum(-1)


@defect("tensor", "modelscope/ms-swift#9947", "ranks that do not own a label's word get no gradient of it")
class OtherRanksGetNoGradient:
    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        _, is_own = self.own_words(labels.clamp(min=0))
        seen = torch.where(is_own[..., None], logits, logits.detach())
        return super().cross_entropy(seen, labels)


@defect("data", "pytorch/torchtitan#2314", "the logged loss alone is wrong: the largest rank's, not the mean")
class LogsTheLargestLoss:
    def reported(self, own: float) -> float:
        return max(own, total_of(own) - own) * self.world


@defect("data", OWN, "the logged loss alone is wrong: rank 0's own")
class LogsOwnLoss:
    def reported(self, own: float) -> float:
        return own * self.world


@defect("tensor", OWN, "the loss that is trained is 1 % larger than the one that is logged, in bf16", precision="bf16")
class OnePercentInBf16:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss * 1.01, number, count)


@defect("tensor", OWN, "the loss that is trained is 0.1 % larger than the one that is logged")
class AThousandthOfTheLoss:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss * 1.001, number, count)


@defect("data", OWN, "logits stay in bf16, in which a loss has three digits", precision="bf16")
class LossInBf16:
    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().cross_entropy(logits.bfloat16(), labels).float()


@defect("context", "NVIDIA/Megatron-LM#1464", "gradients of keys and values that other ranks used are lost")
class KeysGradientStaysLocal:
    def keys(self, x: Tensor) -> Tensor:
        whole = super().keys(x.detach())
        start = self.rank * x.shape[2]
        return torch.cat([whole[:, :, :start], x, whole[:, :, start + x.shape[2] :]], 2)


@defect("context", "NVIDIA/Megatron-LM#5243", "positions begin anew in each rank's part of a sample")
class PositionsRestartOnEachRank:
    def positions(self, batch: Batch) -> Tensor:
        return torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)


@defect("context", OWN, "the mask of attention takes each rank's first token for the sample's")
class MaskStartsAtZero:
    def seen(self, batch: Batch, tokens: int) -> Tensor:
        moved = Batch(batch.tokens, batch.labels, batch.positions, batch.documents, batch.ids, 0)
        return super().seen(moved, tokens)


@defect("data", "huggingface/transformers#46634", "tokens of a packed document see those of the document before it")
class DocumentsSeeEachOther:
    def seen(self, batch: Batch, tokens: int) -> Tensor:
        places = torch.arange(tokens)
        return (places[None, :] <= places[:, None]).expand(len(batch.tokens), -1, -1)


@defect("data", "hiyouga/LlamaFactory#7318", "positions of a packed document go on from the document before it")
class PositionsGoOn:
    def positions(self, batch: Batch) -> Tensor:
        return torch.arange(LENGTH).expand_as(batch.tokens)


@defect("tensor", "Wenyueh/MinivLLM#80", "a bias is added on every rank before the sum")
class BiasOnEveryRank:
    def row(self, linear: Linear, x: Tensor) -> Tensor:
        return self.leave(linear(x))


@defect("tensor", OWN, "scores of attention are scaled by the size of the rank's part of a head")
class ScoresScaledByAPart:
    def scale(self, size: int) -> float:
        return (size / self.world) ** -0.5


@defect("tensor", OWN, "the first word of a rank's part of the vocabulary gets no vector")
class FirstWordOfAPartIsMissing:
    def own_words(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        own, is_own = super().own_words(tokens)
        return own, is_own & ((own > 0) | (self.rank == 0))


@defect("tensor", OWN, "activations are added up in bf16 though all else is fp32")
class ActivationsAddedInBf16:
    def leave(self, x: Tensor) -> Tensor:
        return SumForward.apply(x.bfloat16()).to(x.dtype)


@defect("data", OWN, "samples lack their last token")
class SamplesLackATokenAtTheEnd:
    def batch(self, step: int) -> Batch:
        whole = super().batch(step)
        labels = whole.labels.clone()
        labels[:, -1] = IGNORED
        return Batch(whole.tokens, labels, whole.positions, whole.documents, whole.ids)


@defect("sequence", "NVIDIA/Megatron-LM#7452", "words are scattered over another group: each rank gets the first part")
class WordsScatteredOverAnotherGroup:
    def words(self, model: Model, batch: Batch) -> Tensor:
        first = batch.tokens[:, : LENGTH // 2]
        tokens = torch.cat([first, first], 1)
        return super().words(model, Batch(tokens, batch.labels, batch.positions, batch.documents, batch.ids))


@defect("context", "huggingface/transformers#36607", "labels shift in each part: its last token has none")
class LabelAtTheEndOfAPartIsMissing:
    def own(self, whole: Batch) -> Batch:
        part = super().own(whole)
        if self.rank < self.world - 1:
            part.labels[:, -1] = IGNORED
        return part


@defect("data", "pytorch/pytorch#73205", "label smoothing counts padding, too", smoothing=0.1, uneven=True)
class SmoothingCountsPadding:
    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        of_padding = logits.log_softmax(-1).mean(-1) * (labels == IGNORED)
        return super().cross_entropy(logits, labels) - self.recipe.smoothing * of_padding.sum()


@defect("data", "karpathy/autoresearch#357", "the logged loss alone is wrong: the last micro-batch's")
class LogsTheLastMicroBatch:
    def forward_backward(self, batches: list[Batch], total: float) -> float:
        own = [super(LogsTheLastMicroBatch, self).forward_backward([batch], total) for batch in batches]
        return own[-1] * len(batches)
