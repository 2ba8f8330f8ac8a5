"""The README's hour on two nodes, from clone to page: its commands as they stand, on two hosts over ssh."""

import re
import sys
import sysconfig
from pathlib import Path

import pytest
from cluster_lab import Cluster
from support import REPO_ROOT

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


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "two-disks"])
def test_the_hour(cluster: Cluster, tmp_path: Path, shared: bool):
    prepare, train = blocks()
    assert INSTALL in prepare
    prepare = prepare.replace("<this-repo-url>", str(REPO_ROOT))
    prepare = prepare.replace(f"{INSTALL} && ", f"{LEND}\n")
    home = tmp_path / "home"
    home.mkdir()
    here = {"env": {"HOME": str(home), "MODEL_PRESET": "tiny", "OMP_NUM_THREADS": "1"}, "cwd": home}
    nodes = cluster.nodes[:1] if shared else cluster.nodes[:2]
    if not shared:
        cluster.private(home, nodes)
    for node in nodes:
        cluster.run(node, "bash", "-euo", "pipefail", "-c", prepare, timeout=120, **here)
    chosen = "export STRATEGIES='ddp fsdp2'"
    script = f"cd T5-Parallelism\nsource .venv/bin/activate\n{chosen}\n{train}"
    result = cluster.run("node0", "bash", "-euo", "pipefail", "-c", script, timeout=550, **here)
    assert "All checks passed." in result.stdout
    runs = home / "T5-Parallelism" / "outputs" / "all"
    assert len(re.findall(r"repeat\d/\S+ +complete, ", result.stderr)) == 6 + 6, result.stderr  # with the other recipe
    for name in ("ddp", "fsdp2"):
        assert re.search(rf"^micro-batch of {name}: \d \(.* ms.*\)$", result.stderr, re.MULTILINE)
    assert "With DROPOUT=0.1 CLIP_GRAD=1 " in " ".join(result.stdout.split())
    page = runs / "comparison" / "index.html"
    assert "fsdp2" in cluster.run("node0", "cat", str(page)).stdout
