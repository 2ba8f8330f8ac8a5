"""Data parallelism by PyTorch's DDP, with which tensor parallelism combines: the trainer on which the others build."""

import inspect
import os
from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from native.data import Batch
from native.model import Model, build, initialise, parts_of, shape_of
from native.parallel import Mesh, clip_gradients, local_part, sum_tied_gradients
from native.pieces import KINDS, MOMENTS, WEIGHTS, Piece, boxes_of_rows, shared_out
from native.precision import forget_copies
from native.sequence_parallel import sum_partial_gradients
from native.tensor_parallel import Slice
from t5bench.costmodel.layout import rank_at

# All replicas start from the same weights, so DDP need not broadcast them; PyTorch 2.4 has no option for this.
CAN_SKIP_BROADCAST = "init_sync" in inspect.signature(DistributedDataParallel).parameters


def make_optimizer(model: Model, args: Namespace) -> torch.optim.AdamW:
    """AdamW, fused into one kernel on GPU and CPU; no decay of biases and LayerNorms."""
    matrices = []
    vectors = []
    for parameter in model.parameters():
        if len(shape_of(parameter)) > 1:
            matrices.append(parameter)
        else:
            vectors.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=args.lr, betas=betas, eps=args.adam_eps, fused=True)


def split_batch(batch: Batch, args: Namespace) -> list[Batch]:
    """The micro-batches of an iteration's batch: [samples, length] tensors into [micro-batch size, length] ones."""
    chunks = [tensor.chunk(args.micro_batches) for tensor in batch]
    return list(zip(*chunks, strict=True))


