#!/usr/bin/env bash
# Shows that T5-Large trains here under every strategy that the GPUs suffice for, and how fast, in one command.
set -euo pipefail
# shellcheck source=scripts/megatron_common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

engine_dir_setting
setting ENGINES "megatron native" "Which engines"
setting STRATEGIES "" "Which strategies (unset: all)"
setting MICRO_BATCH_SIZES "1 2 4 8 16 32" "Which of them the throughput is measured with, until memory is full"
setting BUNDLE "" "What --pack made, for a machine without internet: wheels/ and Megatron-DeepSpeed/"
setting MINUTES 10 "After so many minutes a part begins no further step; the same command goes on from there"
setting RESULTS_DIR "" "Where the summary, the figures and the packed records go (unset: docs/results/<device>)"
setting WORK_DIR "$REPO_ROOT/outputs/acceptance" "Where the runs are made"
setting TARGET_PYTHON 3.12 "--pack: the Python of the machine that the wheels are for"

print_help() {
  cat <<'HELP'
Usage: bash scripts/gpu_acceptance.sh [acceptance] [throughput] [--rehearse]
       bash scripts/gpu_acceptance.sh --pack DIRECTORY

For a machine with one or more CUDA GPUs; it needs no internet. Both parts when none is named:
  acceptance   what the machine has; whether the strategies train the same model on CUDA, also where several processes
               share one GPU; whether the launchers see GPUs, samples and memory as they should; T5-Large under every
               strategy that the devices suffice for, with both engines
  throughput   T5-Large at more and more samples at a time, with both engines and with a plain PyTorch loop over
               Hugging Face's T5, against the rates of matrix products and copies measured here
  --rehearse   all of it at tiny size on the CPU, to see that it works; its figures mean nothing
  --pack       where there is internet: what a machine without lacks, to be given there as BUNDLE

Exit status: 0 all passed, 1 something failed, 2 it cannot be done here, 3 time ran out (the same command goes on).

Settings, from the environment (name, default, meaning):
HELP
  print_settings
}

