"""The planner's page: its translated formulas give what Python gives, in a browser, or else in Node.js."""

import html
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import random_jobs

from t5bench import __main__ as program
from t5bench.choose import space
from t5bench.costmodel.prediction import Prediction
from t5bench.costmodel.presets import PRESETS
from t5bench.costmodel.whole_training import WholeTraining
from t5bench_planner_page import page
from t5bench_planner_page.javascript import RUNTIME, Program, Untranslatable, translate

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
TOLERANCE = 1e-3
REPO_ROOT = Path(__file__).resolve().parents[3]

needs_engine = pytest.mark.skipif(not (BROWSER or NODE), reason="neither Chromium nor Node.js is here to run the page")
needs_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium is here to open the page (apt install chromium)")


def opened(path: Path, tmp_path: Path, address: str = "") -> str:
    """The document that a browser makes of a file."""
    command = [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"{path.as_uri()}{address}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def answers(script: str, tmp_path: Path) -> object:
    """The value of the script's variable `answers`."""
    if BROWSER:
        path = tmp_path / "answers.html"
        end = "const shown = document.body.appendChild(document.createElement('pre'));"
        end += "shown.textContent = JSON.stringify(answers);"
        safe = script.replace("</", "<\\/")
        path.write_text(f"<!doctype html><meta charset=utf-8><body><script>\n{safe}\n{end}</script>")
        found = re.search(r"<pre>(.*)</pre>", opened(path, tmp_path), re.DOTALL)
        assert found, "the script failed"
        return json.loads(html.unescape(found[1]))
    path = tmp_path / "answers.js"
    path.write_text(f"{script}\nconsole.log(JSON.stringify(answers));")
    return json.loads(subprocess.run([NODE, path], capture_output=True, text=True, timeout=300, check=True).stdout)


def translated_prediction(predictions: list[Prediction]) -> str:
    """A script that answers random_jobs.figures of each prediction."""
    made = Program(set(page.MEMBERS) | {"allocated", "moment", "cpu", "hidden", "tflops"})
    for cls in (Prediction, *page.RECORDS):
        made.name_of(cls)
    values = ",\n".join(made.value(each, "") for each in predictions)
    return f"{RUNTIME.read_text()}{made.text()}{random_jobs.FIGURES}const answers = [\n{values}].map(figures);"


def check_equality(count: int, tmp_path: Path) -> None:
    predictions = [random_jobs.prediction(number) for number in range(count)]
    found = answers(translated_prediction(predictions), tmp_path)
    assert len(found) == count
    for number, (expected, answer) in enumerate(zip(map(random_jobs.figures, predictions), found, strict=True)):
        assert [name for name, _ in expected] == [name for name, _ in answer], number
        for (name, value), (_, translated) in zip(expected, answer, strict=True):
            is_number = isinstance(value, int | float)
            is_equal = math.isclose(value, translated, rel_tol=TOLERANCE) if is_number else value == translated
            assert is_equal, (number, name, value, translated)


@needs_engine
def test_the_translation_gives_what_python_gives(tmp_path: Path):
    check_equality(300, tmp_path)


@needs_engine
def test_the_translation_has_the_layouts_that_python_has(tmp_path: Path):
    """Those of both engines, whose pipelines divide differently."""
    models = [replace(PRESETS["t5-v1.1-large"], decoder_layers=12), PRESETS["gpt-1.5b"]]
    questions = [(model, 24, 8, None, engine) for model in models for engine in ("megatron", "native")]
    made = Program({"fields"})
    name = made.name_of(space.layouts)
    words = [f"[{', '.join(made.value(word, '') for word in question)}]" for question in questions]
    sizes = "(layout) => [layout.tensor, layout.pipeline, layout.data, layout.split_rank]"
    script = f"{RUNTIME.read_text()}{made.text()}const answers = [{', '.join(words)}]"
    script += f".map((words) => [...{name}(...words)].map({sizes}));"
    expected = [
        [[one.tensor, one.pipeline, one.data, one.split_rank] for one in space.layouts(*question)]
        for question in questions
    ]
    assert answers(script, tmp_path) == expected
    assert [1, 3, 8, 2] in expected[1] and [1, 3, 8, None] in expected[3]


@needs_engine
def test_the_translation_has_the_hours_and_the_price_of_a_training(tmp_path: Path):
    job = random_jobs.prediction(3).job
    made = Program({"figures"})
    words = (made.value(job, ""), made.name_of(WholeTraining))
    script = f"{RUNTIME.read_text()}{made.text()}const job = {words[0]};\n"
    script += f"const answers = [2.5, null].map((price) => py.method('items', new {words[1]}(2e10, price)"
    script += ".figures(job, 0.5)));"
    expected = [[[*pair] for pair in WholeTraining(2e10, price).figures(job, 0.5).items()] for price in (2.5, None)]
    found = answers(script, tmp_path)
    assert [[name for name, _ in each] for each in found] == [[name for name, _ in each] for each in expected]
    for own, theirs in zip(found, expected, strict=True):
        assert [value for _, value in own] == pytest.approx([value for _, value in theirs])
    assert len(expected[0]) == 3 and len(expected[1]) == 2


@needs_engine
@pytest.mark.nightly
def test_the_translation_gives_what_python_gives_for_ten_thousand_jobs(tmp_path: Path):
    check_equality(10_000, tmp_path)


@pytest.fixture
def made_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    for name in ("MODEL_PRESET", "HOSTS", "NNODES", "NPROC_PER_NODE", "SLURM_JOB_NODELIST", "DEVICE", "ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEGATRON_DATA_DIR", str(tmp_path))
    path = tmp_path / "layouts.html"
    assert program.main(["layouts", "--page", str(path)]) == 0
    assert "open it in a browser" in capsys.readouterr().out
    return path


def test_the_page_is_one_small_file_that_asks_for_nothing(made_page: Path):
    text = made_page.read_text()
    assert len(text.encode()) <= 300_000
    assert not re.search(r"<(?:link|img|iframe)\b|\bsrc=|\bfetch\(|XMLHttpRequest|import\(|@import|url\(", text)
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) == {"http://www.w3.org/2000/svg"}


