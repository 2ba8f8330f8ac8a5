"""The README's hour on two nodes, from clone to page: its commands as they stand, on two hosts over ssh."""

import csv
import json
import re
import sys
import sysconfig
from pathlib import Path

import pytest
from cluster_lab import Cluster
from described import CONFIGS
from support import REPO_ROOT

ENTER = "cd T5-Parallelism\nsource .venv/bin/activate"
PRICED = "compare outputs/all --tokens 20e9 --price 2.5"
README = (REPO_ROOT / "README.md").read_text()
# The packages are lent: to install torch takes gigabytes, and the hosts reach no index.
INSTALL = "bash scripts/setup_environment.sh"
PACKAGES = sysconfig.get_path("purelib")
LEND = f"""{sys.executable} -m venv --without-pip .venv
for site in .venv/lib/python*/site-packages; do printf '%s\\n' '{PACKAGES}' >"$site/lent.pth"; done"""


def blocks() -> list[str]:
    section = README[README.index("## One hour") :]
    section = section[: section.index("\n## ")]
    return re.findall(r"^```(?:bash|sh)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "two-disks-and-my-model"])
def test_the_hour(cluster: Cluster, tmp_path: Path, shared: bool):
    prepare, train = blocks()
    assert INSTALL in prepare and PRICED in README
    prepare = prepare.replace("<this-repo-url>", str(REPO_ROOT))
    prepare = prepare.replace(f"{INSTALL} && ", f"{LEND}\n")
    home = tmp_path / "home"
    home.mkdir()
    settings = {"HOME": str(home), "MODEL_PRESET": "tiny", "OMP_NUM_THREADS": "1"}
    nodes = cluster.nodes[:1] if shared else cluster.nodes[:2]
    if not shared:
        (home / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"vocab_size": 4400}))
        settings["MODEL"] = str(home / "config.json")
        cluster.private(home, nodes)
    here = {"env": settings, "cwd": home}
    for node in nodes:
        cluster.run(node, "bash", "-euo", "pipefail", "-c", prepare, timeout=120, **here)
    chosen = "export STRATEGIES='ddp fsdp2'"
    script = f"{ENTER}\n{chosen}\n{train}"
    result = cluster.run("node0", "bash", "-euo", "pipefail", "-c", script, timeout=550, **here)
    assert "All checks passed." in result.stdout
    runs = home / "T5-Parallelism" / "outputs" / ("all" if shared else "gpt-all")
    assert len(re.findall(r"repeat\d/\S+ +complete, ", result.stderr)) == 6 + 6, result.stderr  # with the other recipe
    for name in ("ddp", "fsdp2"):
        assert re.search(rf"^micro-batch of {name}: \d+ \(.* ms.*\)$", result.stderr, re.MULTILINE)
    said = " ".join(result.stdout.split())
    assert "With DROPOUT=0.1 CLIP_GRAD=1 " in said and "CLIP_GRAD=" in result.stderr
    assert "clips the gradients" not in said, "of no iteration, or of every one"
    page = runs / "comparison" / "index.html"
    assert "fsdp2" in cluster.run("node0", "cat", str(page)).stdout
    priced = f"{ENTER}\npython -m t5bench {PRICED.replace('outputs/all', str(runs))}"
    cluster.run("node0", "bash", "-euo", "pipefail", "-c", priced, **here)
    rows = list(csv.DictReader(cluster.run("node0", "cat", str(page.with_name("comparison.csv"))).stdout.splitlines()))
    assert rows and all(float(row["hours"]) > 0 and float(row["price"]) > 0 for row in rows)
