"""Inside the engine, in two processes: first as data parallel "nodes" of one process each, on a machine that has room
for two; then as tensor parallel ranks; then as pipeline stages."""

import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron import get_args
from megatron.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.core import mpu
from megatron.core.pipeline_parallel import p2p_communication
from megatron.data import gpt_dataset
from megatron.data.dataset_utils import build_train_valid_test_datasets
from models import loss_and_squared_norm
from started_engine import DECODER_LENGTH, ENCODER_LENGTH, write_data

RANK = int(os.environ["RANK"])
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", autouse=True)
def whole_model(args: Namespace) -> tuple[float, float]:
    """The loss and gradient norm of one process."""
    loss, square = loss_and_squared_norm()
    return loss, square.sqrt().item()


def arrange(**sizes: int) -> None:
    """The processes form other groups."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(**sizes)
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        setattr(get_args(), name, sizes.get(name, 1))


def test_device_follows_the_local_rank(args: Namespace):
    assert args.local_rank == 0


@pytest.mark.parametrize("shared", [False, True])
def test_every_node_builds_its_index_maps(args: Namespace, shared: bool):
    """Each builds them in its own directory, and both may share one."""
    directory = Path(os.environ["SHARED_DATA"] if shared else args.data_path[0]).parent
    if shared and RANK == 0:
        write_data(directory)
    torch.distributed.barrier()
    dataset, *_ = build_train_valid_test_datasets(
        [str(directory / "text")], "mmap", "949,50,1", [16, 0, 0], ENCODER_LENGTH, 0.15, 0.1, 1234, True,
        max_seq_length_dec=DECODER_LENGTH, dataset_type="t5",
    )  # fmt: skip
    gpt, *_ = gpt_dataset.build_train_valid_test_datasets(
        [str(directory / "text")], "mmap", "949,50,1", [16, 0, 0], 16, 1234, True
    )
    torch.distributed.barrier()
    assert len(dataset) >= 16 and len(gpt) >= 16
    assert len(list(directory.glob("*indexmap*"))) == 1, "a temporary file was left behind"
    assert len(list(directory.glob("index-cache/*"))) == 4, "so was one of GPT's"


def test_a_split_without_an_encoder_is_refused(monkeypatch: Patch):
    stages = ["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-split-rank", "0"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, *stages])
    with pytest.raises(AssertionError, match="split rank needs to be at least 1"):
        validate_args(parse_args())


def test_tensor_parallel_ranks_have_the_same_loss_and_count_every_gradient_once(whole_model: tuple[float, float]):
    arrange(tensor_model_parallel_size=2)
    loss, square = loss_and_squared_norm()
    torch.distributed.all_reduce(square)
    assert (loss, square.sqrt().item()) == pytest.approx(whole_model, rel=1e-6)


@pytest.mark.parametrize("shapes_too", [False, True])
def test_stages_exchange_through_the_host(monkeypatch: Patch, shapes_too: bool):
    """As where they share a GPU; here the GPU is the host too. Each gets what the other sent, in a tensor of its own
    that was filled from a copy."""
    arrange(pipeline_model_parallel_size=2, pipeline_model_parallel_split_rank=1)
    shape = (3, 2, 4)
    exchange = p2p_communication._batched_p2p_ops
    received_copies = []

    def spy(**tensors):
        received_copies.extend(value for key, value in tensors.items() if key.startswith("tensor_recv"))
        return exchange(**tensors)

    monkeypatch.setattr(p2p_communication, "_goes_through_host", lambda: True)
    monkeypatch.setattr(p2p_communication, "_batched_p2p_ops", spy)
    config = core_transformer_config_from_args(get_args())
    config.variable_seq_lengths = shapes_too
    mine = torch.full(shape, RANK + 1.0, requires_grad=True) * 2
    if RANK == 0:
        received = p2p_communication.send_forward_recv_backward(mine, shape, config)
    else:
        received = p2p_communication.send_backward_recv_forward(mine, shape, config)
    assert torch.equal(received, torch.full(shape, 2 * (2.0 - RANK)))
    assert received.is_leaf and received.requires_grad
    (copy,) = [copy for copy in received_copies if copy is not None]
    assert copy is not received and not copy.requires_grad
