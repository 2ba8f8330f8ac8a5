"""scripts/search.sh over ssh: a tiny model of the native engine on two hosts."""

import json
import sys
from pathlib import Path

from cluster_lab import SYSTEM_PATH, Cluster
from support import REPO_ROOT

SETTINGS = {
    "PYTHON": sys.executable, "LAUNCH": "ssh", "ENGINE": "native", "DEVICE": "cpu", "NPROC_PER_NODE": "1",
    "MODEL_PRESET": "tiny", "PRECISION_FLAG": "", "DROPOUT": "0", "GLOBAL_BATCH_SIZE": "4", "TRAIN_ITERS": "26",
    "OMP_NUM_THREADS": "1", "RETRIES": "0", "PIPELINE_PARALLEL_SIZE": "2", "RUNS": "1",
    "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
}  # fmt: skip


def test_it_measures_a_pipeline_on_two_hosts(cluster: Cluster, sample_data: Path, tmp_path: Path):
    place = {"HOSTS": " ".join(cluster.nodes[:2]), "RUNS_DIR": str(tmp_path), "MEGATRON_DATA_DIR": str(sample_data)}
    script = str(REPO_ROOT / "scripts" / "search.sh")
    result = cluster.login("bash", script, env=SETTINGS | place, timeout=600, check=False)
    assert result.returncode in (0, 3), result.stderr
    assert "its curves agree with DDP's" in result.stdout
    assert "PIPELINE_PARALLEL_SIZE=2" in result.stdout and "<master-host> <node-rank>" in result.stdout
    state = json.loads((tmp_path / "search.json").read_text())
    (measured,) = state["outcomes"]
    assert not state["failed"] and "pp" in measured.split("-")
    assert state["question"]["hosts"] == " ".join(cluster.nodes[:2])
    assert "<svg" in (tmp_path / "search.svg").read_text()
