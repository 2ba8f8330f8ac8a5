"""Weights of a checkpoint for another layout, without the engine."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from t5bench import Problem
from t5bench.convert.checkpoint_file import read_checkpoint_file as read
from t5bench.convert.reshape import write
from t5bench.convert.shards import HEAD, WORDS, Cut, Weights, whole_weights

HEADS, WIDTH, LAYERS = 4, 8, 4


def arguments(t5: bool, **changes: object) -> Namespace:
    """As a checkpoint of one process holds them."""
    engine = {
        "encoder_num_layers": LAYERS, "num_layers": LAYERS, "decoder_num_layers": 2 * LAYERS if t5 else None,
        "num_attention_heads": HEADS, "padded_vocab_size": 16, "make_vocab_size_divisible_by": 16,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "deepspeed": False,
        "swiglu": False, "num_key_value_heads": HEADS, "untie_embeddings_and_output_weights": False,
        "ffn_hidden_size": 32, "params_dtype": torch.float32, "ds_pipeline_enabled": False, "zero_stage": 0,
    }  # fmt: skip
    return Namespace(**engine | changes)


def model(t5: bool) -> Weights:
    """Every parameter whole, each number once."""
    shapes = {"embedding.word_embeddings.weight": (16, WIDTH), "embedding.position_embeddings.weight": (6, WIDTH)}
    for kind, count in {"encoder": LAYERS, **({"decoder": 2 * LAYERS} if t5 else {})}.items():
        for number in range(count):
            layer = f"{kind}.layers.{number}"
            shapes |= {f"{layer}.self_attention.query_key_value.{end}": (3 * WIDTH, *more) for end, more in ENDS}
            shapes |= {f"{layer}.inter_attention.key_value.{end}": (2 * WIDTH, *more) for end, more in ENDS}
            shapes |= {f"{layer}.mlp.dense_4h_to_h.weight": (WIDTH, 32), f"{layer}.mlp.dense_4h_to_h.bias": (WIDTH,)}
        shapes[f"{kind}.final_layernorm.weight"] = (WIDTH,)
    weights, begin = {}, 0
    for name, shape in ({f"language_model.{name}": s for name, s in shapes.items()} | {"lm_head.bias": (16,)}).items():
        if t5 or ("inter_" not in name and "lm_head" not in name):
            size = torch.Size(shape).numel()
            weights[name], begin = torch.arange(begin, begin + size).float().view(shape), begin + size
    return weights


ENDS = (("weight", (WIDTH,)), ("bias", ()))
Q_K_V = "language_model.encoder.layers.3.self_attention.query_key_value.bias"


def cut_for(t5: bool, directory: Path, tp: int, pp: int) -> Path:
    whole = model(t5)
    head = {"args": arguments(t5), "iteration": 7, "tokens": 1, "checkpoint_version": 3.0}
    complete = whole | {HEAD: whole["language_model.embedding.word_embeddings.weight"]}
    write(head, complete, directory, Cut.of(head["args"], tp, pp))
    return directory / "iter_0000007"


@pytest.mark.parametrize("t5", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_a_model_that_is_cut_can_be_joined_again(tmp_path: Path, t5: bool, tp: int, pp: int):
    folder, whole = cut_for(t5, tmp_path, tp, pp), model(t5)
    found = whole_weights(folder, read(min(folder.rglob("*.pt")))["args"])
    assert len(list(folder.glob("*/model_optim_rng.pt"))) == tp * pp
    assert found[HEAD].equal(whole[WORDS])
    assert {*found} - {HEAD} == whole.keys() and all(found[name].equal(whole[name]) for name in whole)


def test_every_stage_has_its_parts_and_every_rank_its_heads(tmp_path: Path):
    folder = cut_for(True, tmp_path, 2, 4)
    parts = [read(folder / f"mp_rank_01_{stage:03d}" / "model_optim_rng.pt")["model"] for stage in range(4)]
    held = [sorted({*part, *part["language_model"]} - {"language_model"}) for part in parts]
    assert held == [
        ["embedding", "encoder"], ["encoder"], ["decoder", "embedding"],
        ["decoder", "lm_head", "word_embeddings_for_head"],
    ]  # fmt: skip
    # Its second layer is the model's fourth. The second half of the heads of query, key and value, each by itself.
    own = parts[1]["language_model"]["encoder"][Q_K_V.replace("language_model.encoder.layers.3", "layers.1")]
    assert own.tolist() == [number for block in model(True)[Q_K_V].chunk(3) for number in block.tolist()[4:]]
    assert not [name for name in parts[0]["language_model"]["encoder"] if "final" in name]


def test_shards_of_zero3_and_of_the_pipeline_module_are_read(tmp_path: Path):
    whole = model(False)
    shapes = [{name: value.shape for name, value in whole.items()}]
    for rank in range(3):  # no size is a multiple of 3
        parts = [torch.nn.functional.pad(v.flatten(), (0, -v.numel() % 3)).chunk(3)[rank] for v in whole.values()]
        state = {"partition_count": 3, "fp32_flat_groups": [torch.cat(parts)]}
        torch.save({"optimizer_state_dict": state}, tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    torch.save({"param_shapes": shapes}, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    prefixes = ["embedding.", *(f"encoder.layers.{number}." for number in range(LAYERS)), "encoder.final_layernorm."]
    for number, prefix in enumerate((f"language_model.{prefix}" for prefix in prefixes), start=1):
        layer = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
        torch.save(layer, tmp_path / f"layer_{number:02d}-model_00-model_states.pt")
    for changes in ({"zero_stage": 3}, {"zero_stage": 1, "ds_pipeline_enabled": True}):
        found = whole_weights(tmp_path, arguments(False, deepspeed=True, **changes))
        assert {*found} - {HEAD} == {*whole} and all(found[name].equal(whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("tp", "pp", "changes"),
    [(3, 1, {}), (1, 5, {}), (1, 3, {}), (0, 1, {}), (4, 1, {"ffn_hidden_size": 30}), (1, 1, {"swiglu": True})],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(tp: int, pp: int, changes: dict[str, int]):
    with pytest.raises(Problem, match=f"cannot be cut for TP {tp} and PP {pp}"):
        Cut.of(arguments(True, **changes), tp, pp)
