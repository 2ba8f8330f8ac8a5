#!/usr/bin/env bash
# Sets up Megatron-DeepSpeed: the pinned commit, the patches, and the Python packages that it needs.
#
# Usage: bash scripts/setup_megatron.sh [--check | --reset | --write-checksums | --help]
#
# Clones Megatron-DeepSpeed, applies patches/series and installs requirements.txt. You can run it
# again at any time: completed steps are skipped.
#   --check            change nothing; report what is missing or differs, and then exit with 1
#   --reset            `git stash` your own changes in the checkout, then set it up
#   --write-checksums  for maintainers: update patches/checksums after changing a patch
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

# The newest commit when the patches were written; the checksums in patches/checksums are of this one.
readonly MEGATRON_COMMIT=4efb479d5317ce9b86096b9d8e3e8030b0b5263b

readonly PATCHES=$REPO_ROOT/patches
mapfile -t SERIES <"$PATCHES/series"

SCRATCH=''
trap '[[ -z $SCRATCH ]] || rm -rf -- "$SCRATCH"' EXIT

megatron_git() { git -C "$MEGATRON_DIR" "$@"; }

# Prints unpatched, megatron_t5_fixes, series, changed, or missing if there is no checkout.
engine_state() { python_module t5bench.plan.engine state "$MEGATRON_DIR"; }

# To stderr, one a line.
name_differences() { python_module t5bench.plan.engine differences "$MEGATRON_DIR" >&2; }

check() {
  local commit
  commit=$(megatron_git rev-parse HEAD 2>/dev/null) || commit='unknown (git reads none)'
  case $(engine_state) in
    series) note "ok: $MEGATRON_DIR holds Megatron-DeepSpeed ${MEGATRON_COMMIT:0:8} with all ${#SERIES[@]} patches" && return 0 ;;
    megatron_t5_fixes) note "incomplete: only megatron_t5_fixes.patch is applied; missing: ${SERIES[*]:1}" ;;
    missing) note "missing: there is no Megatron-DeepSpeed checkout at $MEGATRON_DIR" ;;
    unpatched) note "unpatched: none of these is applied: ${SERIES[*]}" ;;
    changed)
      note "differs: $MEGATRON_DIR is at commit $commit (wanted: $MEGATRON_COMMIT); differences from the patched engine:"
      name_differences
      ;;
  esac
  return 1
}

clone() {
  note "cloning $MEGATRON_REPO to $MEGATRON_DIR"
  SCRATCH=$MEGATRON_DIR.partial.$$
  git clone --no-checkout -- "$MEGATRON_REPO" "$SCRATCH" ||
    die "cannot clone $MEGATRON_REPO" "Without internet: MEGATRON_REPO=/path/to/a/clone bash scripts/setup_megatron.sh"
  git -C "$SCRATCH" checkout --quiet "$MEGATRON_COMMIT" ||
    die "$MEGATRON_REPO does not hold commit $MEGATRON_COMMIT" "Update that clone (git fetch), or set another MEGATRON_REPO"
  mv -- "$SCRATCH" "$MEGATRON_DIR"
}

# A checkout of another commit, or with changes, is never discarded; on request its changes are stashed.
make_pristine() {
  local changes
  changes=$(megatron_git status --porcelain) || die "git cannot use $MEGATRON_DIR" "Set another MEGATRON_DIR"
  if [[ -n $changes ]] && (($1)); then
    megatron_git stash push --quiet --include-untracked --message "stashed by setup_megatron.sh" ||
      die "git cannot stash your changes in $MEGATRON_DIR" "Stash or commit them by hand, which shows why"
    note "your changes are in: git -C '$MEGATRON_DIR' stash list"
  elif [[ -n $changes ]]; then
    name_differences
    die "$MEGATRON_DIR holds changes that these patches did not make (differences from the patched engine are listed above)" \
      "bash scripts/setup_megatron.sh --reset stashes them (git stash), or set another MEGATRON_DIR"
  fi
  if ! megatron_git cat-file -e "$MEGATRON_COMMIT^{commit}" 2>/dev/null; then
    note "fetching commit ${MEGATRON_COMMIT:0:8} from $MEGATRON_REPO"
    megatron_git fetch -- "$MEGATRON_REPO" ||
      die "cannot fetch commit $MEGATRON_COMMIT from $MEGATRON_REPO" "Set MEGATRON_REPO to a clone that has it"
  fi
  megatron_git checkout --quiet --detach "$MEGATRON_COMMIT"
}

