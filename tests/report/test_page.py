"""The page in a real browser: with and without JavaScript, light and dark, narrow and wide, with keys and for axe."""

import gzip
import html
import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from made_runs import LARGE, RTX_5000_ADA, make_run, seal, with_values
from real_runs import environment
from support import REPO_ROOT, STRATEGIES

from t5bench.__main__ import main
from t5bench.compare.comparison import build
from t5bench.compare.repeats import Repeat
from t5bench.compare.statistics import Estimate
from t5bench.plan.planner import plan
from t5bench.record.files import write_json
from t5bench.record.plan import Plan
from t5bench.record.records import load
from t5bench.report import picture
from t5bench.report.figures import COLOUR_OF, all_figures, rows_of, thin
from t5bench.report.page import MOST_BYTES, command, render, why_slower

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium to open the page with")
DARK = "--blink-settings=preferredColorScheme=0"
RANK = {"host": "node0", "wall_ms": 400.0, "waited_for": {}, "links": {}, "operators": 1000}
RANK |= {"processor": {"queued_ms": 0.0, "throttled_ms": 0.0}}
ODD = {"parts": {"forward": 100.0, "backward": 300.0}, "timeline": [("forward", 100.0), ("backward", 400.0)]}
EVEN = {"parts": {"forward": 100.0, "backward": 200.0, "data loading": 100.0},
        "timeline": [("forward", 100.0), ("backward", 300.0), ("data loading", 400.0)]}  # fmt: skip
