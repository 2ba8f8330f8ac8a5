"""Where the native engine's tensors are on a GPU, checked without one: fake tensors know theirs and compute nothing.

An operation that mixes devices raises. Forward, backward and step run on the fake device "meta", which any PyTorch
has; what depends on the name "cuda" runs on fake CUDA tensors, which needs PyTorch built for CUDA. Autograd asks the
driver there, so that without a GPU the gradients are put in place by hand.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from native_runs import parsed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from native import checkpoint, data, metrics, train, trainers
from native.model import T5
from native.parallel import Layout, SharedDropout, Stage


@pytest.fixture(params=["meta", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda":
        if not torch.version.cuda:
            pytest.skip(f"PyTorch {torch.__version__} is not built for CUDA: the device meta is checked alone")
        if not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
            pytest.skip(f"PyTorch {torch.__version__} cannot make fake CUDA tensors without a GPU")
        torch._C._ensureCUDADeviceGuardSet()
    with FakeTensorMode():
        yield torch.device(request.param)


@pytest.fixture
def args(device: torch.device) -> Namespace:
    args = parsed("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--bf16")
    args.device, args.padded_vocab_size, args.pad_token = device, 256, 0
    return args


def batch(args: Namespace, device: torch.device) -> trainers.Batch:
    rows, lengths = args.global_batch_size, (args.encoder_seq_length, args.decoder_seq_length, args.decoder_seq_length)
    return tuple(torch.ones(rows, length, dtype=torch.int64, device=device) for length in lengths)


def make_trainer(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> trainers.TorchTrainer:
    if args.device.type == "meta":  # the fused kernel is for real devices alone
        adam = torch.optim.AdamW
        monkeypatch.setattr(
            torch.optim, "AdamW", lambda *groups, **options: adam(*groups, **options | {"fused": False})
        )
    elif not torch.cuda.is_available():
        gradients = [torch.Tensor.backward]

        def put_gradients(loss: torch.Tensor) -> None:
            assert loss.requires_grad and gradients
            for parameter in trainer.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

        monkeypatch.setattr(torch.Tensor, "backward", put_gradients)
    trainer = trainers.TorchTrainer(args, Layout())
    return trainer


def test_mixing_devices_is_noticed(device: torch.device):
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device=device) + torch.zeros(3)


def test_an_iteration_stays_on_the_device(
    args: Namespace, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    trainer = make_trainer(args, monkeypatch)
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {device.type}
    loss, norm = trainer.step(batch(args, device), 1e-3)
    assert (loss.device.type, norm.device.type) == (device.type, device.type)
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    assert len(moments) == len(list(trainer.model.parameters()))
    assert {moment.device.type for moment in moments} == {device.type}
    assert trainer.optimizer.defaults["fused"] == (device.type == "cuda")
    assert trainer.evaluate(batch(args, device)).device.type == device.type


def test_tensor_parallel_dropout_draws_on_the_device(device: torch.device):
    layout = Layout()
    layout.tp.size = 2
    if device.type == "cuda" and torch.cuda.is_available():
        layout.tp.rng = torch.Generator(device)
    x = torch.ones(4, 8, device=device, requires_grad=True)
    assert SharedDropout(0.5, layout.tp)(x).device.type == device.type


def test_a_stage_on_a_gpu_exchanges_on_the_host_over_gloo(
    args: Namespace, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    x, y, z = batch(args, device)
    layout = Layout()
    layout.pp.size = 2
    with device:
        encoder = T5(args, layout)
    first = Stage(encoder, layout, device)
    assert first.exchange.type == "cpu"
    first.tokens = iter([(x, y, z)])
    sent = first(x)
    assert (sent.device.type, sent.dtype) == ("cpu", torch.bfloat16)

    received, layout.pp.rank = torch.empty_like(sent, requires_grad=True), 1
    with device:
        decoder = T5(args, layout)
    last = Stage(decoder, layout, device)
    last.tokens = iter([(x, y, z)])
    losses = last(received)
    assert losses.device.type == device.type
    if device.type == "meta" or torch.cuda.is_available():
        trainers.mean_loss(losses, z).backward()
        assert received.grad.device.type == "cpu"
        sent.backward(received.grad)
        assert {p.grad.device.type for p in encoder.parameters()} == {device.type}

    monkeypatch.setattr("torch.distributed.get_backend", lambda: "nccl")
    assert Stage(encoder, layout, device).exchange == device


def test_metrics_take_numbers_off_the_device_once_per_interval(
    args: Namespace, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    told, waits = [], []
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: waits.append("cuda"))
    monkeypatch.setattr(metrics.Metrics, "tell", lambda *values: told.append(values))
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: [tensor.device.type] * len(tensor))
    args.log_interval, args.parameters, args.tensorboard_dir = 2, 1, None
    recorder = metrics.Metrics(args, Layout())
    for iteration in (1, 2):
        recorder.record(iteration, torch.ones((), device=device), torch.ones((), device=device), 0.1)
    ((_, iteration, _, losses, norms),) = told
    assert (iteration, losses, norms) == (2, [device.type] * 2, [device.type] * 2)
    assert waits == ["cuda"] * 2 * (device.type == "cuda")  # at the start, and at the end of the interval


@pytest.mark.parametrize(("flags", "pinned"), [((), False), (("--share-gpus",), True)])
def test_batches_are_pinned_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], pinned: bool):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    asked = {}
    monkeypatch.setattr("torch.utils.data.DataLoader", lambda *_, **options: asked.update(options) or [])
    args = parsed(*flags)
    list(data.batches([], args, 0))
    assert asked["pin_memory"] is pinned


def test_a_batch_moves_without_waiting(args: Namespace, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    loader = train.Data.__new__(train.Data)
    loader.device = device
    moved = loader.next(iter([batch(args, torch.device("cpu"))]))
    assert {tensor.device.type for tensor in moved} == {device.type}


def test_dropout_states_are_the_gpus_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Random states are bytes on the CPU whatever their generator's device."""
    set_states = []
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: torch.arange(16, dtype=torch.uint8))
    monkeypatch.setattr("torch.cuda.set_rng_state", set_states.append)
    layout = Layout()
    layout.tp.rng = torch.Generator()
    args = parsed("--save", str(tmp_path), "--save-interval", "1", "--load", str(tmp_path))
    args.device = torch.device("cuda", 0)
    trainer = Namespace(save=lambda *_: None, load=lambda *_: None)
    checkpoint.save(trainer, args, layout, 3)
    checkpoint.load(trainer, args, layout, 3)
    assert [state.tolist() for state in set_states] == [list(range(16))]
    assert checkpoint.latest(str(tmp_path)) == 3


@pytest.mark.parametrize(
    ("gpus", "local_rank", "flags", "chosen"),
    [
        (1, "1", ("--share-gpus",), "cuda:0"),
        (2, "3", ("--share-gpus",), "cuda:1"),
        (2, "1", ("--distributed-backend", "nccl"), "cuda:1"),
        (2, "1", (), "cpu"),
    ],
)
def test_which_gpu_a_process_takes(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: str, flags: tuple[str, ...], chosen: str
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert parsed(*flags).device == torch.device(chosen)


@pytest.mark.parametrize(
    ("gpus", "flags", "says"),
    [
        (0, ("--share-gpus",), "PyTorch sees 0"),
        (1, ("--share-gpus", "--distributed-backend", "nccl"), "--distributed-backend gloo"),
        (1, ("--share-gpus", "--deepspeed"), "without --deepspeed"),
    ],
)
def test_gpus_that_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, gpus: int, flags: tuple[str, ...], says: str
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(SystemExit):
        parsed(*flags)
    assert says in capfd.readouterr().err
