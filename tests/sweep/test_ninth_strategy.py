"""A ninth strategy is one file, with its JSON where it is a ZeRO strategy, and no other edit."""

import json
import re
import subprocess

import pytest
from support import Project

NAME, COLOUR = "zero2_offload", "#123456"
LAUNCHER = f"""#!/usr/bin/env bash
# ZeRO-2 with the optimizer's states in CPU memory.
set -euo pipefail
# shellcheck source=scripts/megatron_common.sh
source "$(dirname -- "${{BASH_SOURCE[0]}}")/megatron_common.sh"

STRATEGY={NAME}
STRATEGY_TITLE="ZeRO-2 + CPU Offload: + optimizer offload to CPU"
STRATEGY_PORT=29805
STRATEGY_COLOUR="{COLOUR}"
STRATEGY_DS_CONFIG=megatron_{NAME}.json
STRATEGY_FLAGS=(--cpu-optimizer)
run_strategy "$@"
"""


@pytest.fixture
def extended(project: Project) -> Project:
    project.script(f"run_megatron_t5_{NAME}.sh").write_text(LAUNCHER)
    config = {"zero_optimization": {"stage": 2, "overlap_comm": False, "offload_optimizer": {"device": "cpu"}}}
    (project.root / "ds_configs" / f"megatron_{NAME}.json").write_text(json.dumps(config))
    return project


def test_a_ninth_strategy_is_swept_compared_and_drawn(extended: Project):
    command = ["bash", str(extended.script("run_megatron_t5_all.sh"))]
    environment = extended.environment | {"TRAIN_ITERS": "1", "LOG_INTERVAL": "1", "WANDB_MODE": "disabled"}
    environment |= {"MODEL_PRESET": "tiny", "PRECISION_FLAG": "", "DROPOUT": "0", "RETRIES": "0"}
    result = subprocess.run(command, env=environment, cwd=extended.root, capture_output=True, text=True, check=False)
    comparison = extended.root / "outputs" / "all" / "comparison"
    rows = json.loads((comparison / "comparison.json").read_text())["groups"][0]["rows"]
    # In the order of the ports: after the other ZeRO strategies, before the pipeline.
    names = [row["strategy"] for row in rows]
    assert names[:7] == ["ddp", "zero1", "zero2", "zero3", "zero3_offload", NAME, "pipeline"], result.stderr
    assert NAME in result.stdout
    page = (comparison / "index.html").read_text()
    assert re.search(rf"\b{NAME}\b", page) and COLOUR in page
