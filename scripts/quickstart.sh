#!/usr/bin/env bash
# Trains and compares all strategies from a fresh clone. It needs no GPU and no compiler.
#
# Usage: bash scripts/quickstart.sh [--help]
#
# Creates a virtual environment in the checkout, prepares the bundled sample, trains a tiny T5 with
# each strategy, compares them, and lets one model complete a text. Apart from the caches of pip, uv
# and matplotlib, and checksums of the data in ~/.cache/t5-parallelism, everything stays in the
# checkout: .venv/ and outputs/quickstart/. Run it again to continue where it stopped.
# The settings of run_megatron_t5_all.sh and of the launchers also work.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

begin "" "$@"
written=$REPO_ROOT
[[ ! -d $REPO_ROOT/outputs ]] || written=$REPO_ROOT/outputs
{ probe=$(mktemp -- "$written/.writable.XXXXXX" 2>/dev/null) && rm -f -- "$probe"; } || die "$written cannot be written" \
  "Copy the whole directory to a place of your own, such as your home directory, and run this there"
attend bash "$REPO_ROOT/scripts/setup_environment.sh"
export PATH=$REPO_ROOT/.venv/bin:$PATH PYTHON=$REPO_ROOT/.venv/bin/python
export MEGATRON_DATA_DIR=$REPO_ROOT/outputs/quickstart/${FAMILY_PREFIX}${MODEL:+model-}data
SAMPLE=1 TOKENIZER_MODEL='' attend bash "$REPO_ROOT/scripts/prepare_xsum_megatron.sh" >/dev/null
# fp32 without dropout, and clipping in some iterations, so that a strategy that trains a different model shows.
export CLIP_GRAD="${CLIP_GRAD:-among}"
export ENGINE TRAIN_ITERS LOG_INTERVAL=1 PRECISION_FLAG="${PRECISION_FLAG-}" DROPOUT="${DROPOUT:-0}"
# A model of your own is larger than the tiny ones: fewer samples, of which each process still has two micro-batches.
[[ -z ${MODEL:-} ]] || export GLOBAL_BATCH_SIZE="${GLOBAL_BATCH_SIZE:-8}" MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-1}"
export MODEL_PRESET="${MODEL_PRESET:-tiny}" MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-2}" WANDB_MODE="${WANDB_MODE:-disabled}"
# The runs are too short for the launchers' default interval.
export SAMPLE_INTERVAL="${SAMPLE_INTERVAL:-0.2}"
# One iteration of each is profiled, so that the page shows where the time went.
export PROFILE_ITERATION="${PROFILE_ITERATION:-$((TRAIN_ITERS > 3 ? TRAIN_ITERS / 2 : 0))}"
# Each run keeps its model, so that one sees what a run is for.
export SAVE_INTERVAL="${SAVE_INTERVAL:-$TRAIN_ITERS}"
export RUNS_DIR
attend bash "$REPO_ROOT/scripts/run_megatron_t5_all.sh"

trained=("$RUNS_DIR"/repeat1/{ddp,*}/checkpoints/latest_checkpointed_iteration.txt)
prompt='The <extra_id_0> walks in <extra_id_1> park.'
[[ -z $FAMILY_PREFIX ]] || prompt='The man walks in'
echo
for tracker in "${trained[@]}"; do
  [[ -f $tracker ]] || continue
  echo "After $TRAIN_ITERS iterations a model cannot know much. It completes '$prompt' like this:"
  attend python_module t5bench generate "${tracker%/checkpoints/*}" --prompt "$prompt"
  break
done
echo "Next: open the page; docs/learn.md is a course of one hour; README.md says how to run this on your nodes."
