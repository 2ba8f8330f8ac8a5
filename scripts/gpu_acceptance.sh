#!/usr/bin/env bash
# Measures T5-Large on this machine's GPUs, and checks that all strategies train the same model.
#
# Usage: bash scripts/gpu_acceptance.sh [--rehearse]
#        bash scripts/gpu_acceptance.sh --pack FILE
#
# Needs CUDA GPUs, Python and torch; no internet, git or make. The steps, the most valuable first:
# T5-Large with the native engine, with a plain PyTorch loop over Hugging Face's T5 and with
# Megatron-DeepSpeed; parity of the strategies; T5-Large under every strategy for which there are
# enough GPUs. Steps whose tools are missing are skipped.
#   --rehearse   run everything with the tiny model on the CPU, to see that it works; the figures
#                mean nothing
#   --pack       with internet: put what a machine without internet needs into FILE; set BUNDLE there
#
# RESULTS_DIR is complete after every step, even if this is killed: run the same command again to
# continue, or continue on another machine of the same kind with CONTINUE.
#
# Exit status: 0 all passed or were skipped, 1 something failed, 2 it cannot run here, 3 time ran out.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

setting MINUTES decimal - - 10 "Minutes that this call may take in all"
setting ENGINES 'one-of:both|megatron|native' - - both "Engines to run"
setting STRATEGIES text? - - "" "Strategies to run (unset: all); DDP is always included"
setting MICRO_BATCH_SIZES text - - "64 32 8" "Micro-batch sizes to measure, in this order; the largest is also the global batch"
engine_dir_setting
setting BUNDLE path? - - "" "The file that --pack made, for a machine without internet"
setting RESULTS_DIR path? - - "" "Where to put the summary, the figures and the packed records (unset: docs/results/<device>)"
setting CONTINUE path? - - "" "results.json of an earlier call, to continue it here (unset: the one in RESULTS_DIR)"
setting WORK_DIR path - - "$REPO_ROOT/outputs/acceptance" "Directory of the runs"
setting TARGET_PYTHON text - - 3.12 "With --pack: the Python version of the machine that will use the bundle"
setting CARRY text? - - "" "With --pack: further Python packages that the machine lacks"

# Puts the bundle's packages before those of this Python.
unpack() {
  local directory=$WORK_DIR/bundle packed_for version
  [[ -f $BUNDLE ]] || die "there is no bundle $BUNDLE" "--pack makes one, where there is internet"
  if [[ ! $directory -nt $BUNDLE ]]; then
    rm -rf -- "$directory" "$directory.partial"
    "$PYTHON" -m tarfile -e "$BUNDLE" "$directory.partial" || die "cannot unpack $BUNDLE" "Copy it again"
    mv -- "$directory.partial" "$directory"
    touch -- "$directory"
  fi
  packed_for=$(<"$directory/python")
  version=$("$PYTHON" -c 'import sys; print("{}.{}".format(*sys.version_info))')
  [[ $packed_for == "$version" ]] || die "$BUNDLE is for Python $packed_for, and $PYTHON is $version" \
    "Pack it again with TARGET_PYTHON=$version"
  export PYTHONPATH=$directory/site-packages:$PYTHONPATH BUNDLE_DIRECTORY=$directory
  [[ -d $MEGATRON_DIR ]] || MEGATRON_DIR=$directory/Megatron-DeepSpeed
}

require_python
begin '--rehearse --pack NAME' "$@"
export PYTHON ENGINES STRATEGIES MICRO_BATCH_SIZES MINUTES MEGATRON_DIR RESULTS_DIR CONTINUE WORK_DIR TARGET_PYTHON CARRY
case ${1:-} in
  '' | --rehearse) (($# <= 1)) || die "unknown argument '$2'" "See bash scripts/gpu_acceptance.sh --help" ;;
  --pack)
    [[ -n ${2:-} ]] || die "--pack needs a file" "bash scripts/gpu_acceptance.sh --pack outputs/bundle.tar.xz"
    python_module t5bench.acceptance.bundle pack "$(realpath -m -- "$2")"
    exit
    ;;
  *) die "unknown argument '$1'" "See bash scripts/gpu_acceptance.sh --help" ;;
esac
mkdir -p -- "$WORK_DIR"
[[ -z $BUNDLE ]] || unpack
"$PYTHON" -c 'import torch, msgspec, psutil, tabulate, numpy' || die "$PYTHON lacks a package (named above)" \
  "With internet: README, steps 3 and 5; without: BUNDLE, made by --pack elsewhere"
cd -- "$REPO_ROOT"
exec "$PYTHON" -m t5bench.acceptance "$SECONDS" "$@"