read_options() {
  REHEARSE=0 PACK='' PARTS=()
  while (($#)); do
    case $1 in
      -h | --help)
        print_help
        exit 0
        ;;
      --rehearse) REHEARSE=1 ;;
      --pack)
        [[ -n ${2:-} ]] || die "--pack needs a directory" "bash scripts/gpu_acceptance.sh --pack outputs/bundle"
        PACK=$2
        shift
        ;;
      acceptance | throughput) PARTS+=("$1") ;;
      *) die "unknown argument '$1'" "bash scripts/gpu_acceptance.sh --help tells the rest" ;;
    esac
    shift
  done
  ((${#PARTS[@]})) || PARTS=(acceptance throughput)
}

acceptance() { "$PYTHON" -m "t5bench.acceptance$1" "${@:2}"; }

check_choices() {
  local chosen
  require_numbers MINUTES
  [[ " $ENGINES " =~ ^(\ +(megatron|native))+\ +$ ]] ||
    die "ENGINES must be megatron, native or both, found '$ENGINES'"
  [[ " $MICRO_BATCH_SIZES " =~ ^(\ +[1-9][0-9]*)+\ +$ ]] ||
    die "MICRO_BATCH_SIZES must be whole numbers of at least 1, found '$MICRO_BATCH_SIZES'"
  read -ra chosen <<<"$STRATEGIES"
  choose_strategies "${chosen[@]}"
}

# The engine goes without its history: the launchers know it by the checksums of its files.
pack() {
  absolute_path "$1"
  local bundle=$REPLY
  ENGINE=megatron DEVICE=cpu check_engine
  note "packing wheels for Python $TARGET_PYTHON"
  DS_BUILD_OPS=0 acceptance .packages pack "$bundle/wheels" --python "$TARGET_PYTHON" ||
    die "the wheels could not be packed" "pip's own message is above; DeepSpeed is built with the torch of $PYTHON"
  rm -rf -- "$bundle/Megatron-DeepSpeed"
  mkdir -p -- "$bundle/Megatron-DeepSpeed"
  tar -C "$MEGATRON_DIR" --exclude=.git --exclude=__pycache__ --exclude=build -cf - . | tar -C "$bundle/Megatron-DeepSpeed" -xf -
  git -C "$REPO_ROOT" describe --always --abbrev=40 --dirty >"$bundle/commit" 2>/dev/null || true
  note "packed $(du -sh -- "$bundle" | cut -f 1) in $bundle: take it along with this repository, and run there"
  note "  BUNDLE=<its place> bash scripts/gpu_acceptance.sh"
}

# Beside the Python that is there, whose torch belongs to its CUDA.
install_missing() {
  local site=$WORK_DIR/site-packages lacking
  if [[ -n $BUNDLE ]]; then
    lacking=$(acceptance .packages install "$BUNDLE/wheels" "$site") || die "the wheels in $BUNDLE/wheels cannot be installed" \
      "pip's own message is above; --pack makes them for the Python that TARGET_PYTHON names"
    [[ -z $lacking ]] || note "installed in $site: $lacking"
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
  fi
  lacking=$(acceptance .packages missing)
  [[ -z $lacking ]] || die "these packages are missing: ${lacking//$'\n'/, }" \
    "With internet: $PYTHON -m pip install -r requirements.txt; without: BUNDLE, made by --pack elsewhere"
}

find_engine() {
  [[ -z $BUNDLE || ! -d $BUNDLE/Megatron-DeepSpeed || -d $MEGATRON_DIR ]] || MEGATRON_DIR=$BUNDLE/Megatron-DeepSpeed
  absolute_path "$MEGATRON_DIR" && MEGATRON_DIR=$REPLY
  [[ " $ENGINES " == *" megatron "* ]] || return 0
  [[ -d $MEGATRON_DIR ]] || die "there is no Megatron-DeepSpeed checkout at $MEGATRON_DIR" \
    "Run: bash scripts/setup_megatron.sh; without internet name one: MEGATRON_DIR=..., or ENGINES=native"
  engine_matches series ||
    INSTALL=0 MEGATRON_DIR=$MEGATRON_DIR bash "$REPO_ROOT/scripts/setup_megatron.sh" || exit "$EXIT_CONFIGURATION"
}

main() {
  local packed_at=''
  read_options "$@"
  require_python
  if [[ -n $PACK ]]; then
    pack "$PACK"
    return 0
  fi
  check_choices
  "$PYTHON" -c 'import torch' 2>/dev/null || die "$PYTHON has no torch" "Install torch for your CUDA first (README, step 3)"
  ((REHEARSE == 0)) || export CUDA_VISIBLE_DEVICES='' DS_ACCELERATOR=cpu
  count_gpus
  ((REHEARSE || GPU_COUNT)) || die "there is no GPU here (nvidia-smi -L lists none that CUDA_VISIBLE_DEVICES shows)" \
    "--rehearse goes through all of it on the CPU"
  absolute_path "$WORK_DIR" && WORK_DIR=$REPLY
  [[ -z $BUNDLE ]] || { absolute_path "$BUNDLE" && BUNDLE=$REPLY; }
  mkdir -p -- "$WORK_DIR"
  install_missing
  find_engine
  PYTHON=$(command -v "$PYTHON")
  write_torchrun "$WORK_DIR/bin"
  export PATH=$WORK_DIR/bin:$PATH
  export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
  [[ -z $BUNDLE || ! -s $BUNDLE/commit ]] || packed_at=$(<"$BUNDLE/commit")
  acceptance '' --work "$WORK_DIR" --results "$RESULTS_DIR" --engine-directory "$MEGATRON_DIR" --gpus "$GPU_COUNT" \
    --minutes "$MINUTES" --engines "$ENGINES" --strategies "${CHOSEN[*]}" \
    --micro-batch-sizes "$MICRO_BATCH_SIZES" --packed-at "$packed_at" -- "${PARTS[@]}"
}

main "$@"
