"""The page in a real browser: with and without JavaScript, light and dark, narrow and wide, with keys and for axe."""

import gzip
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness import REPO_ROOT, STRATEGIES
from made_runs import LARGE, RTX_5000_ADA, make_run, seal

from t5bench.__main__ import main
from t5bench.record.files import write_json
from t5bench.report.costs import measured_parts
from t5bench.report.page import SCRIPTS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium to open the page with")
DARK = "--blink-settings=preferredColorScheme=0"
PARTS = {
    "zero1": [{"rank": rank, "parts": {"forward": 100.0, "backward": 200.0 + 100 * rank}} for rank in range(2)],
    "zero2": [{"rank": 0, "parts": {"backward": 300.0, "logging": 1.0}}],
}

NO_PARTS = "", "[]", "{}", '{"ranks": 7}', '{"ranks": [{}]}', '{"ranks": [{"parts": {"forward": NaN}}]}'


def write(directory: Path, profile: str) -> Path:
    (directory / "profile.json").write_text(profile)
    return directory


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight strategies on two nodes with a GPU each, one failed, two profiled."""
    place, times = tmp_path_factory.mktemp("runs"), [500.0 + (i * 7919 % 13) for i in range(60)]
    settings = LARGE | {"LR": "0.0002", "WANDB_PROJECT": "physics"}
    for name in STRATEGIES:
        ended = {"status": "crashed", "reason": "node1 was lost", "remedy": "Look at it"} if name == "zero3" else {}
        on = {"gpu": RTX_5000_ADA, "nodes": 2, "world_size": 4, "padded_vocab_size": 32128, "sent_per_iteration": 3e9}
        make_run(place / name, name, elapsed_ms=times, settings=settings, **on, **ended)
    for name, ranks in PARTS.items():
        write_json(place / name / "profile.json", {"wall_ms": 400.0, "ranks": ranks})
        seal(place / name)
    assert main(["compare", str(place)]) == 1
    return (place / "comparison" / "index.html").read_text()


def browse(page: str, tmp_path: Path, script: str, *options: str) -> Any:
    """What a script returns that runs once the page is complete."""
    script = f"document.title = JSON.stringify(await (async () => {{{script}}})())"
    ready = f"<script>onload = () => setTimeout(async () => {{{script}}}, 500)</script></body>"
    (tmp_path / "page.html").write_text(page.replace("</body>", ready))
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    fixed += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom"]
    command = [BROWSER, *fixed, *options, (tmp_path / "page.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", shown, re.DOTALL)[1]))


@needs_browser
def test_choosing_sorting_finding_and_copying(page: str, tmp_path: Path):
    found = browse(
        page, tmp_path,
        """const bodies = () => [...document.querySelectorAll("tbody[data-row]")]
        const shown = () => bodies().filter(body => !body.hidden).map(body => body.dataset.row)
        const categories = () => Chart.getChart(document.querySelector("canvas")).options.scales.y.labels
        const wait = () => new Promise(resolve => setTimeout(resolve, 200)), said = document.getElementById("said")
        const box = document.querySelector("[value=zero1]"), search = document.querySelector("[type=search]")
        box.click(); await wait()
        const pareto = () => Chart.getChart(document.querySelectorAll("canvas")[1]).data.datasets.map(d => d.label)
        const chosen = [shown(), categories(), pareto()]
        box.click(); await wait()
        const rate = [...document.querySelectorAll(".rows button")].find(b => b.textContent == "peak GPU MiB")
        const orders = [0, 1].map(() => (rate.click(), [shown(), rate.closest("th").ariaSort]))
        search.value = "node1 was lost"; search.dispatchEvent(new Event("input", {bubbles: true}))
        const searched = shown(), canvas = document.querySelector("canvas"), read = []
        for (let i = 0; i < 2; i++) {
            canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"})); read.push(said.textContent) }
        search.value = ""; search.dispatchEvent(new Event("input", {bubbles: true}))
        document.querySelector(".more details").open = true
        document.querySelector(".more button").click(); await wait()
        const [charts, figures] = ["canvas", "figcaption"].map(name => document.querySelectorAll(name).length)
        const copied = String(getSelection())
        return {chosen, orders, searched, read, copied, said: said.textContent, charts, figures}""",
    )  # fmt: skip
    complete = [name for name in STRATEGIES if name != "zero3"]
    assert "zero1" not in found["chosen"][0] + found["chosen"][1] and len(found["chosen"][1]) == len(complete) - 1
    assert "zero1" not in found["chosen"][2] and "not beaten in both" not in found["chosen"][2]
    (ascending, up), (descending, down) = found["orders"]
    assert (up, down) == ("ascending", "descending") and set(ascending) == set(descending) == set(STRATEGIES)
    assert found["searched"] == ["zero3"]
    assert re.fullmatch(r"ddp: [\d.]+", found["read"][0]) and ", between 3" in found["read"][1]
    assert found["said"] == "The command is copied."
    assert "LR=0.0002" in found["copied"] and found["copied"].endswith(
        " bash scripts/run_megatron_t5_hybrid.sh node0 0"
    )
    assert "physics" not in found["copied"], "which W&B project it was in is not the run"
    assert found["charts"] >= found["figures"] == 8


@needs_browser
@pytest.mark.parametrize("options", [(), (DARK,)], ids=["light", "dark"])
def test_axe_finds_no_violation(page: str, tmp_path: Path, options: tuple[str, ...]):
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
def test_without_javascript_the_drawn_figures_and_every_text_are_there(page: str, tmp_path: Path):
    frame = f'<iframe sandbox="allow-same-origin" srcdoc="{html.escape(page)}"></iframe>'
    found = browse(
        f"<title></title><body>{frame}</body>", tmp_path,
        """const page = document.querySelector("iframe").contentDocument
        const height = name => [...page.querySelectorAll(name)].map(node => node.getBoundingClientRect().height)
        page.querySelectorAll("details").forEach(node => node.open = true)
        const empty = height("canvas, .live, #choices, button").every(h => h == 0)
        return [empty, height(".drawn svg"), page.body.innerText]""",
    )  # fmt: skip
    assert found[0] and len(found[1]) == 8 and min(found[1]) > 50
    for text in ("node1 was lost. Look at it", "scripts/run_megatron_t5_ddp.sh node0 0", "Where the time went"):
        assert text in found[2]


@needs_browser
def test_the_page_scrolls_down_alone(page: str, tmp_path: Path):
    """From a telephone to a large screen: with all details open neither the page nor a part of it is wider."""
    widths = 390, 768, 1280, 2560
    frames = "".join(f'<iframe width={width} height=900 srcdoc="{html.escape(page)}"></iframe>' for width in widths)
    found = browse(
        f"<!doctype html><title>?</title><body>{frames}</body>", tmp_path,
        """return [...document.querySelectorAll("iframe")].map(frame => {
            const page = frame.contentDocument, style = node => frame.contentWindow.getComputedStyle(node)
            page.querySelectorAll("details").forEach(node => node.open = true)
            const scrolls = [...page.querySelectorAll("*")].filter(
                node => style(node).overflowX != "visible" && node.scrollWidth > node.clientWidth)
            const parts = page.documentElement.scrollWidth, drawn = page.querySelectorAll("canvas").length
            return [parts, scrolls.length, drawn > 7, style(page.querySelector("td")).display] })""",
    )  # fmt: skip
    for width, (wide, scrolls, drawn, display) in zip(widths, found, strict=True):
        assert wide <= width and not scrolls and drawn
        assert display == ("block" if width < 1180 else "table-cell"), "where there is no room rows are cards"


def test_figures_are_of_what_is_known(page: str, tmp_path: Path):
    """Costs that are predicted are drawn in parts beside what was measured, and a profile in parts if it has some."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    series = {figure["title"]: [s for panel in figure["panels"] for s in panel["series"]] for figure in data["figures"]}
    of_ddp = [s for s in series["Memory"] if s["row"] == "ddp"]
    parts = {s["label"]: s["points"][0][0] for s in of_ddp if s["look"] == "bar"}
    assert parts["weights"][0] == 0 and parts["gradients"][0] == parts["weights"][1]
    others = {s["look"]: [x for x, _ in s["points"]] for s in of_ddp if s["look"] != "bar"}
    assert others == {"limit": [32000], "interval": [[0, 403]], "dots": [400, 401, 402, 403]}
    assert {s["label"] for s in series["Time, predicted and measured"]} >= {"computing", "communication", "measured"}
    profiled = {(s["row"], s["label"]): (*s["points"][0][0], s["colour"]) for s in series["Where the time went"]}
    assert {key: value[:2] for key, value in profiled.items()} == {
        ("zero1", "forward"): (0, 100), ("zero1", "backward"): (100, 350),
        ("zero2", "backward"): (0, 300), ("zero2", "logging"): (300, 301),
    }  # fmt: skip
    assert profiled["zero1", "backward"][2] == profiled["zero2", "backward"][2], "a part has one colour"
    assert all(measured_parts(write(tmp_path, content)) == {} for content in NO_PARTS)
    front = next(s for s in series["Memory against throughput"] if s["look"] == "line")
    assert front["points"] == sorted(front["points"]) and "zero3" not in data["rows"].get("", {})


def test_the_embedded_library_is_as_it_was_published():
    content = (REPO_ROOT / "t5bench" / "report" / SCRIPTS[0]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == "48444a82d4edcb5bec0f1965faacdde18d9c17db3063d042abada2f705c9f54a"
    assert b"MIT" in (REPO_ROOT / "t5bench" / "report" / "vendor" / "chart-LICENSE.md").read_bytes()
