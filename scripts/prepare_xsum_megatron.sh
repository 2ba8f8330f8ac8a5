#!/usr/bin/env bash
# XSum, or the bundled sample, as the indexed dataset that every strategy trains on.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

SAMPLE_DIR=$REPO_ROOT/megatron_data/sample

declare_settings() {
  setting SAMPLE 'one-of:0|1' - - 0 "1 takes the articles and the tokenizer in megatron_data/sample, without any network"
  setting MEGATRON_DATA_DIR path - - "$REPO_ROOT/megatron_data" "Directory to write to; a relative path counts from the current directory, the default from the repository"
  setting XSUM_SOURCE text? - - "" "Local .jsonl or .parquet with the columns document and summary (unset: EdinburghNLP/xsum from the hub)"
  setting XSUM_SPLIT text - - train "Split of the hub's dataset: train, validation or test"
  setting XSUM_LIMIT whole:1? - - "" "Stop after this many documents (unset: all)"
  setting TOKENIZER_MODEL text? - - "" "Hugging Face name or directory of a T5 tokenizer (unset: $DEFAULT_TOKENIZER)"
  setting FORCE 'one-of:0|1' - - 0 "1 exports again, and replaces data that came from another source or tokenizer"
  setting WORKERS whole:1? - - "" "Threads that tokenise (unset: as many as there are processors, at most 8)"
  setting PYTHON text - - python3 "The Python that has the packages of requirements.txt"
}