def test_numbers_of_gpus_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for words in (["--gpus", "abc"], ["--gpus", "8,0", "--page", str(tmp_path / "page.html")], []):
        assert program.main(["layouts", *words]) == 2
        assert "--gpus must be numbers of GPUs, found '" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


@needs_browser
@pytest.mark.parametrize(
    ("model", "device", "gpus", "batch"),
    [
        ("large", "a100", 16, 512),
        pytest.param("gpt-13b", "h100", 64, 1024, marks=pytest.mark.nightly),
        ("t5-v1.1-xxl", "a100", 8, 64),
    ],
)
def test_the_page_shows_what_the_command_prints(
    made_page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, device: str, gpus: int, batch: int
):
    words = ["--gpus", gpus, "--device", device, "--link", 400, "--model", model, "--global-batch", batch, "--top", 8]
    assert program.main(["layouts", *map(str, words)]) == 0
    printed = capsys.readouterr().out
    address = f"#model={model}&device={device}&gpus={gpus}&perNode=8&link=400&batch={batch}"
    document = re.sub(r"<(script|style)>.*?</\1>", " ", opened(made_page, tmp_path, address), flags=re.DOTALL)
    plain = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", document)).split())
    assert re.search(rf"{gpus} x {re.escape(device)}: \d+ of \d+ layouts fit", plain)
    reasons = re.findall(r"^  (\S.*?)  +((?:[\d.]+x the time|does not fit).*)$", printed, re.MULTILINE)
    assert reasons
    for kind, reason in reasons:
        assert f"{kind} : {reason}" in plain
    table = printed.split("\n\n")[1].splitlines()[2:]
    for row in table:
        title, seconds = re.split(r"  +", row)[:2]
        assert title in plain
        assert re.search(rf"{re.escape(title)} {seconds}\d* ", plain), (title, seconds)
    started = re.search(r"\n((?:Of the \d+ that are too|The fastest:|The first in the).*):\n  (.*)\n", printed)
    assert (started is None) == (model == "t5-v1.1-xxl"), "no launcher has its gated activation"
    if started:
        sentence, line = started.groups()
        assert sentence in plain and line in plain


@needs_browser
def test_every_control_has_a_label_and_the_first_row_is_chosen(made_page: Path, tmp_path: Path):
    document = opened(made_page, tmp_path)
    controls = set(re.findall(r'<(?:select|input)[^>]* id="(\w+)"', document))
    assert controls >= {"model", "device", "gpus", "perNode", "link", "batch", "layout0"}
    assert controls <= set(re.findall(r'<label for="(\w+)"', document))
    chosen = html.unescape(re.search(r'<p id="chosen">([^<]*)', document)[1])
    line = html.unescape(re.search(r'<pre id="line">([^<]*)', document)[1])
    assert re.match(r"(\w+=\S+ )+bash scripts/run_megatron_t5_\w+\.sh", line) and "TP/PP/DP" in chosen
    assert document.count("<rect") > 30  # memory and schedule


