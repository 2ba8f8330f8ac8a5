#!/usr/bin/env bash
# Checks whether the nodes can run together: bash scripts/check_cluster.sh [host ...]
# The hosts, master first, come from the arguments, HOSTS or SLURM; --help says what is checked.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

hosts=("$@")
(($#)) || read -r -d '' -a hosts <<<"${HOSTS:-$(slurm_hosts)}" || true
require_python
exec "$PYTHON" "$REPO_ROOT/t5bench" cluster "${hosts[@]}"
