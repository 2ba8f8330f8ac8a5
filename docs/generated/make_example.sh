#!/usr/bin/env bash
# Makes docs/generated/example/index.html and docs/generated/comparison.png of the runs of a quick start, with Chromium.
#
# Usage: bash docs/generated/make_example.sh outputs/quickstart/native
set -euo pipefail
page=$(realpath -- "${1:?Usage: bash docs/generated/make_example.sh outputs/quickstart/native}/comparison/index.html")
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
checkout=${page%/outputs/*}
content=$(<"$page")
printf '%s\n' "${content//"$checkout"//home/you/T5-Parallelism}" >example/index.html
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=10000 \
  --window-size=1280,1100 --screenshot=comparison.png "file://$PWD/example/index.html"