@needs_browser
def test_a_bad_choice_is_named_on_the_page(made_page: Path, tmp_path: Path):
    document = opened(made_page, tmp_path, "#model=gpt-175b&device=t4&gpus=1&perNode=8&link=10&batch=1")
    problem = re.search(r'<p id="problem"[^>]*>([^<]*)', document)[1]
    assert "the model does not fit on 1 x t4: even DDP 1/1/1" in problem
    assert "hidden" not in re.search(r'<p id="problem"[^>]*>', document)[0]


# ---- the translator


@dataclass(frozen=True)
class Sum:
    """For the tests of the translator."""

    parts: tuple[int, ...]

    def total(self) -> int:
        return sum(self.parts)


def module_of(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = tmp_path / "made.py"
    path.write_text(text)
    module = ModuleType("t5bench.made")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "t5bench.made", module)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


@pytest.mark.parametrize(
    ("body", "line", "what"),
    [
        ("with open(a):\n        pass", 2, "the statement With"),
        ("try:\n        pass\n    finally:\n        pass", 2, "the statement Try"),
        ("b = 1\n    return a @ b", 3, "the operator MatMult"),
        ("return sorted(a)[unknown]", 2, "the name unknown"),
        ("return eval(a)", 2, "the name eval"),
        ("return a is True", 2, "`is` with anything but None"),
        ("return f'{a:>9}'", 2, "the format >9"),
        ("return f'{a!r}'", 2, "the text f'{a!r}'"),
        ("import os\n    return os", 2, "the statement Import"),
        ("return a(**{})", 2, "a call with **"),
        ("return (b := a)", 2, "the expression (b := a)"),
        ("return a.upper()", 2, "no translated class has the attribute upper"),
        ("del a", 2, "the statement Delete"),
        ("return lambda *b: b", 2, "a starred argument"),
    ],
)
def test_unknown_python_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, line: int, what: str
):
    module = module_of(f"def f(a):\n    {body}\n", tmp_path, monkeypatch)
    with pytest.raises(Untranslatable) as refused:
        translate([module.f])
    assert what in str(refused.value) and f"made.py:{line}: " in str(refused.value)


LANGUAGE = """
from collections import Counter
from math import ceil

TABLE = {"a": (1, 2.5), "b": (3, 4)}

def f():
    first, *rest = [1, 2, 3]
    found = [first, rest, -7 // 2, -7 % 3, 7 / 2, divmod(-7, 2), round(2.5), round(3.5), 2**10]
    found += [[0] * 3 + [1], [1, 2, 3][-1], [1, 2, 3][1:], [1, 2, 3][::-1], (0 < first < 2), 5 in range(0, 10, 5)]
    ends = {}
    ends[1, (2, "x")] = 3
    found.append(ends[1, (2, "x")])
    found.append([0 or None or "", [] or 4, 0 and 3, not [], None is None])
    found.append(sorted((1 - x, x) for x in (2, 1, 2)))
    found.append([name for name, (low, high) in TABLE.items() if high > low])
    found.append(sum(count * len(word) for word, count in Counter(["ab", "c", "ab"]).items()))
    found.append(f"{first}/{1.5:.1f} {0.25:.1%} {1234567.0:g} {0.00001234:.3g}")
    found.append(max(["bb", "a"], key=lambda word: -len(word)))
    found.append([ceil(1.2), min(3, 2), max([], default=9), sum([True, True])])
    def inner(left, right=2):
        return left - right
    found.append([inner(1), inner(right=1, left=5)])
    total = 0
    while True:
        total += 1
        if total % 2:
            continue
        if total > 4:
            break
    found.append(total)
    found.append([*g(3)])
    return found

def g(count):
    for each in range(count):
        yield each
    yield from (10, 11)
"""


@needs_engine
def test_what_is_translated_does_what_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = module_of(LANGUAGE, tmp_path, monkeypatch)
    script = f"{RUNTIME.read_text()}{translate([module.f])}const answers = made$f();"
    assert answers(script, tmp_path) == json.loads(json.dumps(module.f()))


@needs_engine
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return 1 / 0", "ZeroDivisionError"),
        ("return {}[1]", "KeyError"),
        ("return [][0]", "IndexError"),
        ("return 1 + 'a'", "TypeError"),
        ("return {} == {}", "TypeError"),
    ],
)
def test_what_is_wrong_fails_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, error: str):
    module = module_of(f"def f():\n    {body}\n", tmp_path, monkeypatch)
    caught = "let answers; try { answers = made$f(); } catch (error) { answers = error.name; }"
    assert answers(f"{RUNTIME.read_text()}{translate([module.f])}{caught}", tmp_path) == error


def test_records_are_translated_with_what_is_named(tmp_path: Path):
    call: Callable[..., object] = Sum
    assert "total" not in translate([call]) and "total()" in translate([call], ["total"])
