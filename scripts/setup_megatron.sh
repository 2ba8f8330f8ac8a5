#!/usr/bin/env bash
# Megatron-DeepSpeed at the commit that the patches are made for, patched, with the Python packages that it needs.
set -euo pipefail
# shellcheck source=scripts/megatron_common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

# The newest commit when the patches were written; the checksums in patches/checksums are of this one.
readonly MEGATRON_COMMIT=4efb479d5317ce9b86096b9d8e3e8030b0b5263b

readonly PATCHES=$REPO_ROOT/patches
readonly CHECKSUMS=$PATCHES/checksums

engine_dir_setting
setting MEGATRON_REPO text - - https://github.com/deepspeedai/Megatron-DeepSpeed.git "What to clone: a URL, or a local path where there is no internet"
setting INSTALL 'one-of:0|1' - - 1 "0 leaves the Python packages alone"

print_help() {
  cat <<'HELP'
Usage: bash scripts/setup_megatron.sh [--check | --reset | --write-checksums | --help]

Clones Megatron-DeepSpeed at the pinned commit, applies patches/series and installs requirements.txt. Run it again at any
time: what is done already stays as it is.
  --check            change nothing; say what is missing or differs, exit 1 if anything does
  --reset            put changes of your own in the checkout aside with `git stash`, then set it up
  --write-checksums  for maintainers: patches/checksums anew, after a change of the patches

Settings, from the environment (name, default, meaning):
HELP
  print_settings
}

megatron_git() { git -C "$MEGATRON_DIR" "$@"; }

read_series() { mapfile -t SERIES <"$PATCHES/series"; }

# Everything that decides how the engine trains: what it imports or compiles, and what could be imported from its folder,
# which goes on PYTHONPATH.
engine_files() {
  git -C "$1" ls-files --cached --others --exclude-standard -- megatron/data/Makefile tools/preprocess_data.py \
    'megatron/*.py' 'megatron/*.cpp' 'megatron/*.cu' 'megatron/*.h' ':(glob)*.py' ':(glob)*/__init__.py'
}

# unpatched, megatron_t5_fixes, series or changed, in REPLY; missing where there is no checkout.
engine_state() { REPLY=$(python_module t5bench.plan.engine state "$MEGATRON_DIR"); }

# The files that differ from the patched engine, one a line.
differing_files() { python_module t5bench.plan.engine differences "$MEGATRON_DIR"; }

check() {
  local commit
  engine_state
  commit=$(megatron_git rev-parse HEAD 2>/dev/null) || commit='unknown (not a git checkout)'
  case $REPLY in
    series) note "ok: $MEGATRON_DIR holds Megatron-DeepSpeed ${MEGATRON_COMMIT:0:8} with all ${#SERIES[@]} patches" && return 0 ;;
    megatron_t5_fixes) note "incomplete: only megatron_t5_fixes.patch is applied; missing: ${SERIES[*]:1}" ;;
    missing) note "missing: there is no Megatron-DeepSpeed checkout at $MEGATRON_DIR" ;;
    unpatched) note "unpatched: none of these is applied: ${SERIES[*]}" ;;
    changed)
      note "differs: $MEGATRON_DIR is at commit $commit (wanted: $MEGATRON_COMMIT); against the patched engine:"
      differing_files >&2
      ;;
  esac
  return 1
}

clone() {
  local partial=$MEGATRON_DIR.partial.$$
  note "cloning $MEGATRON_REPO to $MEGATRON_DIR"
  # shellcheck disable=SC2064 # the name is known now, and the variable gone when the trap runs
  trap "rm -rf -- $(printf '%q' "$partial")" EXIT
  git clone --quiet --no-checkout -- "$MEGATRON_REPO" "$partial" ||
    die "cannot clone $MEGATRON_REPO" "Without internet: MEGATRON_REPO=/path/to/a/clone bash scripts/setup_megatron.sh"
  git -C "$partial" checkout --quiet "$MEGATRON_COMMIT" ||
    die "$MEGATRON_REPO does not hold commit $MEGATRON_COMMIT" "Update that clone (git fetch), or name another MEGATRON_REPO"
  mv -- "$partial" "$MEGATRON_DIR"
  trap - EXIT
}

