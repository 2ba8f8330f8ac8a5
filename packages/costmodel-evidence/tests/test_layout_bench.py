"""Planners beside each other: what is scored, and what the page says."""

import json
from pathlib import Path

import pytest

from t5bench import Problem
from t5bench import __main__ as program
from t5bench_evidence.layout_bench import PEERS, bench, cases, page, stored
from t5bench_evidence.layout_bench.cases import Case
from t5bench_evidence.layout_bench.peers import sailor
from t5bench_evidence.layout_bench.planners import OWN, Answer
from t5bench_evidence.layout_bench.scores import score

TITLES = cases.B200.read_text().splitlines()[3]
LAYOUTS = cases.read_layouts(cases.B200)
REPORT = """
def report_theoretical_memory(args, num_microbatches, verbose=False):
    print("a report")
    return 1024.0, args.tensor_model_parallel_size, 2048.0 * args.tensor_model_parallel_size
"""
SIMULATOR = """
class MetisSimulator:
    def __init__(self, profile, machine, training):
        assert training["global_batch_size"] == 64 and profile.endswith("profiles/GPT-Neo-2.7")
        self.nodes = machine["GH-96"]["num_nodes"]

    def get_time(self, tensor, data, stages, micro_batch, groups, layers):
        print("much")
        return 100 * tensor + 10 * data + stages + micro_batch / 4 + self.nodes
"""


def case(name: str, seconds: float = 0.0, choice: str = "one", **measured: float | bool) -> Case:
    return Case(name, LAYOUTS[0].job, LAYOUTS[0].machine, choice=choice, seconds=seconds, **measured)


def test_a_user_who_runs_out_of_memory_goes_down_the_list():
    layouts = [case("a", 2.0, ran=True), case("b", 1.0, ran=True), case("c", ran=False)]
    fastest_first = {"a": Answer(3.0, fits=True), "b": Answer(4.0, fits=False), "c": Answer(1.0, fits=True)}
    found = score(layouts, fastest_first)
    assert found.choices and found.verdicts
    assert (found.choices.named_ran, found.choices.regret) == (0.0, 1.0)
    assert (found.verdicts.right, found.verdicts.refused, found.verdicts.ran_out) == (1, 1, 1)


def test_equal_layouts_are_taken_by_lot():
    layouts = [case("a", 3.0), case("b", 1.0)]
    found = score(layouts, {"a": Answer(rank=0.0), "b": Answer(rank=0.0)})
    assert found.choices and found.choices.regret == 1.0 and found.time is None


def test_only_what_can_be_expressed_is_scored():
    layouts = [case("a", 3.0), case("b", 1.0), case("c", 1.0, "two"), case("d", 2.0, "two")]
    answers: dict[str, Answer | str] = {"a": "a reason", "b": Answer(2.0), "c": Answer(1.0), "d": Answer(3.0)}
    found = score(layouts, answers)
    assert found.reasons == {"a reason": 1} and found.covered == 3
    assert found.time and found.time.count == 3 and found.time.worst == 1.0
    assert found.choices and (found.choices.count, found.choices.regret) == (1, 0.0)


def test_one_factor_is_for_a_whole_choice():
    layouts = [case("a", 1.0), case("b", 2.0), case("c", 5.0, "two")]
    found = score(layouts, {"a": Answer(3.0), "b": Answer(6.0), "c": Answer(1.0)})
    assert found.after_factor and found.after_factor.count == 2
    assert found.after_factor.worst == pytest.approx(0.0)


def test_the_checkout_that_is_named_is_asked(tmp_path: Path):
    module = tmp_path / "megatron" / "training" / "theoretical_memory_usage.py"
    module.parent.mkdir(parents=True)
    module.write_text(REPORT)
    found = stored.asked("megatron-lm", tmp_path, [cases.CaseSet("b200", "", LAYOUTS)])
    assert len(found.answers) == len(LAYOUTS) and found.version == "unknown"
    for layout in LAYOUTS:
        answer = found.answers["b200", layout.name]
        assert isinstance(answer, Answer)
        assert answer.peak == 2048.0 * 2**20 * layout.job.parallel.tensor
    stored.store("megatron-lm", found, tmp_path)
    kept = stored.stored("megatron-lm", tmp_path)
    assert kept.version == "unknown" and kept.answers.keys() == found.answers.keys()
    for key, answer in kept.answers.items():
        asked = found.answers[key]
        assert isinstance(answer, Answer) and isinstance(asked, Answer)
        assert answer.peak == pytest.approx(asked.peak, rel=1e-5) and answer.fits == asked.fits


def test_a_simulator_in_sailors_checkout_is_asked(tmp_path: Path):
    """Metis's, as it lies in such a checkout."""
    layout = cases.sailor_gh200().cases[0]
    planner = tmp_path / "sailor" / "Planner"
    plan = {"gbs": 64, "mbs": 2, "pipeline_list": [{"num_stages": 2, "dp": [4, 4], "layers_per_stage": [[0], [1]]}]}
    plan["pipeline_list"][0]["tmp_per_stage"] = [[[[["GH-96", 4, "a"]], 4]]]
    contents = {
        planner / sailor.PLANS / f"{layout.name.removeprefix(cases.SAILOR)}.json": json.dumps(plan),
        planner / "simulations" / "configs" / sailor.MODELS["GPT-Neo-2.7"]: "{}",
        planner / "simulations" / "configs" / "basic_cluster_config.json": '{"GH-96": {"a": 1}, "zone": "z"}',
        planner / "baselines" / "Metis" / "metis_simulator.py": SIMULATOR,
    }
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    found = stored.asked("metis", tmp_path, [cases.CaseSet("one", "", [layout, LAYOUTS[0]])])
    assert set(found.answers) == {("one", layout.name)}
    answer = found.answers["one", layout.name]
    assert isinstance(answer, Answer) and answer.seconds == 4 * 100 + 4 * 10 + 2 + 0.5 + 8


@pytest.mark.parametrize("words", [["--peer", "nobody=."], ["--peer", "calculon"], ["--peer", "calculon=missing"]])
def test_a_planner_that_is_not_there(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert program.main(["layout-bench", *words]) == 2
    assert "Give" in capsys.readouterr().err


def test_a_table_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = cases.B200.read_text().splitlines()
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(lines[3:]) + "\n")
    assert program.main(["layout-bench", str(table), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert {entry["set"] for entry in entries} == {"mine"}
    assert {entry["planner"] for entry in entries} == {planner.name for planner in OWN}
    assert all(entry["score"]["cases"] == len(LAYOUTS) for entry in entries)


@pytest.mark.parametrize("text", ["", "job\nx\n", f"{TITLES}\n{',' * TITLES.count(',')}\n"])
def test_no_table_of_layouts(text: str, tmp_path: Path):
    table = tmp_path / "layouts.csv"
    table.write_text(text)
    with pytest.raises(Problem, match="no table of layouts"):
        cases.read_layouts(table)


@pytest.mark.slow  # predicts some 1,300 trainings
def test_the_page_has_what_the_command_says():
    sets = cases.all_sets()
    known = {peer: stored.stored(peer) for peer in PEERS}
    versions = {stored.module_of(peer).NAME: each.version for peer, each in known.items()}
    text = bench.PAGE.read_text()
    assert page.generated(sets, bench.entries_of(sets, known), versions) in text
    planners = {planner.name for planner in OWN} | set(versions)
    assert len(sets) >= 5 and len(planners) >= 6
    for each in sets:
        assert len({one.name for one in each.cases}) == len(each.cases), f"{each.name} has a name twice"
