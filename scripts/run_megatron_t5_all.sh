#!/usr/bin/env bash
# Runs every strategy, REPEATS times in turn, and compares them.
#
# Usage: bash scripts/run_megatron_t5_all.sh [--dry-run] [--help]
#
# The strategies run on this machine or, with LAUNCH=ssh, on several nodes. Those that the engine or
# the model family lacks are left out, and named: FSDP2 needs ENGINE=native. If a strategy needs more
# processes, DDP also runs with that many, so that every row has a baseline of its size. After an
# interruption, run it again to continue.
#   --dry-run   print what would run and what would not
# Exit status: 0 every run is complete, and none trains otherwise than DDP, 1 some run is not or does,
# 2 nothing could be started or compared.
# The launchers' settings also work.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

begin --dry-run "$@"
export PYTHON
# Not -m, for which Python looks in the current directory first: that may be another checkout.
exec "$PYTHON" "$REPO_ROOT/t5bench" sweep "$@" --strategies="$STRATEGIES" --repeats "$REPEATS" --retries "$RETRIES" \
  --launch "$LAUNCH" --recipe="$RECIPE" --runs-dir "$RUNS_DIR"
