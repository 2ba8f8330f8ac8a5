"""The native engine's model: its slices, its masks, its learning rate, its precision, and its log line."""

from pathlib import Path

import pytest
import torch
from command_lines import parsed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from native import metrics
from native.data_parallel import TorchTrainer
from native.model import Model, build, initialise
from native.parallel import Axis, Mesh
from native.schedule import learning_rate


def initial(args, mesh: Mesh | None = None) -> Model:
    model = build(args, mesh or Mesh())
    initialise(model, args, mesh or Mesh())
    return model.eval()


def test_attention_drops_as_much_as_it_is_told_on_every_gpu():
    """cuDNN's attention, which PyTorch would choose on some, drops multiples of 1/16."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    initial(parsed())
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_rank_holds_its_heads(rank: int):
    args = parsed()
    whole = dict(initial(args).named_parameters())
    part = dict(initial(args, Mesh(tp=Axis(2, rank))).named_parameters())
    own = slice(32 * rank, 32 * (rank + 1))
    layer = "language_model.decoder.layers.0"
    query_key_value = whole[f"{layer}.self_attention.query_key_value.weight"].view(3, 64, 64)[:, own]
    assert torch.equal(part[f"{layer}.self_attention.query_key_value.weight"].view(3, 32, 64), query_key_value)
    # Cross-attention's keys and values alternate by head: a rank's heads are one block of rows.
    key_value = whole[f"{layer}.inter_attention.key_value.weight"].view(4, 2, 16, 64)[2 * rank : 2 * rank + 2]
    assert torch.equal(part[f"{layer}.inter_attention.key_value.weight"].view(2, 2, 16, 64), key_value)
    assert torch.equal(
        part[f"{layer}.mlp.dense_4h_to_h.weight"], whole[f"{layer}.mlp.dense_4h_to_h.weight"].chunk(2, 1)[rank]
    )
    assert torch.equal(part["lm_head.bias"], whole["lm_head.bias"].chunk(2)[rank])


def batch(generator: torch.Generator, encoder_padding: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    encoder = torch.randint(3, 256, (2, 64), generator=generator)
    decoder, labels = torch.randint(3, 256, (2, 2, 32), generator=generator)
    encoder[1, 64 - encoder_padding :] = 0
    decoder[0, 25:] = 0
    labels[0, 25:] = -1
    return encoder, decoder, labels


def test_padding_changes_no_loss_and_the_decoder_does_not_look_ahead():
    model = initial(parsed())
    (encoder, decoder, labels) = batch(torch.Generator().manual_seed(1))
    with torch.no_grad():
        losses = model(encoder, decoder, labels)
        shorter = model(encoder[1:, :44], decoder[1:], labels[1:])
        later = decoder.clone()
        later[1, 20:] = 7
        changed = model(encoder, later, labels)
    assert (losses[0, 25:] == 0).all() and (losses[0, :25] > 1).all()
    torch.testing.assert_close(losses[1:], shorter, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses[1, :20], changed[1, :20], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(losses[1, 20:], changed[1, 20:])


def test_the_layers_of_a_later_decoder_stage_keep_one_copy_of_the_encoders_output():
    """It arrives behind the decoder's hidden states, so each layer would have to put it into one piece."""
    args = parsed("--encoder-num-layers", "6", "--decoder-num-layers", "6")
    args.pipeline_model_parallel_split_rank = 1
    model = initial(args, Mesh(pp=Axis(3, 2)))  # with three of the six layers
    received = torch.randn(2, 32 + 64, 64, requires_grad=True)
    kept: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (2 * 64, 64):  # what the layers multiply by their weights of keys and values
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(*batch(torch.Generator().manual_seed(1)), received)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(kept - weights) == 1


def test_the_learning_rate_is_a_cosine_after_a_linear_warm_up():
    args = parsed("--train-iters", "100", "--lr", "1.0", "--min-lr", "0.2")
    assert [learning_rate(args, n) for n in (0, 50, 100)] == pytest.approx([1.0, 0.6, 0.2])
    args = parsed("--train-iters", "100", "--lr", "1.0", "--lr-warmup-iters", "20")
    assert [learning_rate(args, n) for n in (0, 5, 20, 60, 100)] == pytest.approx([0.0, 0.25, 1.0, 0.5, 0.0])


def test_bf16_follows_fp32_with_masters_in_fp32():
    def train(*flags: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        trainer = TorchTrainer(parsed("--global-batch-size", "2", *flags), Mesh())
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        return [torch.stack(trainer.step(batch(torch.Generator().manual_seed(n)), 1e-3)) for n in range(5)]

    exact, rounded = (torch.stack(train(*flags)) for flags in ([], ["--bf16"]))
    differences = (rounded / exact - 1).abs().amax(0)
    assert 0 < differences[0] < 2e-3
    assert 0 < differences[1] < 2e-2


def test_a_line_has_the_mean_loss_of_its_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    """And TensorBoard has the settings."""
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    args = parsed("--log-interval", "2")
    args.tensorboard_dir = str(tmp_path)
    recorder = metrics.Metrics(args, Mesh())
    for iteration, loss in enumerate((1.0, 2.0, 4.0, 6.0), 1):
        recorder.record(iteration, torch.tensor(loss), torch.tensor(loss / 2), 0.1)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["2/", "4/"]
    for line, loss, norm in zip(lines, (1.5, 5.0), (1.0, 3.0), strict=True):
        assert f"| lm loss: {loss:.6E} |" in line
        assert f"| grad norm: {norm:.6E} |" in line
    recorder.tensorboard.close()
    shown = EventAccumulator(str(tmp_path)).Reload().Tensors("log_interval/text_summary")
    assert shown[0].tensor_proto.string_val == [b"2"]
