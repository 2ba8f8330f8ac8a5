# shellcheck shell=bash
# The virtual environment in the checkout (.venv) that the quickstart and the tests use. Sourced, after common.sh.

# A CPU build of this release is enough for everything but GPUs; a torch that the base Python already has is used instead.
readonly TORCH_REQUIREMENT="torch==2.13.0"
readonly VENV=$REPO_ROOT/.venv

# ensure_venv REQUIREMENTS-FILE...: makes or completes .venv, and makes it this shell's Python. Done before: no work.
ensure_venv() {
  check_base_python
  local stamp
  stamp=$(cat -- "$@" | sha256sum)-$("$PYTHON" -c 'import sys; print(sys.version)')
  if [[ ! -s $VENV/complete || $(<"$VENV/complete") != *"$stamp"* ]]; then
    make_venv
    install_into_venv "$@"
    printf '%s\n' "$stamp" >>"$VENV/complete"
  fi
  export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH
  PYTHON=$VENV/bin/python
  # With a torch of the base Python there is none of this environment's.
  [[ -x $VENV/bin/torchrun ]] || write_torchrun "$VENV/bin"
}

check_base_python() {
  command -v "$PYTHON" >/dev/null || die "there is no '$PYTHON' on PATH" "Install Python 3.10, 3.11 or 3.12, or name one: PYTHON=/path/to/python3"
  "$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' ||
    die "$PYTHON is $("$PYTHON" --version 2>&1), and 3.10, 3.11 or 3.12 is needed" "Name one of those: PYTHON=/path/to/python3"
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$PYTHON has no venv module" "On Debian and Ubuntu: apt install python3-venv"
}

make_venv() {
  local options=()
  [[ ! -x $VENV/bin/python ]] || return 0
  if "$PYTHON" -c 'import torch' 2>/dev/null; then
    options=(--system-site-packages)
  fi
  note "making a virtual environment in ${VENV/#"$PWD/"/}"
  "$PYTHON" -m venv "${options[@]}" "$VENV" >"$REPO_ROOT/.venv.log" 2>&1 || explain_install_failure
  mv -- "$REPO_ROOT/.venv.log" "$VENV/install.log"
  ((${#options[@]} == 0)) || "$VENV/bin/python" -c 'import torch' 2>/dev/null || add_base_packages
}

# A base Python that is a virtual environment itself hands on those of its own base alone.
add_base_packages() {
  local site
  site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$PYTHON" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' >"$site/base.pth"
}

install_into_venv() {
  local file
  "$VENV/bin/python" -c 'import torch' 2>/dev/null || pip_install "$TORCH_REQUIREMENT" "$TORCH_REQUIREMENT"
  # DeepSpeed is built from source, without isolation so that it sees torch; its operators are compiled when first used.
  pip_install "build tools" setuptools wheel packaging
  for file in "$@"; do
    pip_install "${file##*/}" --no-build-isolation --requirement "$file"
  done
}

pip_install() {
  note "installing $1"
  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input \
    "${@:2}" >>"$VENV/install.log" 2>&1 || explain_install_failure
}

# The causes that a newcomer meets, each in one sentence.
explain_install_failure() {
  local log=$VENV/install.log
  [[ -e $log ]] || log=$REPO_ROOT/.venv.log
  if grep -q 'No space left on device' "$log"; then
    die "the disk is full: $(df -h --output=avail "$REPO_ROOT" | tail -n 1 | tr -d ' ') are free at $REPO_ROOT, about 4 GB are needed" \
      "Make room and run this again: it goes on where it stopped"
  elif grep -qE 'NewConnectionError|name resolution|Name or service not known|Connection refused|ConnectTimeout|unreachable|ProxyError|from versions: none' "$log"; then
    die "the Python package index cannot be reached" "Check the network (and pip's proxy or index settings), then run this again"
  fi
  tail -n 15 -- "$log" >&2
  die "installing the Python packages failed; the end of $log is above" "Mend what it says and run this again"
}