def mean_loss(losses: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a micro-batch's real tokens, []."""
    return losses.sum() / (labels >= 0).sum()


class TorchTrainer:
    """Data and tensor parallelism.

    With --bf16 the parameters are the fp32 master weights: each iteration computes with one bf16 copy of them, and
    gradients are accumulated and reduced in fp32. Per parameter that is Megatron's 18 bytes: 4 master + 2 copy +
    4 gradient + 8 AdamW.
    """

    def __init__(self, args: Namespace, mesh: Mesh) -> None:
        self.args = args
        self.mesh = mesh
        with args.device:
            self.model = build(args, mesh)
        initialise(self.model, args, mesh)
        self.optimizer = make_optimizer(self.model, args)
        self.parts = parts_of(self.model)
        self.replicas: list[DistributedDataParallel] = []
        """Of each part; none without other replicas."""
        if mesh.dp.size > 1:
            options = {"process_group": mesh.dp.group, "gradient_as_bucket_view": True}
            if CAN_SKIP_BROADCAST:
                options["init_sync"] = False
            self.replicas = [DistributedDataParallel(part, **options) for part in self.parts]

    def step(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor]:
        """One iteration; (loss, gradient norm), both [] on the device. Nothing here waits for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.forward_backward(split_batch(batch, self.args))
        sum_tied_gradients(self.model.tied)
        sum_partial_gradients(self.model.parameters(), self.mesh)
        norm = self.update()
        return loss, norm

    def forward_backward(self, micro_batches: list[Batch]) -> Tensor:
        """Accumulates the gradients of an iteration; the mean loss of its micro-batches, 0 on a stage without loss."""
        total = torch.zeros((), device=self.args.device)
        for number, micro_batch in enumerate(micro_batches, 1):
            loss = mean_loss(self.forward(micro_batch), micro_batch[-1]) / len(micro_batches)
            self.backward(loss, is_last=number == len(micro_batches))
            total += loss.detach()
        return total

    def forward(self, micro_batch: Batch, received: Tensor | None = None, part: int = 0) -> Tensor:
        """A part's output for a micro-batch. No gradient is all-reduced yet: see backward()."""
        if not self.replicas:
            return self.parts[part](*micro_batch, received)
        with self.replicas[part].no_sync():
            return self.replicas[part](*micro_batch, received)

    def backward(self, output: Tensor, gradient: Tensor | None = None, *, is_last: bool, part: int = 0) -> None:
        """Adds to the gradients. DDP all-reduces them only during a part's last backward pass of an iteration."""
        if is_last and self.replicas:
            self.replicas[part].reducer.prepare_for_backward([])  # what DDP's forward pass does outside no_sync()
        output.backward(gradient)

    def update(self) -> Tensor:
        """Applies the accumulated gradients and forgets them; their norm, []."""
        forget_copies()
        norm = clip_gradients(self.model, self.model.tied, self.mesh, self.args.clip_grad)
        self.optimizer.step()
        # DDP's stay in its buckets; without replicas the first micro-batch's are taken as they are, and not added to 0.
        self.optimizer.zero_grad(set_to_none=not self.replicas)
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The mean loss of an iteration's micro-batches, []; 0 on a stage without loss."""
        losses = [self.loss(micro_batch) for micro_batch in split_batch(batch, self.args)]
        forget_copies()
        return torch.stack(losses).mean()

    def loss(self, micro_batch: Batch) -> Tensor:
        """A micro-batch's mean loss, []."""
        return mean_loss(self.model(*micro_batch), micro_batch[-1])

    # ---- what a checkpoint has of it: see checkpoint.py ----

    @property
    def updates(self) -> int:
        """AdamW's steps so far."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    def begin_load(self, updates: int) -> None:
        """Gives AdamW its averages, which it would otherwise make in its first step."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = empty_state(parameter, updates)

    def end_load(self) -> None:
        """Gives the copies of tied embeddings what has been loaded into the first ones."""
        states = [{WEIGHTS: parameter.data, **moments} for parameter, moments in self.optimizer.state.items()]
        state_of = dict(zip(self.optimizer.state, states, strict=True))
        for embedding in self.model.tied:
            if not embedding.copies:
                continue
            first, *others = embedding.copies
            for kind in KINDS:
                value = state_of[first][kind]
                embedding.axis.broadcast(value)
                for other in others:
                    state_of[other][kind].copy_(value)

    def pieces(self) -> list[Piece]:
        """The boxes of the whole model's weights and averages that this process holds, and who writes each.

        Of replicas, those on the first one's node share the writing; what all tensor-parallel ranks hold, the first
        writes. The first stage writes a tied embedding, and the others receive it when a checkpoint is loaded.
        """
        replicas = replicas_on_one_node(self.mesh, self.replicas_of_states())
        repeated = {copy for embedding in self.model.tied for copy in embedding.repeated(self.mesh)}
        held = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter not in repeated]
        sizes = [local_part(parameter).numel() for _, parameter in held for _ in KINDS]
        writers = iter(shared_out(sizes, len(replicas)))
        tp = self.mesh.tp
        pieces = []
        for name, parameter in held:
            shape = tuple(parameter.shape)
            tp_slice: Slice | None = getattr(parameter, "tp_slice", None)
            dim, stretches, writing_tp_rank = 0, [(0, 0, shape[0])], 0
            if tp_slice:
                dim, stretches = tp_slice.dim, tp_slice.stretches(tp)
                writing_tp_rank = tp.rank - tp.rank % tp_slice.copies
                shape = tp_slice.whole_shape(shape)
            boxes = boxes_of_rows(len(shape), dim, stretches, self.rows_of(parameter))
            values = {WEIGHTS: parameter, **self.optimizer.state[parameter]}
            for kind in KINDS:
                replica = replicas[next(writers)]
                writer = rank_at(self.mesh.pp.rank, replica, writing_tp_rank, tp.size, self.mesh.dp.size)
                local = local_part(values[kind].detach())
                key = f"{kind}.{self.model.whole_name(name)}"
                pieces += [Piece(key, shape, box.offsets, box.of(local), writer) for box in boxes]
        return pieces

    def replicas_of_states(self) -> range:
        """The data-parallel ranks that hold what this process holds."""
        return range(self.mesh.dp.size)

    def rows_of(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Where the rows that this process holds begin and end, in the tensor-parallel rank's part of a parameter."""
        return 0, len(parameter)


def empty_state(parameter: Tensor, updates: int) -> dict[str, Tensor]:
    """AdamW's state of a parameter as it is before its first step, but for the number of steps."""
    step = torch.tensor(float(updates), device=parameter.device)
    return {"step": step} | {kind: torch.zeros_like(parameter, requires_grad=False) for kind in MOMENTS}


def replicas_on_one_node(mesh: Mesh, replicas: range) -> list[int]:
    """Those of these data-parallel ranks that are on the first one's node: its disk need not be the others'."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = [rank_at(mesh.pp.rank, replica, 0, mesh.tp.size, mesh.dp.size) // here for replica in replicas]
    return [replica for replica, node in zip(replicas, nodes, strict=True) if node == nodes[0]]
