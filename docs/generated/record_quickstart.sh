#!/usr/bin/env bash
# Records the quick start in a terminal: docs/generated/quickstart.svg, played back with pauses of at most a second.
# It needs asciinema 2 and termtosvg on PATH.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
recording=$(mktemp --suffix .cast)
trap 'rm -f -- "$recording"' EXIT
asciinema rec --overwrite --cols 120 --rows 32 --idle-time-limit 1 --command "bash scripts/quickstart.sh" "$recording"
termtosvg render "$recording" docs/generated/quickstart.svg --template gjm8 --max-frame-duration 1000
