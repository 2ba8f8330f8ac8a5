#!/usr/bin/env bash
# Whether the nodes can run together, before a run finds out: bash scripts/check_cluster.sh [host ...]
# The hosts, the master first, are the arguments, else HOSTS, else SLURM's nodes; --help says what is checked.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

hosts=("$@") here=()
(($#)) || read -r -d '' -a hosts <<<"${HOSTS:-$(slurm_hosts)}" || true
for host in "${hosts[@]}"; do
  check_hosts "${host##*@}"
  ! is_this_host "$host" || here=(--here "$host")
done
require_python
exec "$PYTHON" "$REPO_ROOT/t5bench" cluster "${here[@]}" "${hosts[@]}"
