#!/usr/bin/env bash
# All tests, in the checkout's own virtual environment: bash scripts/run_tests.sh [pytest arguments]
# TEST_PROCESSES of them run at once.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/python_env.sh
source "$REPO_ROOT/scripts/python_env.sh"

ensure_venv "$REPO_ROOT/requirements.txt" "$REPO_ROOT/requirements-dev.txt"
cd -- "$REPO_ROOT"
exec "$PYTHON" -m pytest -n "${TEST_PROCESSES:-2}" --dist loadgroup "$@"