# The patches go in together or not at all.
apply_patches() {
  (cd -- "$MEGATRON_DIR" && git apply -- "${@/#/$PATCHES/}") || die "the patches do not apply to $MEGATRON_DIR" \
    "bash scripts/setup_megatron.sh --check shows what differs"
}

install_requirements() {
  note "installing requirements.txt with $PYTHON"
  "$PYTHON" -c 'import torch' 2>/dev/null || die "$PYTHON has no torch" "Install torch first (README, step 3), then run this again"
  # Operators are compiled when first used: a build of all of them needs a CUDA toolkit and many minutes.
  DS_BUILD_OPS=0 "$PYTHON" -m pip install --no-build-isolation --requirement "$REPO_ROOT/requirements.txt" ||
    die "pip could not install requirements.txt" "See its message above, or install the packages yourself and set INSTALL=0"
}

set_up() {
  [[ -e $MEGATRON_DIR ]] || clone
  [[ $(engine_state) != changed ]] || make_pristine "$1"
  case $(engine_state) in
    unpatched) apply_patches "${SERIES[@]}" ;;
    megatron_t5_fixes) apply_patches "${SERIES[@]:1}" ;;
    missing) die "$MEGATRON_DIR exists, but holds no Megatron-DeepSpeed checkout" "Remove it, or set another MEGATRON_DIR" ;;
    changed)
      # git stashes neither ignored files nor those it was told to overlook.
      name_differences
      die "$MEGATRON_DIR holds files that are not part of commit $MEGATRON_COMMIT (listed above)" "Remove them yourself, or set another MEGATRON_DIR"
      ;;
  esac
  ((INSTALL == 0)) || install_requirements
  check
}

write_checksums() {
  local state rest=("${SERIES[@]:1}")
  SCRATCH=$(mktemp -d)
  git clone --quiet --shared --no-checkout -- "$MEGATRON_DIR" "$SCRATCH"
  cd -- "$SCRATCH"
  git checkout --quiet "$MEGATRON_COMMIT"
  mkdir -p -- "$PATCHES/checksums"
  for state in unpatched megatron_t5_fixes series; do
    case $state in
      megatron_t5_fixes) git apply -- "$PATCHES/${SERIES[0]}" ;;
      series) git apply -- "${rest[@]/#/$PATCHES/}" ;;
    esac
    # Everything that decides how the engine trains: what it imports or compiles, and what could be imported from its
    # folder, which goes on PYTHONPATH.
    git ls-files -z --cached --others --exclude-standard -- megatron/data/Makefile tools/preprocess_data.py \
      'megatron/*.py' 'megatron/*.cpp' 'megatron/*.cu' 'megatron/*.h' ':(glob)*.py' ':(glob)*/__init__.py' |
      xargs -0 sha256sum -- >"$PATCHES/checksums/$state.sha256"
  done
}

begin '--check --reset --write-checksums' "$@"
[[ ${1:-} == --check ]] || command -v git >/dev/null || die "git is not installed" "Install it, then run this again"
# A copy of the engine without a .git may lie in another repository, whose files git would stash and patch instead.
GIT_CEILING_DIRECTORIES=$(dirname -- "$(realpath -m -- "$MEGATRON_DIR")")
export GIT_CEILING_DIRECTORIES
case $* in
  '') set_up 0 ;;
  --reset) set_up 1 ;;
  --check) check ;;
  --write-checksums) write_checksums ;;
  *) die "expected at most one option, found: $*" ;;
esac