PARTS = {
    "zero1": [RANK | {"rank": rank} | (ODD if rank % 2 else EVEN) for rank in range(4)],
    "zero2": [RANK | {"rank": rank, "parts": {"backward": 300.0, "logging": 1.0}} for rank in range(4)],
}
NO_PARTS = "", "[]", "{}", '{"ranks": 7}', '{"ranks": [{}]}', '{"ranks": [{"parts": {"forward": NaN}}]}'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight strategies on two nodes with a GPU each, one failed, two profiled."""
    place, times = tmp_path_factory.mktemp("runs"), [500.0 + (i * 7919 % 13) for i in range(60)]
    settings = LARGE | {"LR": "0.0002", "WANDB_PROJECT": "physics"}
    for number, name in enumerate(STRATEGIES):
        ended = (
            {"status": "crashed", "reason": "node1 was lost" + 200 * "!", "remedy": "Look at it"}
            if name == "zero3"
            else {}
        )
        on = {"gpu": RTX_5000_ADA, "nodes": 2, "world_size": 4, "padded_vocab_size": 32128, "sent_per_iteration": 3e9}
        on["memory_mib"] = [400.0 + rank - 20 * number for rank in range(4)]
        own = [time + 10 * number - 40 * (name == "zero1") for time in times]
        make_run(place / name, name, elapsed_ms=own, settings=settings, **on, **ended)
    for name, ranks in PARTS.items():
        write_json(place / name / "profile.json", {"overhead": 0.1, "ranks": ranks})
    for name, text in zip((name for name in STRATEGIES if name not in PARTS), NO_PARTS, strict=True):
        (place / name / "profile.json").write_text(text)
    for name in STRATEGIES:
        seal(place / name)
    return place


@pytest.fixture(scope="module")
def page(place: Path) -> str:
    assert main(["compare", str(place)]) == 1
    return (place / "comparison" / "index.html").read_text()


def browse(page: str, tmp_path: Path, script: str, *options: str) -> Any:
    """What a script returns that runs once the page is complete."""
    script = f"document.title = JSON.stringify(await (async () => {{{script}}})())"
    ready = f"<script>onload = () => setTimeout(async () => {{{script}}}, 500)</script></body>"
    (tmp_path / "page.html").write_text(page.replace("</body>", ready))
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=20000"]
    words += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", *options]
    words += ["--window-size=800,30000", (tmp_path / "page.html").as_uri()]  # so tall that all figures are drawn
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", shown, re.DOTALL)[1]))


@needs_browser
def test_choosing_sorting_finding_and_copying(page: str, tmp_path: Path):
    found = browse(
        page, tmp_path,
        """const bodies = () => [...document.querySelectorAll("tbody[data-row]")]
        const shown = () => bodies().filter(body => !body.hidden).map(body => body.dataset.row)
        const shows = (node) => getComputedStyle(node).display != "none"
        const seen = (node) => shows(node) && node.dataset.row
        const marks = (name) => [...new Set([...document.querySelectorAll(`${name} [data-row]`)].map(seen))]
        const drawn = () => document.querySelectorAll(".drawn")
        const wait = () => new Promise(resolve => setTimeout(resolve, 200)), said = document.getElementById("said")
        const box = document.querySelector("[value=zero1]"), search = document.querySelector("[type=search]")
        box.click(); await wait()
        const pareto = drawn()[1].textContent, all = [...drawn()[1].querySelectorAll("[data-row='']")]
        const chosen = [shown(), marks(".bars"), marks(".figures"), all.some(shows)]
        box.click(); await wait()
        const rate = [...document.querySelectorAll(".rows button")].find(b => b.textContent == "peak GPU MiB")
        const orders = [0, 1].map(() => (rate.click(), [shown(), rate.closest("th").ariaSort]))
        search.value = "node1 was lost"; search.dispatchEvent(new Event("input", {bubbles: true}))
        const searched = shown(), read = []
        search.value = ""; search.dispatchEvent(new Event("input", {bubbles: true}))
        for (const figure of [document.querySelector(".of-bar"), drawn()[0]])
            for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft"]) {
                figure.focus(); figure.dispatchEvent(new KeyboardEvent("keydown", {key})); read.push(said.textContent) }
        document.activeElement.blur()
        document.querySelector(".more details").open = true
        let written // the browser's own clipboard takes real time, of which the page's time knows nothing
        navigator.clipboard.writeText = async text => { written = text }
        document.querySelector(".more button").click(); await wait()
        const focusable = [...drawn()].every(figure => figure.tabIndex == 0)
        const copied = String(getSelection())
        return {chosen, orders, searched, read, written, copied, said: said.textContent, pareto, focusable}""",
    )  # fmt: skip
    complete = [name for name in STRATEGIES if name != "zero3"]
    rows, bars, marks, about_all = found["chosen"]
    assert "zero1" not in rows + bars + marks and set(complete) - {"zero1"} == set(bars) - {False}
    assert "Pareto front" in found["pareto"] and not about_all, "the front is one of all rows"
    (ascending, up), (descending, down) = found["orders"]
    assert (up, down) == ("ascending", "descending") and set(ascending) == set(descending) == set(STRATEGIES)
    assert found["searched"] == ["zero3"]
    first, second, again, rate, interval, rate_again = found["read"]
    assert first == again and first.startswith("zero1\u2020, computing: ") and second.startswith("zero1\u2020, rest: ")
    assert re.fullmatch(r"ddp: [\d.]+", rate) and re.fullmatch(r"ddp: 3[\d.]+ to 3[\d.]+", interval)
    assert rate == rate_again and found["focusable"]
    assert found["said"] == "Command copied." and found["written"] == found["copied"]
    assert "LR=0.0002" in found["copied"] and found["copied"].endswith(" bash scripts/run_megatron_t5_ddp.sh node0 0")
    assert "physics" not in found["copied"], "which W&B project it was in is not the run"


@pytest.mark.slow
@pytest.mark.nightly
def test_two_hundred_profiled_runs(tmp_path: Path):
    """The page stays small, and says what it leaves out."""
    kinds = itertools.product(
        ("megatron", "native"), ("none", "selective", "full"), ("auto", "on", "off"), ("default", "fp32")
    )
    moments = [(part, float(end)) for end, part in enumerate(list(COLOUR_OF) * 26, 1)]
    for number, (engine, *values) in enumerate(itertools.islice(kinds, 25)):
        settings = dict(zip(("RECOMPUTE", "FLASH_ATTENTION", "GRADIENT_REDUCTION"), values, strict=True))
        for strategy in STRATEGIES:
            place, times = tmp_path / "runs" / str(number) / strategy, [100.0 + i * 7919 % 13 for i in range(300)]
            make_run(place, strategy, elapsed_ms=times, settings=settings, engine=engine, world_size=4)
            ranks = [RANK | {"rank": rank, "parts": {"forward": 400 / 3}, "timeline": moments} for rank in range(4)]
            write_json(place / "profile.json", {"overhead": 0.1, "ranks": ranks})
            seal(place)
    assert main(["compare", str(tmp_path / "runs"), "--allow", "engine"]) == 0
    page = (tmp_path / "runs" / "comparison" / "index.html").read_text()
    assert len(page.encode()) < MOST_BYTES and page.count("<tbody data-row=") == 200
    assert "The table has all 200 rows. To keep this page small, " in page


@needs_browser
@pytest.mark.parametrize("options", [(), (DARK,)], ids=["light", "dark"])
def test_axe_finds_no_accessibility_problem(page: str, tmp_path: Path, options: tuple[str, ...]):
    axe = gzip.decompress((Path(__file__).parent / "axe-4.10.3.min.js.gz").read_bytes()).decode()
    found = browse(
        page.replace("</body>", f"<script>{axe}</script></body>"), tmp_path,
        """document.querySelectorAll("details").forEach(node => node.open = true)
        const found = await axe.run(), dark = matchMedia("(prefers-color-scheme: dark)").matches
        return [dark, found.passes.length, found.violations.map(v => [v.id, v.nodes.map(n => n.html.slice(0, 99))])]""",
        *options,
    )  # fmt: skip
    assert found[0] == bool(options) and found[1] > 20 and found[2] == []


@needs_browser
def test_the_page_is_complete_without_javascript_and_scrolls_only_vertically(page: str, tmp_path: Path):
    """From a telephone to a large screen: with all details open neither the page nor a part of it is wider."""
    widths, text = (390, 768, 1280, 2560), html.escape(page)
    frames = [f'<iframe width={width} height=900 srcdoc="{text}"></iframe>' for width in widths]
    frames.append(f'<iframe sandbox="allow-same-origin" srcdoc="{text}"></iframe>')
    *found, (empty, drawings, said) = browse(
        f"<!doctype html><title>?</title><body>{''.join(frames)}</body>", tmp_path,
        """const shown = [...document.querySelectorAll("iframe")].map(frame => {
            const page = frame.contentDocument, style = node => frame.contentWindow.getComputedStyle(node)
            page.querySelectorAll("details").forEach(node => node.open = true)
            const scrolls = [...page.querySelectorAll("*")].filter(
                node => style(node).overflowX != "visible" && node.scrollWidth > node.clientWidth)
            const parts = page.documentElement.scrollWidth, drawn = page.querySelectorAll(".drawn svg").length
            return [parts, scrolls.length, drawn > 7, style(page.querySelector("td")).display] })
        const page = [...document.querySelectorAll("iframe")].at(-1).contentDocument
        const height = name => [...page.querySelectorAll(name)].map(node => node.getBoundingClientRect().height)
        const empty = height("#choices, button").every(h => h == 0)
        return [...shown.slice(0, -1), [empty, height(".drawn svg, .of-bar svg"), page.body.innerText]]""",
    )  # fmt: skip
    for width, (wide, scrolls, drawn, display) in zip(widths, found, strict=True):
        assert wide <= width and not scrolls and drawn
        assert display == ("block" if width < 1180 else "table-cell"), "where there is no room rows are cards"
    assert empty and len(drawings) == 9 + 7 and min(drawings) > 40, "and a bar for each complete run"
    for words in ("!!. Look at it", "scripts/run_megatron_t5_ddp.sh node0 0", "Where the time went"):
        assert words in said


def test_figures_show_what_is_known(place: Path, page: str):
    """Predicted costs are drawn in parts next to the measured ones, and a profile in parts if it has any."""
    comparison = build([load(place / name) for name in STRATEGIES])
    figures = msgspec.to_builtins(all_figures(comparison, rows_of(comparison), 8))
    series = {figure["title"]: [s for panel in figure["panels"] for s in panel["series"]] for figure in figures}
    of_ddp = [s for s in series["Memory"] if s["row"] == "ddp"]
    parts = {s["label"]: s["points"][0][0] for s in of_ddp if s["look"] == "bar"}
    assert parts["weights"][0] == 0 and parts["gradients"][0] == parts["weights"][1]
    others = {
        s["look"]: [tuple(x) if isinstance(x, list) else x for x, _ in s["points"]]
        for s in of_ddp
        if s["look"] != "bar"
    }
    assert others == {"limit": [32000], "interval": [(0, 403)], "dots": [400, 401, 402, 403]}
    assert {s["label"] for s in series["Time, predicted and measured"]} >= {"computing", "communication", "measured"}
    profiled = {(s["row"], s["label"]): (*s["points"][0][0], s["colour"]) for s in series["Where the time went"]}
    assert {key: value[:2] for key, value in profiled.items()} == {
        ("zero1", "forward"): (0, 100), ("zero1", "backward"): (100, 350), ("zero1", "data loading"): (350, 400),
        ("zero2", "backward"): (0, 300), ("zero2", "logging"): (300, 301),
    }  # fmt: skip
    assert profiled["zero1", "backward"][2] == profiled["zero2", "backward"][2], "a part has one colour"
    moments = {(s["label"], y): tuple(x) for s in series["Timeline"] for x, y in s["points"]}
    assert moments == {
        (part, f"zero1: rank {rank}"): stretch
        for of_rank in ({"forward": (0, 100), "backward": (100, 300), "data loading": (300, 400)},
                        {"forward": (0, 100), "backward": (100, 400)})
        for part, stretch in of_rank.items() for rank in range("data loading" not in of_rank, 4, 2)
    }  # fmt: skip
    assert "% of each iteration " in page and "data loading: rank 0 (node0)" in page
    why = "zero2 takes 50.0 ms longer than zero1; it spends 97.0 ms more in the backward pass."
    assert why in page
    front = next(s for s in series["Memory against throughput"] if s["look"] == "line")
    assert front["points"] == sorted(front["points"])


def test_only_an_equal_loss_agrees(tmp_path: Path):
    losses = {"ddp": [8.0] * 30, "zero1": [8.0] * 30, "zero2": [8.0] * 20 + [math.nan] * 10, "zero3": [8.0] * 30}
    every = {"zero3": {"log_interval": 70}}
    runs = [load(make_run(tmp_path / name, name, losses=its, **every.get(name, {}))) for name, its in losses.items()]
    figures = all_figures(comparison := build(runs), rows_of(comparison), 8)
    caption = next(figure.caption for figure in figures if figure.title == "Loss")
    assert caption.endswith("To the last logged digit, zero1 agrees with ddp.")


def test_the_command_of_a_row_starts_the_same_run(tmp_path: Path):
    """As the launcher understands it, which only plans here."""
    data, output = tmp_path / "my data", {"OUTPUT_DIR": str(tmp_path / "run")}
    chosen = {"ENGINE": "native", "DEVICE": "cpu", "NNODES": "2", "NPROC_PER_NODE": "2", "MODEL_PRESET": "tiny"}
    chosen |= {"PRECISION_FLAG": "", "LR": "0.0002", "MEGATRON_DATA_DIR": str(data)}
    arguments = ["--init-method-std", "0.01"]
    nodes = {"MASTER_ADDR": "node0", "NODE_RANK": "0"}
    first = plan(environment(**chosen, **output, **nodes), "hybrid", arguments)
    resumed = with_values(first, {"RESUME": "1"})
    again = command(SimpleNamespace(plan=resumed, layout=first.layout)).replace(".sh", ".sh --dry-run=json", 1)
    shell = subprocess.run(
        ["bash", "-c", again], env=environment(**output), cwd=REPO_ROOT, capture_output=True, check=True
    )
    second = Plan.read(json.loads(shell.stdout))
    assert first.settings["LR"].value == "0.0002" and first.arguments.extra == arguments
    assert replace(second, notes=[]) == replace(first, notes=[])


def test_the_picture_shows_where_an_iteration_goes(place: Path):
    """A bar is as long as the median iteration, and its pieces are in the profile's proportions."""
    comparison = build([load(place / name) for name in STRATEGIES])
    (panel,) = picture.panels(comparison, rows_of(comparison))
    assert panel.title == comparison.verdicts[0]
    medians = [bar.milliseconds.median for bar in panel.bars]
    assert medians == sorted(medians) and len(medians) == len(STRATEGIES) - 1, "not the one that crashed"
    bars = {bar.name: bar for bar in panel.bars}
    shares = {}
    for name, bar in bars.items():
        assert sum(bar.pieces.values()) == pytest.approx(bar.milliseconds.median)
        shares[name] = {kind.name: round(size / bar.milliseconds.median, 3) for kind, size in bar.pieces.items()}
    assert shares["zero1"] == {"computing": 0.875, "rest": 0.125}
    assert shares["zero2"] == {"computing": 0.75, "rest": 0.25}
    assert shares["ddp"] == {"not profiled": 1.0}


