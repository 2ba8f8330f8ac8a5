#!/usr/bin/env bash
# Turns XSum, or the bundled sample, into the indexed dataset that every strategy trains on.
#
# Usage: bash scripts/prepare_xsum_megatron.sh [--help]
#
# Writes these files to MEGATRON_DATA_DIR, or none of them if anything fails:
#   xsum_text.jsonl                the articles, one {"text", "summary", "id"} per line
#   xsum_text.meta.json            their source
#   xsum_text_document.bin, .idx   their token ids as Megatron's indexed dataset; each document ends
#                                  with one </s> (gpt: <|endoftext|>)
#   xsum_text_document.meta.json   source, tokenizer, counts, checksums, versions and date
#   tokenizer/                     a copy of the tokenizer, so that training needs no hub
#
# An earlier xsum_text.jsonl from the same, unchanged source is reused. Data from another source or
# tokenizer are replaced only with FORCE=1. After an interruption, the same command continues.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

command -v "$PYTHON" >/dev/null || [[ $PYTHON != python3 ]] || PYTHON=python
begin "" "$@"
if ((SAMPLE)); then
  [[ -z $XSUM_SOURCE$TOKENIZER_MODEL ]] ||
    die "SAMPLE=1 uses the bundled articles and tokenizer, but found${XSUM_SOURCE:+ XSUM_SOURCE=$XSUM_SOURCE}${TOKENIZER_MODEL:+ TOKENIZER_MODEL=$TOKENIZER_MODEL}" \
      "Unset one of them; to use the sample with another tokenizer, set XSUM_SOURCE='$REPO_ROOT/megatron_data/sample/articles.jsonl'"
  XSUM_SOURCE=$REPO_ROOT/megatron_data/sample/articles.jsonl
  # A model of a config.json may have any tokenizer with fewer words than it has.
  [[ $MODEL_FAMILY != t5 && -z ${MODEL:-} ]] || TOKENIZER_MODEL=$REPO_ROOT/megatron_data/sample/tokenizer
  export HF_HUB_OFFLINE=1
fi
if [[ -z $TOKENIZER_MODEL && $MODEL_FAMILY != t5 ]]; then
  TOKENIZER_MODEL=$MEGATRON_DIR/examples_deepspeed/rebase
  [[ -f $TOKENIZER_MODEL/gpt2-vocab.json ]] ||
    die "there is no GPT-2 tokenizer in the engine's checkout $MEGATRON_DIR" "Run: bash '$REPO_ROOT/scripts/setup_megatron.sh', or set TOKENIZER_MODEL"
fi
TOKENIZER_MODEL=${TOKENIZER_MODEL:-$DEFAULT_TOKENIZER}
[[ ! -d $TOKENIZER_MODEL ]] || TOKENIZER_MODEL=$(cd -- "$TOKENIZER_MODEL" && pwd)
export MODEL_FAMILY SAMPLE MEGATRON_DATA_DIR XSUM_SOURCE TEXT_COLUMN XSUM_SPLIT XSUM_LIMIT TOKENIZER_MODEL MEGATRON_DIR FORCE WORKERS
# Not python_module: a signal to this script must reach Python.
cd -- "$REPO_ROOT" && exec "$PYTHON" -m t5bench prepare-data
