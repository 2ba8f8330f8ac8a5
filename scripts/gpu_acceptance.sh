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

# Puts the packages of the bundle before those of this Python, which may lack what reads settings.
unpack() {
  local directory=$1/bundle checksum packed_for version
  [[ -f $BUNDLE ]] || die "there is no bundle $BUNDLE" "--pack makes one, where there is internet"
  # Another copy of the same bundle may be newer, and the kernels compiled in its engine are kept.
  checksum=$(cksum <"$BUNDLE")
  if ! { [[ -f $directory/checksum ]] && [[ $checksum == "$(<"$directory/checksum")" ]]; }; then
    rm -rf -- "$directory" "$directory.partial"
    # Python 3.12 warns that 3.14 filters what it unpacks.
    "$PYTHON" -W ignore -m tarfile -e "$BUNDLE" "$directory.partial" || die "cannot unpack $BUNDLE" "Copy it again"
    printf '%s\n' "$checksum" >"$directory.partial/checksum"
    mv -- "$directory.partial" "$directory"
  fi
  packed_for=$(<"$directory/python")
  version=$("$PYTHON" -c 'import sys; print("{}.{}".format(*sys.version_info))')
  [[ $packed_for == "$version" ]] || die "$BUNDLE is for Python $packed_for, and $PYTHON is $version" \
    "Pack it again with TARGET_PYTHON=$version"
  export PYTHONPATH=$directory/site-packages:$PYTHONPATH BUNDLE_DIRECTORY=$directory
}

require_python
[[ -z ${BUNDLE:-} ]] || unpack "$(realpath -m -- "${WORK_DIR:-$REPO_ROOT/outputs/acceptance}")"
# Importing torch takes seconds.
"$PYTHON" -c 'import importlib.util as u, msgspec, numpy, psutil; u.find_spec("torch") or exit("no torch")' || die "$PYTHON lacks a package (named above)" \
  "With internet: README, steps 3 and 5; without: BUNDLE, made by --pack elsewhere"
begin '--rehearse --pack NAME' "$@"
[[ -z $BUNDLE || -d $MEGATRON_DIR ]] || MEGATRON_DIR=$BUNDLE_DIRECTORY/Megatron-DeepSpeed
export PYTHON ENGINES STRATEGIES MICRO_BATCH_SIZES MINUTES MEGATRON_DIR RESULTS_DIR CONTINUE WORK_DIR TARGET_PYTHON CARRY
case ${1:-} in
  --pack)
    [[ -n ${2:-} ]] || die "--pack needs a file" "bash scripts/gpu_acceptance.sh --pack outputs/bundle.tar.xz"
    python_module t5bench.tools.acceptance.bundle pack "$(realpath -m -- "$2")"
    exit
    ;;
  '' | --rehearse) [[ -z ${2:-} ]] || die "unknown argument '$2'" "See bash scripts/gpu_acceptance.sh --help" ;;
  *) die "unknown argument '$1'" "See bash scripts/gpu_acceptance.sh --help" ;;
esac
cd -- "$REPO_ROOT"
exec "$PYTHON" -m t5bench.tools.acceptance "$SECONDS" "$@"
