#!/usr/bin/env bash
# Checks that the strategies train the same model, by comparing their curves with DDP's.
#
# Usage: bash scripts/check_parity.sh [MODE] [strategy...]
#
# Trains DDP and the named strategies (default: all) on this machine, in fp32, without dropout, from
# the same initial weights on the same data, and compares each loss and gradient norm with DDP's. With
# ENGINE=megatron it also trains the native engine's DDP, to reveal mistakes that all of them share.
# Modes:
#   --locate           with ENGINE=native: also say where each strategy first differs from DDP:
#                      iteration, forward or backward pass, gradient or update, module and ranks
#   --sensitivity      train no strategy; measure how far a change of 1 % in each number of the recipe
#                      moves the curves, in units of the bound; fail if a change would go unnoticed
#   --bf16             train in fp32, then again in bf16, and apply the bound measured for each
#   --benchmark-mode   train as the benchmark does, in bf16 with dropout 0.1. Layouts with DDP's
#                      dropout masks must meet the bound of bf16, the others a sign test
#                      (docs/parity.md)
# Exit status: 0 all train the same model, 1 one does not, 2 the check could not run, 3 the curves
# agree, but these settings would hide a mistake.
#
# The launchers' settings also work, except PRECISION_FLAG, DROPOUT, LOG_INTERVAL and those that
# evaluate, save and resume.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

# A recipe in which a change of 1 % in any number shows; docs/parity_evidence.md explains how it was found.

begin '--locate --sensitivity --bf16 --benchmark-mode NAME' "$@"
mode=''
[[ ${1:-} != --* ]] || { mode=$1 && shift; }
if [[ -z $MEGATRON_DATA_DIR ]]; then
  MEGATRON_DATA_DIR=$REPO_ROOT/outputs/parity/${FAMILY_PREFIX}${MODEL:+model-}data
  SAMPLE=1 TOKENIZER_MODEL='' MEGATRON_DATA_DIR=$MEGATRON_DATA_DIR attend bash "$REPO_ROOT/scripts/prepare_xsum_megatron.sh" >/dev/null
fi
export MODEL_PRESET TRAIN_ITERS GLOBAL_BATCH_SIZE MICRO_BATCH_SIZE LR MIN_LR LR_WARMUP_ITERS WEIGHT_DECAY CLIP_GRAD SEED
export MEGATRON_DATA_DIR PYTHON
# Then only rounding may differ, and every iteration is compared.
export PRECISION_FLAG='' DROPOUT=0 LOG_INTERVAL=1 EVAL_ITERS=0 EVAL_ONLY=0 SAVE_INTERVAL=0 RESUME=0 WANDB_MODE=disabled
options=()
case $mode in
  --locate) options=(--locate) ;;
  --sensitivity) options=(--sensitivity) ;;
  --bf16) options=(--bf16) ;;
  --benchmark-mode) export PRECISION_FLAG=--bf16 DROPOUT=0.1 ;;
esac
[[ $mode != '' && $mode != --bf16 ]] || ((CHECK_BLIND_SPOTS == 0)) || options+=(--blind-spots)
exec "$PYTHON" "$REPO_ROOT/t5bench" parity-check --engine "$ENGINE" --runs-dir "$RUNS_DIR" "${options[@]}" "$@"
