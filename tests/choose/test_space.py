"""Which layouts are proposed."""

from dataclasses import replace

from t5bench.choose.space import layouts
from t5bench.costmodel.job import Architecture

GROUPED = Architecture(0, 4, 256, 8, 32, 768, 0, 128, 1000, family="gpt", kv_heads=2, kind="llama")


def tensor_sizes(model: Architecture, engine: str) -> set[int]:
    return {parallel.tensor for parallel in layouts(model, 8, 8, None, engine)}


def test_ranks_may_be_more_than_groups_of_heads_where_the_engine_shares_keys():
    assert tensor_sizes(GROUPED, "native") == {1, 2, 4, 8}
    assert tensor_sizes(replace(GROUPED, kv_heads=1), "native") == {1, 2, 4, 8}
    assert tensor_sizes(GROUPED, "megatron") == {1, 2}


def test_ranks_do_not_share_what_has_no_equal_parts():
    assert tensor_sizes(replace(GROUPED, heads=12, kv_heads=3), "native") == {1}
    assert tensor_sizes(replace(GROUPED, heads=4), "native") == {1, 2, 4}
    assert tensor_sizes(replace(GROUPED, ffn=770), "native") == {1, 2}
