#!/usr/bin/env bash
# The README's first command as a newcomer has it, on each Python: a fresh clone in a folder whose name has a blank and
# an ü, an empty home directory and an empty environment.
#
# Usage: bash tests/machines.sh [--tests] [PYTHON...]
#
# Without PYTHON: all that are found here, on PATH and in pyenv. pip's and uv's settings are passed on, so a directory of
# wheels may serve instead of an index.
#   --tests   then also the tests that train nothing, which takes minutes for each
# Prints a table. Exit status: 0 if everything ended with 0 on every Python, else 1.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
repository=$PWD
tests=''
if [[ ${1:-} == --tests ]]; then
  tests=1
  shift
fi
candidates=("$@")
if (($# == 0)); then
  candidates=(/usr/bin/python3 python3 python3.{10..14} "$HOME"/.pyenv/versions/3.1[0-4]*/bin/python3)
fi
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

# Interpreters, each release once; what PATH names may be a program that starts another.
declare -A known=()
pythons=()
for candidate in "${candidates[@]}"; do
  read -r version path < <("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3], sys.executable)' 2>/dev/null) || continue
  [[ -z ${known[$version]:-} && $version =~ ^3\.1[0-4]\. ]] || continue
  known[$version]=$path
  pythons+=("$version")
done
((${#pythons[@]})) || {
  echo "error: none of these runs and is Python 3.10 to 3.14: ${candidates[*]}" >&2
  exit 2
}

settings=()
while IFS= read -r -d '' line; do
  [[ ! $line =~ ^(PIP_|UV_) ]] || settings+=("$line")
done < <(env -0)

# in_clone PYTHON COMMAND...: with nothing of this environment.
in_clone() {
  env -i HOME="$home" PATH="$(dirname -- "$1"):/usr/bin:/bin" PYTHON="$1" "${settings[@]}" "${@:2}" </dev/null
}

failed=0
rows=()
for version in "${pythons[@]}"; do
  path=${known[$version]}
  home="$work/$version/home"
  clone="$work/$version/my folder ü/T5-Parallelism"
  mkdir -p -- "$home" "$(dirname -- "$clone")"
  git clone --quiet --no-hardlinks "$repository" "$clone"
  log=$work/$version.log
  printf '\nPython %s (%s): bash scripts/quickstart.sh\n' "$version" "$path"
  begin=$SECONDS
  status=0
  in_clone "$path" bash "$clone/scripts/quickstart.sh" >"$log" 2>&1 || status=$?
  seconds=$((SECONDS - begin))
  read -r installed downloaded < <(sed -nE 's/^the environment is complete after ([0-9]+) s(, with ([0-9.,]+) MB downloaded)?$/\1 \3/p' "$log") || true
  torch=$("$clone/.venv/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null) || torch=none
  if ((status)); then
    failed=1
    tail -n 25 -- "$log"
  fi
  tested='not run'
  if [[ $tests && $status == 0 ]]; then
    tested=0
    in_clone "$path" bash "$clone/scripts/run_tests.sh" -m 'not slow' >"$log" 2>&1 || tested=$?
    [[ $tested == 0 ]] || failed=1
    tail -n 25 -- "$log"
  fi
  rows+=("| $version | $torch | ${downloaded:-0} | ${installed:-?} | $((seconds - ${installed:-0})) | $status | $tested |")
  rm -rf -- "${work:?}/$version"
done
printf '\n| Python | torch | MB downloaded | s installed | s run | status | status of the tests |\n|---|---|---|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
exit "$failed"