usage() {
  cat <<HELP
Usage: bash scripts/${0##*/} [--help]

Writes into MEGATRON_DATA_DIR, all of it or, when anything fails, nothing:
  xsum_text.jsonl                  the articles, one {"text", "summary", "id"} per line; xsum_text.meta.json says whence
  xsum_text_document.bin, .idx     their token ids as Megatron's indexed dataset, one </s> at the end of each document
  xsum_text_document.meta.json     source, tokenizer, counts, checksums, versions and date
  tokenizer/                       a copy of the tokenizer, so that training needs no hub

An xsum_text.jsonl that was exported from the same source, and whose local source has not changed since, is used again.
Data from another source or tokenizer are not replaced unless FORCE=1.

Settings, from the environment (name, default, meaning):
HELP
  print_settings
}

check_source() {
  DATA_DIR=${MEGATRON_DATA_DIR%/}
  if ((SAMPLE)); then
    [[ -z $XSUM_SOURCE$TOKENIZER_MODEL ]] ||
      die "SAMPLE=1 takes the bundled articles and tokenizer, but ${XSUM_SOURCE:+XSUM_SOURCE}${TOKENIZER_MODEL:+ TOKENIZER_MODEL} is set as well" \
        "Unset one or the other; XSUM_SOURCE='$SAMPLE_DIR/articles.jsonl' is the sample with another tokenizer"
    XSUM_SOURCE=$SAMPLE_DIR/articles.jsonl
    TOKENIZER_MODEL=$SAMPLE_DIR/tokenizer
    export HF_HUB_OFFLINE=1
  fi
  TOKENIZER_MODEL=${TOKENIZER_MODEL:-$DEFAULT_TOKENIZER}
}

check_python() {
  command -v "$PYTHON" >/dev/null || [[ $PYTHON != python3 ]] || PYTHON=python
  command -v "$PYTHON" >/dev/null || die "there is no '$PYTHON' on PATH" "Activate the environment that has transformers, or set PYTHON"
  local packages=(numpy sentencepiece transformers tqdm) missing
  [[ -n $XSUM_SOURCE ]] || packages+=(datasets)
  [[ $XSUM_SOURCE != *.parquet ]] || packages+=(pyarrow)
  missing=$("$PYTHON" -c 'import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None), sep=", ")' "${packages[@]}") ||
    die "$PYTHON does not run" "Set PYTHON to a working Python 3.10, 3.11 or 3.12"
  [[ -z $missing ]] || die "$PYTHON lacks $missing" "Run: pip install -r '$REPO_ROOT/requirements.txt'"
}

# ---- staging: everything is written to a directory inside the target's file system and renamed at the end -----------

# The directory is also the lock: only one run can make it.
claim_staging() {
  STAGING=$DATA_DIR/.prepare
  CREATED_DATA_DIR=0
  if [[ ! -d $DATA_DIR ]]; then
    mkdir -p -- "$DATA_DIR" 2>/dev/null || die "$DATA_DIR cannot be created" "Set MEGATRON_DATA_DIR to a place that can be written"
    CREATED_DATA_DIR=1
  fi
  if ! mkdir -- "$STAGING" 2>/dev/null; then
    [[ -d $STAGING ]] || die "$DATA_DIR cannot be written" "Set MEGATRON_DATA_DIR to a place that can be"
    refuse_living_owner
    rm -rf -- "$STAGING"
    mkdir -- "$STAGING"
  fi
  trap release_staging EXIT
  printf '%s %s\n' "$$" "${HOSTNAME:-unnamed}" >"$STAGING/owner"
}

refuse_living_owner() {
  local pid='' host=''
  [[ ! -r $STAGING/owner ]] || read -r pid host <"$STAGING/owner" || true
  if [[ -n $host && $host != "${HOSTNAME:-unnamed}" ]]; then
    die "process $pid on $host is preparing data in $DATA_DIR" "Wait for it; if it no longer runs, remove $STAGING"
  fi
  if [[ -n $pid ]] && kill -0 "$pid" 2>/dev/null; then
    die "process $pid is preparing data in $DATA_DIR" "Wait for it, or end it"
  fi
}

release_staging() {
  rm -rf -- "$STAGING"
  ((! CREATED_DATA_DIR)) || rmdir -- "$DATA_DIR" 2>/dev/null || true
}

# A child in the background: the shell then hears INT and TERM at once and ends the child before it cleans up.
run_step() {
  local status=0
  "$@" &
  wait "$!" || status=$?
  ((status == 0)) || exit "$status"
}

interrupted() {
  local children
  mapfile -t children < <(jobs -p)
  if ((${#children[@]})); then
    kill -TERM "${children[@]}" 2>/dev/null || true
    wait "${children[@]}" 2>/dev/null || true
  fi
  note "interrupted: nothing in $DATA_DIR was changed"
  exit "$((128 + $1))"
}

# ---- the steps -----------------------------------------------------------------------------------------------------

export_articles() {
  ARTICLES=$DATA_DIR/xsum_text.jsonl
  if ((! FORCE)) && "${EXPORT[@]}" --is-current --output "$ARTICLES"; then
    note "Using $ARTICLES, exported earlier from the same source (FORCE=1 exports again)"
    return
  fi
  note "Exporting: $SOURCE"
  ARTICLES=$STAGING/xsum_text.jsonl
  run_step "${EXPORT[@]}" --output "$ARTICLES" >/dev/null
}

tokenise_articles() {
  note "Tokenising with $TOKENIZER_MODEL"
  local arguments=(--input "$ARTICLES" --output-prefix "$STAGING/xsum_text_document" --tokenizer "$TOKENIZER_MODEL"
    --tokenizer-copy "$STAGING/tokenizer")
  [[ -z $WORKERS ]] || arguments+=(--workers "$WORKERS")
  run_step "${BUILD[@]}" "${arguments[@]}"
}

publish() {
  trap '' INT TERM HUP
  # The engine names its index maps after the run's settings, not after the data, and would use them with other data.
  local name suffix outdated=0
  for suffix in bin idx; do
    cmp -s -- "$STAGING/xsum_text_document.$suffix" "$PREFIX.$suffix" || outdated=1
  done
  ((! outdated)) || rm -f -- "$PREFIX"_*indexmap*.npy
  [[ ! -e $DATA_DIR/tokenizer ]] || mv -- "$DATA_DIR/tokenizer" "$STAGING/tokenizer.replaced"
  for name in tokenizer xsum_text.jsonl xsum_text.meta.json xsum_text_document.{bin,idx,meta.json}; do
    [[ ! -e $STAGING/$name ]] || mv -f -- "$STAGING/$name" "$DATA_DIR/$name"
  done
}

tell_next_command() {
  local launcher=scripts/run_megatron_t5_ddp.sh directory='' preset=''
  [[ $PWD -ef $REPO_ROOT ]] || printf -v launcher '%q' "$REPO_ROOT/$launcher"
  [[ $DATA_DIR -ef $REPO_ROOT/megatron_data ]] || printf -v directory 'MEGATRON_DATA_DIR=%q ' "$DATA_DIR"
  ((! SAMPLE)) || preset='MODEL_PRESET=tiny '
  printf 'Written to %s. Next:\n  %s%sbash %s\n' "$DATA_DIR" "$directory" "$preset" "$launcher"
  ((! SAMPLE)) || return 0
  local quoted
  printf -v quoted '%q' "$DATA_DIR"
  printf 'Nodes that do not share this file system need a copy in the same place, for example:\n'
  # shellcheck disable=SC2016 # NODE1 is for the reader's shell
  printf '  scp -r %s/{xsum_text_document.{bin,idx,meta.json},tokenizer} "${NODE1}":%s/\n' "$quoted" "$quoted"
}

main() {
  declare_settings
  case ${1:-} in
    '') ;;
    -h | --help)
      usage
      return
      ;;
    *) die "unknown argument '$1'" "Settings come from the environment: see --help" ;;
  esac
  check_settings
  check_source
  check_python
  PREFIX=$DATA_DIR/xsum_text_document
  EXPORT=("$PYTHON" -m t5bench.corpus.export "--source=$XSUM_SOURCE" "--split=$XSUM_SPLIT")
  [[ -z $XSUM_LIMIT ]] || EXPORT+=(--limit "$XSUM_LIMIT")
  BUILD=("$PYTHON" -m t5bench.corpus.build)
  SOURCE=$("${EXPORT[@]}" --print-source) || exit "$?"
  ((FORCE)) || "${BUILD[@]}" --only-replace "$SOURCE" --input "$DATA_DIR/xsum_text.jsonl" --output-prefix "$PREFIX" \
    --tokenizer "$TOKENIZER_MODEL" || exit "$?"
  claim_staging
  trap 'interrupted 2' INT
  trap 'interrupted 15' TERM
  trap 'interrupted 1' HUP
  export_articles
  tokenise_articles
  publish
  tell_next_command
}

main "$@"
