#!/usr/bin/env bash
# Whether the nodes can run together, before a run finds out: bash scripts/check_cluster.sh [host ...]
set -euo pipefail
# shellcheck source=scripts/megatron_common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

print_check_help() {
  cat <<HELP
Usage: bash scripts/check_cluster.sh [host ...]

Looks at every node over ssh, all at once, for at most a minute, and prints one table: reachable, names, clocks, this
repository and the engine at the same state, the same libraries and data, GPUs, free ports, disk, memory, and the
network measured with all-reduces. What fails is explained below the table. The hosts, the master first, are the
arguments, else HOSTS, else SLURM's nodes. Every node has the repository, the data and the
Python of this shell (PYTHON, else python3) at the same path.

Exit status: 0 all is well, 1 a check failed, 2 wrong use.
HELP
}

main() {
  local hosts=() own_port=${MASTER_PORT:-} python option
  # The settings' defaults are the launchers' own; the strategy's name only completes OUTPUT_DIR.
  # shellcheck disable=SC2034 # read by declare_settings
  STRATEGY=check_cluster STRATEGY_PORT=0
  declare_settings
  for option in "$@"; do
    case $option in
      -h | --help)
        print_check_help
        return 0
        ;;
      -*) die "unknown option '$option'" "Usage: bash scripts/check_cluster.sh [host ...]" ;;
      *) hosts+=("$option") ;;
    esac
  done
  ((${#hosts[@]})) || read -r -d '' -a hosts <<<"${HOSTS:-$(slurm_hosts)}" || true
  ((${#hosts[@]})) || die "no host is named, HOSTS is not set, and this is no SLURM allocation" \
    'Name the nodes, the master first: bash scripts/check_cluster.sh node0 node1'
  python=$(command -v "$PYTHON") || die "there is no '$PYTHON' on PATH" "Activate the environment that has torch, or set PYTHON"
  [[ -z $own_port ]] || require_integers 1 MASTER_PORT
  require_one_of ENGINE megatron native
  require_one_of DEVICE auto cuda cpu
  exec "$python" -m t5bench.cluster.check --python "$python" --engine "$ENGINE" --device "$DEVICE" \
    --engine-dir "$MEGATRON_DIR" --data-dir "$MEGATRON_DATA_DIR" --output-dir "$OUTPUT_DIR" --port "$own_port" -- "${hosts[@]}"
}

main "$@"
