"""The gradient norm and clipping: sums that are missing, doubled, or of a part."""

from torch import Tensor, nn

from gate_score.defect import OWN, defect
from gate_score.layouts import summed
from gate_score.trainer import Trainer, local


@defect("fsdp2", "pytorch/pytorch#170862", "each rank clips by the norm of its own shards")
class NormOfOwnShards:
    def norm(self) -> Tensor:
        return Trainer.norm(self)


@defect("fsdp2", "pytorch/torchtitan#766", "the norm that is logged is the rank's own, the one that clips is right")
class LogsTheNormOfOwnShards:
    def norm(self) -> Tensor:
        return Trainer.norm(self)

    def factor(self, norm: Tensor) -> Tensor:
        return super().factor(summed(norm.square()).sqrt())


@defect("fsdp2", "deepspeedai/DeepSpeed#8475", "norms of ranks that have other parameters are averaged")
class NormsAreAveragedOverRanks:
    def norm(self) -> Tensor:
        return summed(Trainer.norm(self)) / self.world


@defect("fsdp2", "ByteDance-Seed/VeOmni#862", "the norm is added up over replicas of the shards as well")
class NormOverReplicas:
    def norm(self) -> Tensor:
        return super().norm() * self.world**0.5


@defect("pipeline", "pytorch/torchtitan#596", "each stage clips by its own norm")
class NormOfOwnStage:
    def norm(self) -> Tensor:
        return Trainer.norm(self)


@defect("pipeline", "NVIDIA/Megatron-LM#7227", "both copies of the words' table count in the norm")
class TiedCopiesCountTwice:
    def squares(self, name: str, parameter: nn.Parameter) -> Tensor:
        return Trainer.squares(self, name, parameter)


@defect("tensor", "meta-pytorch/torchtune#2420", "each rank clips by the norm of its own slices")
class NormOfOwnSlices:
    def total_of_slices(self, squares: Tensor) -> Tensor:
        return squares


@defect("tensor", "NVIDIA-NeMo/RL#3788", "what every rank has whole counts once a rank in the norm")
class ReplicatedCountTwice:
    def norm(self) -> Tensor:
        return summed(Trainer.norm(self).square()).sqrt()


@defect("tensor", "NVIDIA/Megatron-LM#7452", "slices that are not marked as such are left out on all ranks but one")
class UnmarkedSlicesAreLeftOut:
    def squares(self, name: str, parameter: nn.Parameter) -> Tensor:
        return super().squares(name, parameter) * (self.rank == 0 or "qkv.bias" not in name)


@defect("sequence", "NVIDIA/Megatron-LM#5916", "a divided layer counts with one rank's part in the norm")
class OneLayerCountsInPart:
    def squares(self, name: str, parameter: nn.Parameter) -> Tensor:
        return super().squares(name, parameter) * (self.rank == 0 or ".up." not in name)


@defect("data", "facebookresearch/lingua#59", "gradients are clipped after each micro-batch, not once")
class ClipsEachMicroBatch:
    def backward(self, loss: Tensor, number: int, count: int) -> None:
        super().backward(loss, number, count)
        self.clip(Trainer.norm(self) * self.world)


@defect("data", "huggingface/diffusers#721", "each rank clips before gradients are added up")
class ClipsBeforeTheSum:
    def reduce(self) -> None:
        super().clip(Trainer.norm(self) * self.world)
        super().reduce()


@defect("data", "deepspeedai/DeepSpeed#5150", "the factor of clipping is computed and not applied")
class DoesNotClip:
    def clip(self, norm: Tensor) -> None:
        pass


@defect("zero1", "deepspeedai/DeepSpeed#8068", "gradients are clipped at another norm than the recipe says")
class ClipsAtAnotherNorm:
    def factor(self, norm: Tensor) -> Tensor:
        return (1.0 / (norm + 1e-6)).clamp(max=1.0)


@defect("data", OWN, "the factor of clipping is 1 % too large")
class ClipsOnePercentLess:
    def factor(self, norm: Tensor) -> Tensor:
        return (1.01 * self.recipe.clip / (norm + 1e-6)).clamp(max=1.0)


@defect("data", OWN, "the norm is computed in bf16")
class NormInBf16:
    def squares(self, name: str, parameter: nn.Parameter) -> Tensor:
        return local(parameter.grad).bfloat16().square().sum().double()


@defect("data", OWN, "the norm is of a part of the parameters: matrices alone")
class NormOfMatricesAlone:
    def squares(self, name: str, parameter: nn.Parameter) -> Tensor:
        return super().squares(name, parameter) * (parameter.dim() > 1)
