#!/usr/bin/env bash
# Runs the tests in the checkout's own virtual environment, which the first run creates.
#
# Usage: bash scripts/run_tests.sh [--help] [pytest arguments]
#
# Three tests run at once by default, also on two cores, because many wait for what they have
# started; TEST_PROCESSES sets another number. Failed tests run once more, one at a time, and both
# reports are printed. A test that then passes has a race, in itself or in the tested code. Only a
# test that fails again counts as failed.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '1d; /^#/!q; s/^# \?//p' "$0"
  exit
fi
attend bash "$REPO_ROOT/scripts/setup_environment.sh" --tests
export PATH=$REPO_ROOT/.venv/bin:$PATH PYTHON=$REPO_ROOT/.venv/bin/python
cd -- "$REPO_ROOT"
readonly SOME_TESTS_FAILED=1 # pytest's exit status
status=0
run_pytest() { "$PYTHON" -m pytest --dist loadgroup --no-loadscope-reorder "$@" || status=$?; }
run_pytest -n "${TEST_PROCESSES:-3}" "$@"
if ((status == SOME_TESTS_FAILED)); then
  status=0
  printf '\nRunning the failed tests again, one at a time, until one fails again:\n'
  # Test names differ between a worker and this process, and pytest remembers the worker's.
  run_pytest "$@" -n 1 --last-failed --last-failed-no-failures none --exitfirst
fi
exit "$status"
