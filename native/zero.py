"""ZeRO by DeepSpeed."""

import math
from argparse import Namespace
from typing import NamedTuple

import torch
from torch import Tensor

from native.data import Batch
from native.data_parallel import TorchTrainer, empty_state, make_optimizer
from native.model import build, initialise, shape_of
from native.parallel import Mesh
from native.pieces import KINDS, WEIGHTS, Piece, boxes_of_stretch
from t5bench import Problem
from t5bench.costmodel.job import REDUCE_ONCE_RELEASE


class ZeroTrainer(TorchTrainer):
    """ZeRO-1, 2, 3 and offload, by DeepSpeed with the run's JSON; parameters in bf16 with DeepSpeed's fp32 masters.

    ZeRO-2 and ZeRO-3 reduce gradients in every micro-batch; with --zero-reduce-once, once an iteration.
    """

    def __init__(self, args: Namespace, mesh: Mesh) -> None:
        import deepspeed

        self.args = args
        self.mesh = mesh
        config = args.deepspeed_json
        zero = config["zero_optimization"]
        # PyTorch's fused AdamW steps on CPU and GPU alike: DeepSpeed's own would have to be compiled first.
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        if args.device.type == "cpu":
            for offload in {"offload_optimizer", "offload_param"} & zero.keys():
                zero[offload]["pin_memory"] = False
        self.divides_parameters = has_sharded_parameters = zero["stage"] == 3

        def fill(parameter: torch.nn.Parameter, values: Tensor) -> None:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=has_sharded_parameters):
                parameter.copy_(values)

        # ZeRO-3 partitions each module's parameters as soon as they exist: no process ever has the whole model.
        with args.device, deepspeed.zero.Init(config_dict_or_path=config, enabled=has_sharded_parameters):
            model = build(args, mesh)
        initialise(model, args, mesh, fill)
        if has_sharded_parameters and model.lm_head.weight is None:  # it uses the embedding's, so it has to gather it
            embedding = model.language_model["embedding"].word_embeddings
            deepspeed.zero.register_external_parameter(model.lm_head, embedding.weight)
        optimizer = make_optimizer(model, args)
        self.model, self.optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if args.zero_reduce_once and not hasattr(self.model, "coalesce_grad_reduction"):
            found = f"DeepSpeed {deepspeed.__version__} cannot reduce gradients once an iteration (--zero-reduce-once)"
            raise Problem(found, f"Install DeepSpeed {REDUCE_ONCE_RELEASE} or newer")

    def forward_backward(self, micro_batches: list[Batch]) -> Tensor:
        if self.args.zero_reduce_once and len(micro_batches) > 1:
            return self.reducing_once(micro_batches)
        total = torch.zeros((), device=self.args.device)
        for micro_batch in micro_batches:
            loss = self.loss(micro_batch)
            self.model.backward(loss)  # divides by the number of micro-batches
            self.model.step()  # updates after the last one
            total += loss.detach() / len(micro_batches)
        return total

    def reducing_once(self, micro_batches: list[Batch]) -> Tensor:
        """The same, but each process adds up whole gradients, which are reduced after the last micro-batch."""
        engine = self.model
        total = torch.zeros((), device=self.args.device)
        engine.set_gradient_accumulation_boundary(False)
        with engine.coalesce_grad_reduction():  # which reduces at its end
            for micro_batch in micro_batches:
                loss = self.loss(micro_batch)
                engine.backward(loss)
                total += loss.detach() / len(micro_batches)
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        return total

    def update(self) -> Tensor:
        norm = self.model.get_global_grad_norm()
        if norm is None:  # of stage 0 in fp32, which only the ledger trains
            norm = math.nan
        return torch.as_tensor(norm, dtype=torch.float32, device=self.args.device)

    # ---- what a checkpoint has of it: see checkpoint.py ----

    @property
    def partitions(self) -> list[Tensor]:
        """What AdamW updates: this process's fp32 parts of all parameters, laid end to end."""
        zero = self.model.optimizer
        return zero.fp32_partitioned_groups_flat if self.divides_parameters else zero.single_partition_of_fp32_groups

    @property
    def updates(self) -> int:
        return int(self.model.optimizer.optimizer.state[self.partitions[0]]["step"])

    def begin_load(self, updates: int) -> None:
        adam = self.model.optimizer.optimizer
        for partition in self.partitions:
            adam.state[partition] = empty_state(partition, updates)

    def end_load(self) -> None:
        """Makes the parameters anew from their fp32 masters."""
        zero = self.model.optimizer
        if not self.divides_parameters:
            zero.update_lp_params()
            return
        zero.checkpoint_event_prologue()
        for parameter in self.model.module.parameters():
            group, begin, length = zero.grad_position[zero.get_param_id(parameter)]
            parameter.ds_tensor.data.copy_(self.partitions[group].narrow(0, begin, length))
        zero.checkpoint_event_epilogue()  # gathers the small ones, which every process keeps whole

    def pieces(self) -> list[Piece]:
        """Each process has a stretch of a parameter's elements, or none."""
        module = self.model.module
        adam = self.model.optimizer.optimizer
        pieces = []
        for name, parameter in module.named_parameters():
            stretch = self.stretch_of(parameter)
            if not stretch:
                continue
            shape = shape_of(parameter)
            partition = self.partitions[stretch.group]
            values = {WEIGHTS: partition, **adam.state[partition]}
            for kind in KINDS:
                begin = stretch.place
                for offsets, sizes in boxes_of_stretch(shape, stretch.begin, stretch.end):
                    box = values[kind].detach().narrow(0, begin, math.prod(sizes)).view(sizes)
                    pieces.append(Piece(f"{kind}.{module.whole_name(name)}", shape, offsets, box, self.args.rank))
                    begin += box.numel()
        return pieces

    def stretch_of(self, parameter: torch.nn.Parameter) -> "Stretch | None":
        zero = self.model.optimizer
        if self.divides_parameters:
            group, place, length = zero.grad_position[zero.get_param_id(parameter)]
            begin = self.mesh.dp.rank * length
            end = min(begin + length, parameter.ds_numel)  # the last ones have padding
            return Stretch(group, place, begin, end) if begin < end else None
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        begin = mapping.lp_fragment_address.start
        place = mapping.hp_fragment_address.start
        return Stretch(mapping.param_group_index, place, begin, begin + mapping.lp_fragment_address.numel)


class Stretch(NamedTuple):
    """Elements [begin, end) of a parameter, which are at `place` in one of this process's partitions."""

    group: int
    place: int
    begin: int
    end: int
