"""The native engine's model: its size, its initial weights, its masks, and Megatron-DeepSpeed's loss and gradients."""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_runs import command_line, parsed

from native.metrics import flops_per_iteration
from native.model import T5, initial_value, initialise
from native.parallel import Axis, Layout
from native.train import learning_rate

LARGE = (
    *("--encoder-num-layers", "24", "--decoder-num-layers", "24", "--hidden-size", "1024", "--ffn-hidden-size", "2816"),
    *("--num-attention-heads", "16", "--kv-channels", "64", "--max-position-embeddings", "512"),
    *("--encoder-seq-length", "512", "--decoder-seq-length", "128", "--global-batch-size", "16"),
)


def model_arguments(*flags: str, vocabulary: int = 256):
    args = parsed(*flags)
    args.padded_vocab_size, args.pad_token = vocabulary, 0
    return args


def build(args, layout: Layout | None = None) -> T5:
    model = T5(args, layout or Layout())
    initialise(model, args, layout or Layout())
    return model.eval()


def size_on_one_process(tp: int, pp_rank: int, pp: int = 1) -> dict[str, tuple[int, bool]]:
    """Parameters of the large model's share on one process: name -> (elements, sliced by tensor parallelism)."""
    args = model_arguments(*LARGE, vocabulary=32128)
    with torch.device("meta"):
        model = T5(args, Layout(pp=Axis(pp, pp_rank), tp=Axis(tp)))
    return {name: (p.numel(), hasattr(p, "tp_slice")) for name, p in model.named_parameters()}


def test_the_large_model_has_612998528_parameters():
    assert sum(elements for elements, _ in size_on_one_process(1, 0).values()) == 612_998_528


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_the_shares_of_a_layout_make_the_whole_model(tp: int, pp: int):
    whole: dict[str, int] = {}
    for stage in range(pp):
        for name, (elements, sliced) in size_on_one_process(tp, stage, pp).items():
            assert whole.setdefault(name, elements * (tp if sliced else 1)) == elements * (tp if sliced else 1)
    assert sum(whole.values()) == 612_998_528


def test_the_large_models_iteration_takes_19_81_teraflops():
    assert flops_per_iteration(model_arguments(*LARGE, vocabulary=32128)) == pytest.approx(19.81e12, rel=5e-4)


def test_an_initial_weight_depends_on_the_seed_and_its_name_alone():
    args = model_arguments("--seed", "77")
    name = "language_model.decoder.layers.1.inter_attention.dense.weight"
    seed = int.from_bytes(hashlib.sha256(f"77:{name}".encode()).digest()[:8], "big") >> 1
    whole = torch.empty(64, 64).normal_(0.0, 0.02 / math.sqrt(2 * 2), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(initial_value(name, [64, 64], args), whole)
    assert torch.equal(dict(build(args).named_parameters())[name], whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_rank_holds_its_heads(rank: int):
    args = model_arguments()
    whole = dict(build(args).named_parameters())
    part = dict(build(args, Layout(tp=Axis(2, rank))).named_parameters())
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
    decoder[0, 25:], labels[0, 25:] = 0, -1
    return encoder, decoder, labels


def test_padding_changes_no_loss_and_the_decoder_does_not_look_ahead():
    model, (encoder, decoder, labels) = build(model_arguments()), batch(torch.Generator().manual_seed(1))
    with torch.no_grad():
        losses = model(encoder, encoder, decoder, labels)
        shorter = model(encoder[1:, :44], encoder[1:, :44], decoder[1:], labels[1:])
        later = decoder.clone()
        later[1, 20:] = 7
        changed = model(encoder, encoder, later, labels)
    assert (losses[0, 25:] == 0).all() and (losses[0, :25] > 1).all()
    torch.testing.assert_close(losses[1:], shorter, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses[1, :20], changed[1, :20], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(losses[1, 20:], changed[1, 20:])


def test_the_learning_rate_is_a_cosine_after_a_linear_warm_up():
    args = parsed("--train-iters", "100", "--lr", "1.0", "--min-lr", "0.2")
    assert [learning_rate(args, n) for n in (0, 50, 100)] == pytest.approx([1.0, 0.6, 0.2])
    args = parsed("--train-iters", "100", "--lr", "1.0", "--lr-warmup-iters", "20")
    assert [learning_rate(args, n) for n in (0, 5, 20, 60, 100)] == pytest.approx([0.0, 0.25, 1.0, 0.5, 0.0])


@pytest.mark.slow
@pytest.mark.parametrize("fusion", [["--no-bias-gelu-fusion"], []], ids=["exact GELU", "tanh GELU"])
def test_megatron_has_the_same_loss_and_gradients(
    ask_megatron: Callable[..., Path], native_data: Path, tmp_path: Path, fusion: list[str]
):
    """Random weights, biases and LayerNorms included, and a padded batch, given to both engines."""
    generator = torch.Generator().manual_seed(5)
    flags = [flag for flag in command_line("alone", native_data, tmp_path) if flag != "--no-bias-gelu-fusion"] + fusion
    args = parsed(*fusion)
    args.no_bias_gelu_fusion = bool(fusion)  # the tests' own command line has the flag
    args.padded_vocab_size, args.pad_token = 4224, 0
    model = T5(args, Layout()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("layernorm.weight") else 0.0, 0.1, generator=generator)
    encoder, decoder, labels = given = batch(generator)
    torch.save({"weights": dict(model.state_dict()), "batch": given}, tmp_path / "given.pt")
    answer = torch.load(ask_megatron("gradients", str(tmp_path / "given.pt"), *flags))

    losses = model(encoder, encoder, decoder, labels)
    (losses.sum() / (labels >= 0).sum()).backward()
    torch.testing.assert_close(losses, answer.pop("losses"), rtol=1e-5, atol=1e-5)
    assert answer.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, answer[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