# A checkout of another commit, or with changes: never thrown away, put aside on request.
make_pristine() {
  local reset=$1
  megatron_git rev-parse --git-dir >/dev/null 2>&1 || die "$MEGATRON_DIR is not a git checkout" "Name another MEGATRON_DIR"
  if [[ -n $(megatron_git status --porcelain) ]]; then
    ((reset)) || {
      differing_files >&2
      die "$MEGATRON_DIR holds changes that are not these patches (above: against the patched engine)" \
        "bash scripts/setup_megatron.sh --reset puts them aside with git stash, or name another MEGATRON_DIR"
    }
    megatron_git stash push --quiet --include-untracked --message "put aside by setup_megatron.sh"
    note "your changes are in: git -C '$MEGATRON_DIR' stash list"
  fi
  megatron_git cat-file -e "$MEGATRON_COMMIT^{commit}" 2>/dev/null || megatron_git fetch --quiet -- "$MEGATRON_REPO" ||
    die "cannot fetch commit $MEGATRON_COMMIT from $MEGATRON_REPO" "Set MEGATRON_REPO to a clone that has it"
  megatron_git checkout --quiet --detach "$MEGATRON_COMMIT"
}

# The patches go in together or not at all.
apply_patches() {
  (cd -- "$MEGATRON_DIR" && git apply -- "${@/#/$PATCHES/}") || die "the patches do not apply to $MEGATRON_DIR" \
    "bash scripts/setup_megatron.sh --check tells what differs"
}

install_requirements() {
  note "installing requirements.txt with $PYTHON"
  "$PYTHON" -c 'import torch' 2>/dev/null || die "$PYTHON has no torch" "Install torch first (README, step 3), then run this again"
  # Operators are compiled when first used: a build of all of them needs a CUDA toolkit and many minutes.
  DS_BUILD_OPS=0 "$PYTHON" -m pip install --quiet --no-build-isolation --requirement "$REPO_ROOT/requirements.txt" ||
    die "pip could not install requirements.txt" "Its own message is above; INSTALL=0 leaves the packages to you"
}

set_up() {
  [[ -e $MEGATRON_DIR ]] || clone
  engine_state
  if [[ $REPLY == changed ]]; then
    make_pristine "$1"
    engine_state
  fi
  case $REPLY in
    unpatched) apply_patches "${SERIES[@]}" ;;
    megatron_t5_fixes) apply_patches "${SERIES[@]:1}" ;;
    changed)
      # What git ignores, or was told to overlook, is not stashed.
      differing_files >&2
      die "$MEGATRON_DIR holds what is not of commit $MEGATRON_COMMIT (above)" "Remove it yourself, or name another MEGATRON_DIR"
      ;;
  esac
  ((INSTALL == 0)) || install_requirements
  check
}

write_checksums() {
  local work state
  work=$(mktemp -d)
  # shellcheck disable=SC2064 # the name is known now, and the variable gone when the trap runs
  trap "rm -rf -- $(printf '%q' "$work")" EXIT
  git clone --quiet --shared --no-checkout -- "$MEGATRON_DIR" "$work/engine"
  git -C "$work/engine" checkout --quiet "$MEGATRON_COMMIT"
  mkdir -p -- "$CHECKSUMS"
  for state in unpatched megatron_t5_fixes series; do
    case $state in
      megatron_t5_fixes) git -C "$work/engine" apply -- "$PATCHES/${SERIES[0]}" ;;
      series) git -C "$work/engine" apply -- "${SERIES[@]/#/$PATCHES/}" ;;
    esac
    mapfile -t files < <(engine_files "$work/engine")
    (cd -- "$work/engine" && sha256sum -- "${files[@]}") >"$CHECKSUMS/$state.sha256"
    git -C "$work/engine" checkout --quiet -- . && git -C "$work/engine" clean --quiet --force
  done
}

main() {
  command -v git >/dev/null || die "git is not installed"
  read_series
  require_python
  (($# <= 1)) || die "one option at most is expected, found: $*"
  check_settings
  case ${1:-} in
    '') set_up 0 ;;
    --reset) set_up 1 ;;
    --check) check ;;
    --write-checksums) write_checksums ;;
    -h | --help) print_help ;;
    *) die "unknown option '$1'" "see bash scripts/setup_megatron.sh --help" ;;
  esac
}

main "$@"
