#!/usr/bin/env bash
# Finds the fastest layout of your model on your hosts by short runs of the most promising ones.
#
# Usage: bash scripts/search.sh [--dry-run] [--help]
#
# After each run it learns what your hosts, GPUs and links take, ranks the other layouts again, and
# drops those that are surely slower. It stops when the answer is certain or the budget is spent,
# checks that what it names trains as DDP does, and prints the command. docs/search.md explains it.
# After an interruption, run it again to continue.
#   --dry-run   print which layouts may be the fastest, and run nothing
# Exit status: 0 the answer is certain, or the first ones are too close to call, 2 nothing could be
# started, 3 the budget was spent before.
# The launchers' settings also work, except those that make up a layout; of these
# TENSOR_PARALLEL_SIZE and PIPELINE_PARALLEL_SIZE restrict the search to one size.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

begin --dry-run "$@"
export PYTHON
options=(--runs-dir "$RUNS_DIR" --iterations "$TRAIN_ITERS" --launch "$LAUNCH" --device "$GPU")
[[ -z $RUNS ]] || options+=(--runs "$RUNS")
[[ -z $MINUTES ]] || options+=(--minutes "$MINUTES")
[[ -z $LINK ]] || options+=(--link "$LINK")
[[ -z $NETWORK ]] || options+=(--network "$NETWORK")
[[ -z $HOST_COST ]] || options+=(--host "$HOST_COST")
# Not -m, for which Python looks in the current directory first: that may be another checkout.
exec "$PYTHON" "$REPO_ROOT/t5bench" search "$@" "${options[@]}"
