#!/usr/bin/env bash
# Whether the strategies train the same model: each trains from the same weights, and its curves are compared with DDP's.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

setting ENGINE 'one-of:megatron|native' - - megatron "megatron (patched Megatron-DeepSpeed; DDP is compared with native/ too) or native"
setting MODEL_PRESET 'one-of:tiny|small|base|large' - - tiny "Model size: tiny, small, base or large"
setting TRAIN_ITERS whole:2 - - 20 "Iterations of each strategy"
setting MICRO_BATCH_SIZE whole:1 - - 2 "Small enough for several micro-batches in an iteration"
setting LR decimal - - 0.001 "Peak learning rate"
setting CLIP_GRAD decimal - - 1.1 "Must lie among DDP's gradient norms: clipping in some iterations alone"
setting MEGATRON_DATA_DIR 'path?' - - "" "Directory containing indexed dataset files (unset: the bundled sample, prepared in outputs/parity/data)"
setting RUNS_DIR path - - "$REPO_ROOT/outputs/parity/$(date +%Y%m%d-%H%M%S)" "Where the run directories go"

case ${1:-} in
  -h | --help)
    cat <<HELP
Usage: bash scripts/check_parity.sh [strategy...]

Trains DDP and the named strategies (all when none is named) on this machine, in fp32, without dropout, from the same
initial weights on the same data, and compares each loss and gradient norm with DDP's. With ENGINE=megatron the native
engine's DDP is trained too and compared: that shows a mistake that all strategies share.
Exit status: 0 when all train the same model, 1 when one does not, 2 when the check could not be made.

Strategies: $("$PYTHON" "$REPO_ROOT/t5bench" strategies | tr '\n' ' ')

Settings, from the environment (name, default, meaning); the launchers' settings work too, except PRECISION_FLAG,
DROPOUT, LOG_INTERVAL and what evaluates, saves and resumes:
HELP
    print_settings
    exit
    ;;
  -*) die "unknown option '$1'" "bash scripts/check_parity.sh --help lists what there is" ;;
esac
check_settings
require_python
if [[ -z $MEGATRON_DATA_DIR ]]; then
  MEGATRON_DATA_DIR=$REPO_ROOT/outputs/parity/data
  SAMPLE=1 TOKENIZER_MODEL='' MEGATRON_DATA_DIR=$MEGATRON_DATA_DIR bash "$REPO_ROOT/scripts/prepare_xsum_megatron.sh" >/dev/null
fi
export MODEL_PRESET TRAIN_ITERS MICRO_BATCH_SIZE LR CLIP_GRAD MEGATRON_DATA_DIR PYTHON
# Rounding is then all that may differ, and every iteration shows.
export PRECISION_FLAG='' DROPOUT=0 LOG_INTERVAL=1 EVAL_ITERS=0 SAVE_INTERVAL=0 RESUME=0 WANDB_MODE=disabled
exec "$PYTHON" "$REPO_ROOT/t5bench" parity-check --engine "$ENGINE" --runs-dir "$RUNS_DIR" "$@"
