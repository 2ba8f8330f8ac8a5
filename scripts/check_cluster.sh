#!/usr/bin/env bash
# Whether the nodes can run together, before a run finds out: bash scripts/check_cluster.sh [host ...]
# The hosts, the master first, are the arguments, else HOSTS, else SLURM's nodes; --help says what is checked.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

hosts=("$@")
(($#)) || read -r -d '' -a hosts <<<"${HOSTS:-$(slurm_hosts)}" || true
require_python
exec "$PYTHON" "$REPO_ROOT/t5bench" cluster "${hosts[@]}"
