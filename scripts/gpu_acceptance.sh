#!/usr/bin/env bash
# Trains T5-Large under every strategy for which there are enough GPUs, checks it, measures its speed.
#
# Usage: bash scripts/gpu_acceptance.sh [acceptance] [throughput] [--rehearse]
#        bash scripts/gpu_acceptance.sh --pack DIRECTORY
#
# For a machine with CUDA GPUs, with or without internet. Without arguments it runs both parts.
#   acceptance   the machine's hardware and peak rates; whether the strategies train the same model on
#                CUDA, also when several processes share one GPU; T5-Large under every possible
#                strategy, with both engines
#   throughput   T5-Large on one GPU, with both engines and with a plain PyTorch loop over Hugging
#                Face's T5
#   --rehearse   run everything with the tiny model on the CPU, to see that it works; the figures mean
#                nothing
#   --pack       with internet: collect what a machine without internet needs, and set BUNDLE there
#
# Exit status: 0 all passed, 1 something failed, 2 it cannot run here, 3 time ran out (run the same
# command again to continue).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"


# The settings of every run here; all processes are on this machine.
# The vocabulary is google-t5/t5-large's, padded, because the bundled sample has a smaller one.
export DEVICE=cuda MODEL_PRESET=large VOCABULARY_MULTIPLE=32128 NNODES=1 HOSTS='' TOKENIZER_MODEL='' WANDB_MODE=disabled LOG_INTERVAL=1
# The first run of an engine waits for its compilers.
export SAMPLE_INTERVAL=0.5 RENDEZVOUS_TIMEOUT=60 WATCHDOG_SECONDS=900 DISTRIBUTED_TIMEOUT_MINUTES=10
export NCCL_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

packages() { python_module t5bench.acceptance.packages "$@"; }

# Without the engine's git history: the launchers check its files' checksums.
pack() {
  local target=$1
  check_engine
  note "packing wheels for Python $TARGET_PYTHON"
  DS_BUILD_OPS=0 packages pack "$target/wheels" "$TARGET_PYTHON" ||
    die "cannot pack the wheels" "See pip's message above; DeepSpeed is built with the torch of $PYTHON"
  rm -rf -- "$target/Megatron-DeepSpeed"
  mkdir -p -- "$target/Megatron-DeepSpeed"
  tar -C "$MEGATRON_DIR" --exclude=.git --exclude=__pycache__ --exclude=build -cf - . | tar -C "$target/Megatron-DeepSpeed" -xf -
  git -C "$REPO_ROOT" describe --always --abbrev=40 --dirty >"$target/commit" 2>/dev/null || true
  note "packed $(du -sh -- "$target" | cut -f 1) in $target: copy it and this repository to the other machine, and run there"
  note "  BUNDLE=<its path> bash scripts/gpu_acceptance.sh"
}

# In a separate directory: the existing Python's torch matches its CUDA.
complete_packages() {
  local site=$WORK_DIR/site-packages lacking
  export PYTHONPATH=$site:$PYTHONPATH PATH=$site/bin:$PATH
  lacking=$(packages complete "$site" ${BUNDLE:+"$BUNDLE/wheels"}) || die "cannot install the wheels in $BUNDLE/wheels" \
    "See pip's message above; --pack makes them for the Python version in TARGET_PYTHON"
  [[ -z $lacking ]] || die "these packages are missing: $lacking" \
    "With internet: $PYTHON -m pip install -r requirements.txt; without: BUNDLE, made by --pack elsewhere"
  [[ -z $BUNDLE || -d $MEGATRON_DIR ]] || MEGATRON_DIR=$BUNDLE/Megatron-DeepSpeed
}

check_engine() {
  MEGATRON_DIR=$MEGATRON_DIR bash "$REPO_ROOT/scripts/setup_megatron.sh" --check ||
    die "the engine is not ready" "Run: INSTALL=0 bash scripts/setup_megatron.sh; or set ENGINES=native"
}

begin '--rehearse --pack NAME' "$@"
parts=()
while (($#)); do
  case $1 in
    --rehearse) export DEVICE=cpu MODEL_PRESET=tiny VOCABULARY_MULTIPLE=4352 CUDA_VISIBLE_DEVICES='' DS_ACCELERATOR=cpu ;;
    --pack)
      [[ -n ${2:-} ]] || die "--pack needs a directory" "bash scripts/gpu_acceptance.sh --pack outputs/bundle"
      pack "$(realpath -m -- "$2")"
      exit
      ;;
    acceptance | throughput) parts+=("$1") ;;
    *) die "unknown argument '$1'" "See bash scripts/gpu_acceptance.sh --help" ;;
  esac
  shift
done
"$PYTHON" -c 'import torch' 2>/dev/null || die "$PYTHON has no torch" "Install torch for your CUDA first (README, step 3)"
mkdir -p -- "$WORK_DIR"
complete_packages
[[ $ENGINES == native ]] || check_engine
export PYTHON MEGATRON_DATA_DIR=$WORK_DIR/data
export ENGINES STRATEGIES MICRO_BATCH_SIZES MINUTES MEGATRON_DIR BUNDLE RESULTS_DIR WORK_DIR
cd -- "$REPO_ROOT"
((${#parts[@]})) || parts=(acceptance throughput)
exec "$PYTHON" -m t5bench.acceptance "$SECONDS" "${parts[@]}"
