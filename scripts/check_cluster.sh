#!/usr/bin/env bash
# Checks whether the nodes are healthy and can run together: bash scripts/check_cluster.sh [--health] [--network FILE] [--host FILE] [host ...]
# The hosts, master first, come from the arguments, HOSTS or SLURM; --help says what is checked.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

options=() hosts=()
while (($# > 0)); do
  if [[ $1 == --network || $1 == --host ]] && (($# > 1)); then
    options+=("$1" "$2")
    shift
  elif [[ $1 == -* ]]; then
    options+=("$1")
  else
    hosts+=("$1")
  fi
  shift
done
if ((${#hosts[@]} == 0)); then
  read -r -d '' -a hosts <<<"${HOSTS:-}" || true
fi
if ((${#hosts[@]} == 0 && ${SLURM_HET_SIZE:-1} > 1)); then
  # A heterogeneous job lists the nodes of each component by themselves.
  for ((component = 0; component < SLURM_HET_SIZE; component++)); do
    nodes=SLURM_JOB_NODELIST_HET_GROUP_$component
    read -r -d '' -a component_hosts < <(SLURM_JOB_NODELIST=${!nodes:-} SLURM_STEP_NUM_NODES=1 slurm_hosts) || true
    hosts+=("${component_hosts[@]}")
  done
elif ((${#hosts[@]} == 0)); then
  read -r -d '' -a hosts <<<"$(slurm_hosts)" || true
fi
require_python
exec "$PYTHON" "$REPO_ROOT/t5bench" cluster "${options[@]}" -- "${hosts[@]}"
