#!/usr/bin/env bash
# Makes the virtual environment .venv in the checkout: PyTorch, and the packages of requirements.txt.
#
# Usage: bash scripts/setup_environment.sh [--tests | --help]
#
# PyTorch is the one that the active Python has; else that of pip's wheel directories (find-links);
# else, from PyTorch's index, the one for CPUs or for the driver's CUDA. If .venv is complete,
# nothing happens. `source .venv/bin/activate` then gives you its Python.
#   --tests   also what the tests and the linters need (requirements-dev.txt)
# Settings: PYTHON (python3), and those of pip, such as PIP_FIND_LINKS, PIP_NO_INDEX and PIP_CERT.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

requirements=("$REPO_ROOT/requirements.txt")
case ${1:-} in
  -h | --help)
    sed -n '1d; /^#/!q; s/^# \?//p' "$0"
    exit
    ;;
  --tests) requirements+=("$REPO_ROOT/requirements-dev.txt") ;;
  '') ;;
  *) die "unknown argument '$1'" "Run bash scripts/${0##*/} --help to see the options" ;;
esac
exec_module t5bench.virtual_environment "${requirements[@]}"
