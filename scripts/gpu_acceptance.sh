#!/usr/bin/env bash
# Measures T5-Large on this machine's GPUs, checks that all strategies train the same model, and
# packs the records.
#
# Usage: bash scripts/gpu_acceptance.sh [--rehearse | --pack] [STEP...]
#
# The steps, the most valuable first: native-ddp, native-parity, native-all, megatron-ddp,
# megatron-parity, megatron-all. Those ending in -ddp and -all are sweeps with a profiled iteration.
# A step for which too little time is left is not run; name it to run it later, or elsewhere.
#   --rehearse   the same with the tiny model on the CPU; the figures mean nothing
#   --pack       with internet: put into BUNDLE what a machine with torch but without internet lacks
#
# Exit status: 0 all passed, 1 a step did not, 2 nothing could be run, 3 time ran out.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

readonly ENDING=45 # seconds at the end, for what still runs to end in order and for packing it
# This Python may lack the packages that read the settings.
PYTHONPATH+=:$(realpath -m -- "${BUNDLE:-$REPO_ROOT/outputs/bundle}")/site-packages
begin '--rehearse --pack NAME' "$@"
cd -- "$REPO_ROOT"

if [[ ${1:-} == --pack ]]; then
  pip=("$PYTHON" -m pip --quiet --disable-pip-version-check install --no-compile --target "$BUNDLE/site-packages")
  rm -rf -- "$BUNDLE"
  # No operator of DeepSpeed is compiled ahead, so its package is pure Python and serves every machine.
  DS_BUILD_OPS=0 "${pip[@]}" --no-deps --no-build-isolation "$(grep ^deepspeed= requirements.txt)"
  "${pip[@]}" --only-binary=:all: --python-version "$TARGET_PYTHON" --platform manylinux2014_x86_64 \
    hjson msgspec nvidia-ml-py py-cpuinfo pydantic
  [[ ! -d $MEGATRON_DIR ]] || cp -r -- "$MEGATRON_DIR" "$BUNDLE/Megatron-DeepSpeed"
  rm -rf -- "$BUNDLE/Megatron-DeepSpeed/.git"
  note "$(du -sh -- "$BUNDLE" | cut -f1) in $BUNDLE: copy it with this repository, or set BUNDLE there"
  exit
fi

# What all runs have in common: one machine without internet, and iterations for a median and a profile.
export PYTHON HOSTS='' NNODES=1 NCCL_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1 WANDB_MODE=disabled LOG_INTERVAL=1
export TOKENIZER_MODEL='' MEGATRON_DATA_DIR=$WORK_DIR/data MEGATRON_DIR CHECK_BLIND_SPOTS=0 WATCHDOG_SECONDS=900
strategies='' # all; of the two micro-batches the first measures DDP alone
if [[ ${1:-} == --rehearse ]]; then
  shift
  export DEVICE=cpu DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=''
  run=(MODEL_PRESET=tiny TRAIN_ITERS=6 PROFILE_ITERATION=6 GLOBAL_BATCH_SIZE=16 PRECISION_FLAG=)
  sizes=(8 2)
else
  gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
  ((gpus > 0)) || die "PyTorch sees no GPU here" "--rehearse tries everything on the CPU"
  export DEVICE=cuda
  run=(MODEL_PRESET=large VOCABULARY_MULTIPLE=32128 TRAIN_ITERS=16 PROFILE_ITERATION=16 GLOBAL_BATCH_SIZE=$((32 * gpus)))
  sizes=(32 8)
  ((gpus > 1)) || strategies='ddp zero1 zero2 zero3 zero3_offload' # the others divide the model
fi
if [[ ! -d $MEGATRON_DIR ]]; then MEGATRON_DIR=$BUNDLE/Megatron-DeepSpeed; fi
for name in "$@"; do
  [[ $name =~ ^(native|megatron)-(ddp|parity|all)$ ]] || die "there is no step '$name'" "--help names the steps"
done
mkdir -p -- "$RESULTS_DIR" "$WORK_DIR"
SAMPLE=1 attend bash scripts/prepare_xsum_megatron.sh &>"$RESULTS_DIR/log.txt" || die "the sample data cannot be prepared" "See $RESULTS_DIR/log.txt"

status=0 chosen=" $* "
# step NAME SECONDS SETTING... SCRIPT: runs what takes about so long, if so much time is left, and packs its runs.
step() {
  local name=$1 begun=$SECONDS ended=0 left=$((60 * MINUTES - ENDING - SECONDS))
  [[ $chosen == '  ' || $chosen == *" $name "* ]] || return 0
  # Without make and g++ the engine cannot compile its index helper.
  if [[ $name == megatron-* ]] && ! { [[ -d $MEGATRON_DIR ]] && type -P make && type -P g++; } >/dev/null; then
    note "$name: not run, $MEGATRON_DIR, make or g++ is missing"
  elif ((left < $2)); then
    note "$name: not run, it takes about $2 s and $left s were left"
    status=3
  else
    attend timeout --foreground --kill-after=20 "$left" env ENGINE="${name%-*}" RUNS_DIR="$WORK_DIR/$name" "${@:3}" &>>"$RESULTS_DIR/log.txt" || ended=$?
    "$PYTHON" -m t5bench pack "$WORK_DIR/$name" --allow world_size --allow engine -o "$RESULTS_DIR/$name.tar.gz" &>>"$RESULTS_DIR/log.txt" || ended=1
    note "$name: exit status $ended, $((SECONDS - begun)) s"
    if ((ended == 124)); then status=3; elif ((ended != 0 && status == 0)); then status=1; fi
  fi
}
# shellcheck disable=SC2086 # a list
for engine in native megatron; do
  step "$engine-ddp" 90 "${run[@]}" STRATEGIES=ddp MICRO_BATCH_SIZE="${sizes[0]}" bash scripts/run_megatron_t5_all.sh
  step "$engine-parity" 180 bash scripts/check_parity.sh $strategies
  step "$engine-all" 240 "${run[@]}" STRATEGIES="$strategies" MICRO_BATCH_SIZE="${sizes[1]}" bash scripts/run_megatron_t5_all.sh
done
note "results: $RESULTS_DIR"
exit "$status"
