"""Gradients: not added up over ranks or micro-batches, added twice, scaled, or lost."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gate_score.defect import OWN, defect
from gate_score.layouts import Gather, summed
from gate_score.trainer import Batch, Block, Linear, Model, local

# ---- over ranks ------------------------------------------------------------------------------------------------------


@defect("data", "NVIDIA/Megatron-LM#1685", "every rank trains its own model")
class GradientsAreNotReduced:
    def reduce(self) -> None:
        pass


@defect("data", "pytorch/torchtitan#2318", "gradients of a mean over all labels are averaged over the ranks again")
class AveragesAMean:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        super().reduce_one(name, gradient.div_(self.world))


@defect("data", "NovaSky-AI/SkyRL#1886", "the all-reduce goes into a copy: no gradient changes")
class ReducesACopy:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        super().reduce_one(name, gradient.contiguous().clone())


@defect("fsdp2", "facebookresearch/dinov3#250", "FSDP2 adds gradients up where it should average them")
class FsdpAddsUp:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss * self.world, number, count)


@defect("fsdp2", "verl-project/verl#7493", "each rank is its own group, and nothing is synchronised")
class FsdpGroupOfOne:
    def options(self) -> dict:
        return {"mesh": mesh()["shard"]}

    def norm(self) -> Tensor:
        return super().norm() / self.world**0.5


@defect("fsdp2", "NVIDIA-NeMo/Automodel#3135", "of the blocks, replicas do not exchange gradients")
class BlocksWithoutReplicas:
    def wrap(self) -> None:
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh()["shard"])
        fully_shard(self.model)

    def squares(self, name: str, parameter: nn.Parameter) -> Tensor:
        return super().squares(name, parameter) / (self.world if "blocks" in name else 1)


def mesh() -> dist.DeviceMesh:
    """As many replicas as ranks, each of which has the only shard."""
    names = ("replica", "shard")
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=names)


@defect("data", "areal-project/AReaL#313", "a module outside of the wrapped ones is never reduced")
class OneModuleIsNotReduced:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        if name != "norm.weight":
            super().reduce_one(name, gradient)


@defect("data", "deepspeedai/DeepSpeed#7829", "what lies behind the end of the first bucket is not reduced")
class SecondBucketIsNotReduced:
    def reduce(self) -> None:
        for name, parameter in list(self.parameters())[:-6]:
            self.reduce_one(name, parameter.grad)


@defect("data", "pytorch/pytorch#106395", "gradients are added up over ranks in bf16")
class ReducesInBf16:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        gradient.copy_(summed(gradient.bfloat16()))


@defect("zero1", OWN, "gradients are added up over ranks in fp16")
class ReducesInFp16:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        gradient.copy_(summed(gradient.half()))


@defect("data", OWN, "the maximum over ranks instead of the sum")
class MaximumInsteadOfSum:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        dist.all_reduce(gradient, dist.ReduceOp.MAX)


@defect("data", OWN, "rank 1 skips the gradients of the last layer in one step, as if it had none")
class OneRankSkipsALayerOnce:
    def reduce(self) -> None:
        if self.rank == 1 and self.done == 2:
            self.model.blocks[1].down.weight.grad.zero_()
        super().reduce()


@defect("tensor", "meta-pytorch/torchtune#2436", "gradients are divided by all ranks, not by those with other samples")
class DividedByAllRanks:
    def reduce(self) -> None:
        for _, parameter in self.parameters():
            parameter.grad.div_(self.world)


# ---- over micro-batches ----------------------------------------------------------------------------------------------


@defect("zero1", "deepspeedai/DeepSpeed#7718", "each micro-batch overwrites the gradients of the one before")
class LastMicroBatchAlone:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        self.clear()
        super().backward(loss, number, count)


@defect("data", "pytorch/torchtitan#3575", "gradients are cleared before each backward pass instead of each step")
class ClearedInEachMicroBatch:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        self.clear()
        super().backward(loss, number, count)


@defect("zero1", "deepspeedai/DeepSpeed#7967", "gradients of later micro-batches are dropped")
class FirstMicroBatchAlone:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss * (number == 0), number, count)


@defect("zero1", "deepspeedai/DeepSpeed#7985", "the last micro-batch's gradients are not reduced", precision="bf16")
class LastMicroBatchIsNotReduced:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss, number, count)
        if number == count - 2:
            for name, parameter in self.parameters():
                self.reduce_one(name, parameter.grad)

    def reduce(self) -> None:
        pass


@defect("data", "modelscope/FunASR#3472", "the first micro-batch is synchronised instead of the last")
class SynchronisesTheFirst:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss, number, count)
        if number == 0:
            for name, parameter in self.parameters():
                self.reduce_one(name, parameter.grad)

    def reduce(self) -> None:
        pass


@defect("data", "hpcaitech/ColossalAI#247", "accumulated gradients are reduced again with each micro-batch")
class ReducesWhatIsReduced:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss, number, count)
        for name, parameter in self.parameters():
            self.reduce_one(name, parameter.grad)

    def reduce(self) -> None:
        pass


@defect("tensor", "NVIDIA/Megatron-LM#6660", "in a group of one rank each micro-batch doubles what was accumulated")
class DoubledWithEachMicroBatch:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        if number:
            for _, parameter in self.parameters():
                parameter.grad.mul_(2)
        super().backward(loss, number, count)


@defect("data", "allenai/open-instruct#1498", "the end of a step is not marked: each micro-batch takes an update")
class UpdatesWithEachMicroBatch:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss, number, count)
        if number < count - 1:
            super().reduce()
            self.clip(self.norm())
            self.update(self.done + 1)
            self.clear()


@defect("data", "deepspeedai/DeepSpeed#7839", "gradients of earlier steps are not cleared")
class GradientsAreNotCleared:
    def clear(self) -> None:
        pass


@defect("data", "deepspeedai/DeepSpeed#7837", "gradients are divided by a loss scale that nothing multiplied")
class DividedByALossScale:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        super().reduce_one(name, gradient.div_(65536))


@defect("data", "ISEEKYAN/Megatron-LM#149", "gradients of micro-batches are accumulated in bf16", precision="bf16")
class AccumulatesInBf16:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss, number, count)
        for _, parameter in self.parameters():
            parameter.grad.copy_(parameter.grad.bfloat16())


@defect("fsdp2", "NVIDIA/Megatron-LM#7186", "only the last micro-batch's gradients reach the optimizer under FSDP2")
class FsdpLastMicroBatchAlone:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        self.clear()
        super().backward(loss, number, count)


@defect("pipeline", "NVIDIA-NeMo/Automodel#3530", "stages that are set up anew wipe what was accumulated")
class StagesWipeGradients:
    def backward_of(self, number: int, *arguments: Any) -> float:
        self.clear()
        return super().backward_of(number, *arguments)


@defect("pipeline", "pytorch/torchtitan#1733", "what was accumulated is divided again with each micro-batch")
class StagesScaleAgain:
    def backward_of(self, number: int, *arguments: Any) -> float:
        own = super().backward_of(number, *arguments)
        for _, parameter in self.parameters():
            parameter.grad.div_(self.recipe.micro_batches)
        return own

    def scaled(self, loss: Tensor, total: float) -> Tensor:
        return super().scaled(loss, total) * self.recipe.micro_batches

    def reported(self, own: float) -> float:
        return super().reported(own) / self.recipe.micro_batches


@defect("pipeline", "deepspeedai/DeepSpeed#8154", "the first stage's gradients are divided twice")
class FirstStageDividedTwice:
    def gradient(self, x: Tensor) -> Tensor:
        return super().gradient(x) / self.recipe.micro_batches


@defect("pipeline", OWN, "a stage sends the gradient of another micro-batch back")
class AnotherMicroBatchsGradient:
    def forward_backward(self, batches: list[Batch], total: float) -> float:
        if self.is_first:
            return super().forward_backward(batches, total)
        sent = [self.forward(batch) for batch in batches]
        losses = [self.scaled(y, total) for _, y in sent]
        for loss in losses:
            loss.backward()
        for x, _ in reversed(sent):
            dist.send(self.gradient(x), 0)
        return float(sum(loss.detach() for loss in losses))


@defect("pipeline", OWN, "activations travel between stages in bf16 though all else is fp32")
class SendsInBf16:
    def message_dtype(self) -> torch.dtype:
        return torch.bfloat16


# ---- weights that ranks divide or share ------------------------------------------------------------------------------


@defect("tensor", OWN, "the input of divided weights gets this rank's part of its gradient")
class InputGradientIsPartial:
    def enter(self, x: Tensor) -> Tensor:
        return x


@defect("tensor", "pytorch/pytorch#172932", "the sum behind divided weights adds gradients up again")
class SumsGradientsAgain:
    def leave(self, x: Tensor) -> Tensor:
        return super().leave(self.enter(x))


@defect("tensor", "apple/ml-cross-entropy#42", "the head's input gets a part of its gradient on each rank")
class HeadInputIsPartial:
    def head(self, model: Model, x: Tensor, batch: Batch) -> Tensor:
        logits = F.linear(model.norm(x), model.embedding.weight.to(x.dtype))
        return self.cross_entropy(logits.float(), batch.labels)


@defect("tensor", "pytorch/torchtitan#2532", "a norm inside of divided weights gets a part of its gradient")
class InnerNormIsPartial:
    def attention(self, block: Block, x: Tensor, batch: Batch) -> Tensor:
        weight = block.norm1.weight.to(x.dtype)
        return super().attention(block, x + (weight - weight.detach()) * x.detach() * self.rank, batch)


@defect("tensor", "pytorch/torchtitan#4332", "biases behind divided weights get 1 / ranks of their gradient")
class BiasGradientIsDivided:
    def row(self, linear: Linear, x: Tensor) -> Tensor:
        bias = linear.bias.to(x.dtype)
        part = bias / self.world
        whole = part + (bias - part).detach()
        return self.leave(F.linear(x, linear.weight.to(x.dtype))) + whole


@defect("sequence", "NVIDIA/Megatron-LM#1446", "the last norm's gradients differ between ranks")
class LastNormIsNotSummed:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        if not name.startswith("norm."):
            super().reduce_one(name, gradient)


@defect("sequence", "EleutherAI/gpt-neox#1259", "gradients of norms are averaged over parts of the tokens, not added")
class NormsAreAveraged:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        super().reduce_one(name, gradient.div_(self.world) if "norm" in name else gradient)


@defect("sequence", OWN, "gradients of undivided matrices are added up, those of vectors are not")
class VectorsAreNotSummed:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        if gradient.dim() > 1:
            super().reduce_one(name, gradient)


@defect("sequence", OWN, "a gathered input keeps this rank's own gradient instead of the sum")
class GatheredGradientIsOwn:
    def enter(self, x: Tensor) -> Tensor:
        whole = Gather.apply(x.detach(), 1)
        start = self.rank * x.shape[1]
        return torch.cat([whole[:, :start], x, whole[:, start + x.shape[1] :]], 1)


@defect("pipeline", "uw-syfi/piper#13", "the two copies of the words' table go apart")
class TiedCopiesAreNotSummed:
    def reduce(self) -> None:
        pass


@defect("pipeline", "NVIDIA/Megatron-LM#6500", "stages add up slices of the words' table that lie at other offsets")
class TiedSlicesAtOtherOffsets:
    def reduce(self) -> None:
        gradient = self.model.embedding.weight.grad
        moved = gradient if self.is_first else gradient.roll(1, 0)
        total = summed(moved)
        gradient.copy_(total if self.is_first else total.roll(-1, 0))


@defect("pipeline", OWN, "the sum of the tied copies is multiplied by their number")
class TiedSumTimesCopies:
    def reduce(self) -> None:
        super().reduce()
        self.model.embedding.weight.grad.mul_(2)


@defect("data", "deepspeedai/DeepSpeed#8224", "of a table that is used twice, one use's gradient counts")
class OneUseOfATableCounts:
    def words(self, model: Model, batch: Batch) -> Tensor:
        return super().words(model, batch).detach()


@defect("data", "NVIDIA/Megatron-LM#5956", "one layer's gradients are divided by the number of ranks once more")
class OneLayerDividedAgain:
    def reduce_one(self, name: str, gradient: Tensor) -> None:
        super().reduce_one(name, gradient.div_(self.world) if ".up." in name else gradient)


@defect("fsdp2", "deepspeedai/DeepSpeed#8158", "the last rows of a shard overlap with the next parameter's")
class ShardOverlapsItsNeighbour:
    def reduce(self) -> None:
        for block in self.model.blocks:
            local(block.up.bias.grad)[-2:] = local(block.down.bias.grad)[:2]


@defect("data", OWN, "a layer gets no gradient, as if it were frozen")
class OneLayerIsFrozen:
    def inner(self, block: Block, x: Tensor) -> Tensor:
        if block is not self.model.blocks[0]:
            return super().inner(block, x)
        weight, bias = block.up.weight.detach(), block.up.bias.detach()
        inner = F.gelu(F.linear(self.enter(x), weight.to(x.dtype), bias.to(x.dtype)))
        return self.row(block.down, inner)

    def clear(self) -> None:
        for _, parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)


@defect("fsdp2", "verl-project/verl#7835", "the head is no longer tied to the words, and keeps what it began with")
class TieIsLost:
    def wrap(self) -> None:
        self.begun = self.model.embedding.weight.detach().clone()
        super().wrap()

    def head(self, model: Model, x: Tensor, batch: Batch) -> Tensor:
        logits = F.linear(model.norm(x), self.begun.to(x.dtype))
        return self.cross_entropy(logits.float(), batch.labels)


@defect("zero1", "NVIDIA/Megatron-LM#4609", "gradients are added onto weights that were gathered into their buffer")
class GatheredWeightsStayInTheGradients:
    def clear(self) -> None:
        super().clear()
        if self.done:
            weight = self.model.blocks[1].out.weight
            weight.grad = weight.detach().clone()


@defect("zero1", "NVIDIA/Megatron-LM#950", "one layer computes with the weights of the step before")
class OneLayerIsAStepBehind:
    def wrap(self) -> None:
        super().wrap()
        self.before = self.model.blocks[1].up.weight.detach().clone()

    def forward_backward(self, batches: list[Batch], total: float) -> float:
        weight = self.model.blocks[1].up.weight.detach()
        now = weight.clone()
        weight.copy_(self.before)
        own = super().forward_backward(batches, total)
        weight.copy_(now)
        self.before = now
        return own


@defect("tensor", "hpcaitech/ColossalAI#242", "in each rank's part of the words one row is taken for padding's")
class RowsLikePaddingGetNoGradient:
    def words(self, model: Model, batch: Batch) -> Tensor:
        own, is_own = self.own_words(batch.tokens)
        return F.embedding(own, model.embedding.weight, padding_idx=3) * is_own[..., None]


@defect("data", "ZebangCheng/Emotion-LLaMA#140", "a short last window waits for the next epoch", short=True)
class AShortWindowWaits:
    def update(self, step: int) -> None:
        if not self.is_short(step):
            super().update(step)

    def clear(self) -> None:
        if not self.is_short(self.done):
            super().clear()