def test_a_row_with_too_few_intervals_has_a_bar_without_an_interval(tmp_path: Path):
    comparison = build([load(make_run(tmp_path / "ddp", elapsed_ms=[100.0, 101.0]))])
    (panel,) = picture.panels(comparison, rows_of(comparison))
    (bar,) = panel.bars
    assert panel.interval(bar) is None and panel.time(bar).endswith(" ms")
    assert 'class="of-bar"' in render(comparison) and "<line class=" not in render(comparison)


def test_the_picture_as_text(place: Path):
    """In a terminal, however narrow and whatever it can write, a longer bar is a longer time."""
    comparison = build([load(place / name) for name in STRATEGIES])
    drawn = picture.panels(comparison, rows_of(comparison))
    for width in (60, 100, 200):
        lines = picture.text(drawn, width, "utf-8")
        assert max(map(len, lines[1:])) <= width
        zero1 = next(line for line in lines if line.startswith("  zero1"))
        full = zero1.count("\N{FULL BLOCK}")
        assert full / (full + zero1.count("-")) == pytest.approx(0.875, abs=0.05)
        lengths = [line.count("\N{MEDIUM SHADE}") for line in lines if line.startswith(("  ddp", "  hybrid"))]
        assert lengths == sorted(lengths) and lengths[0] > 9
    plain = picture.text(drawn, 100, "ascii")
    assert "#" in plain[1] and set("".join(plain)) <= {chr(code) for code in range(128)} | {"\N{DAGGER}"}
    assert "  # computing  - rest  ? not profiled" in plain


