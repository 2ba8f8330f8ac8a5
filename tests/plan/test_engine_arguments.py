"""Engine arguments after -- that the engine would refuse half a minute later."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import Project

from t5bench.plan.engine_arguments import parser_of

ARGUMENTS = """
def _add_some(parser):
    group = parser.add_argument_group(title='some')
    group.add_argument('--num-workers', type=int, default=2, help='workers')
    group.add_argument('--mask-prob', type=float, default=0.15)
    group.add_argument('--lr-decay-style', choices=['constant', 'linear'])
    group.add_argument('--empty-unused-memory-level', default=0, type=int, choices=range(0, 3))
    group.add_argument('--adlr-autoresume', action='store_true')
    group.add_argument('--weights', nargs='*', type=_path, default=os.getcwd())
    group.add_argument('--finetune', action='store_true')
    return parser
"""


@pytest.fixture
def refused(making: Callable, planned_project: Project) -> Iterator[Callable[..., str]]:
    """refused(words...): what is said of arguments after --, with an engine that knows the above."""
    file = planned_project.engine / "megatron" / "arguments.py"
    file.write_text(ARGUMENTS)
    planned_project.record_engine()

    def of(*words: str) -> str:
        made = making("ddp", *words)
        return made.said if "engine-argument" in made.codes else ""

    yield of
    file.unlink()
    planned_project.record_engine()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--finetune", "model"], "unrecognized arguments: model"),
        (["-x"], "unrecognized arguments: -x"),
        (["--num-workers", "two"], "argument --num-workers: invalid int value: 'two'"),
        (["--num-workers"], "argument --num-workers: expected one argument"),
        (["--mask-prob=a"], "argument --mask-prob: invalid float value: 'a'"),
        (["--lr-decay-style", "cosine"], "argument --lr-decay-style: invalid choice: 'cosine'"),
        (["--adlr-autoresume=1"], "argument --adlr-autoresume: ignored explicit argument '1'"),
    ],
)
def test_what_the_engine_does_not_take_is_refused_before_it_starts(refused, words: list[str], said: str):
    assert f"after --: {said}" in refused(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["--num-workers", "0", "--mask-prob", "0.3"],
        ["--lr-decay-style=linear", "--finetune"],
        ["--empty-unused-memory-level", "2"],
        ["--weights", "a", "b"],
    ],
    ids=" ".join,
)
def test_what_the_engine_takes_passes(refused, words: list[str]):
    assert not refused(*words)


def test_the_arguments_of_the_engine_itself_can_be_read(megatron_dir: Path):
    parser = parser_of((megatron_dir / "megatron" / "arguments.py").read_text())
    known = {word for action in parser._actions for word in action.option_strings}
    assert {"--num-workers", "--layout-independent-init", "--encoder-num-layers", "--exit-interval"} <= known
    assert parser.parse_args(["--num-workers", "3"]).num_workers == 3