def test_a_line_is_thinned_out_without_losing_a_spike():
    points = [(x, 1000.0 * (x == 91)) for x in range(100)]
    assert (91, 1000.0) in thin(points, 10) and len(thin(points, 10)) <= 10 and thin(points, 100) == points


def timed(name: str, milliseconds: float, repeats: Sequence[float], parts: dict[str, float] | None) -> SimpleNamespace:
    """A row as the page explains it. parts: of its profiled iteration, in milliseconds."""
    profile = None
    if parts:
        rank = SimpleNamespace(parts=parts, wall_ms=sum(parts.values()))
        profile = SimpleNamespace(ranks=[rank])
    return SimpleNamespace(
        strategy=name,
        run=SimpleNamespace(world_size=2),
        milliseconds=Estimate(milliseconds),
        is_baseline=name == "ddp",
        samples_per_second=Estimate(16_000 / milliseconds),
        repeats=[Repeat(float(number), f"{name}{number}", speed) for number, speed in enumerate(repeats)],
        profile=profile,
    )


def test_what_the_headline_calls_unclear_has_no_reason_and_no_row_is_skipped(monkeypatch: pytest.MonkeyPatch):
    """And the parts are of the same iteration as the bars', not of the slower one that was profiled."""
    monkeypatch.setattr("t5bench.report.tables.profile_of", lambda row: row.profile)
    rows = {
        "ddp": timed("ddp", 100.0, [160.0, 161.0, 159.0], {"forward": 100, "host gaps": 100}),
        "zero1": timed("zero1", 108.0, [170.0, 140.0, 158.0], {"forward": 100, "host gaps": 200}),
        "zero2": timed("zero2", 102.0, [157.0, 157.2, 156.8], None),
        "zero3": timed("zero3", 200.0, [80.0, 80.5, 79.5], {"forward": 100, "host gaps": 300}),
    }
    assert why_slower(rows) == [
        "zero2 takes 2.00 ms longer than ddp; it was not profiled",
        "zero1: no clear difference from ddp",
        "zero3 takes 100 ms longer than ddp; it spends 100 ms more waiting for the host",
    ]
    rows["ddp"].profile = None
    assert why_slower(rows) == []


def test_the_sentences_stand_above_the_picture(page: str):
    """Whether all train the same model, the point of it all, is read without scrolling."""
    assert page.index('<p class="verdict">') < page.index('<figure class="bars">')
