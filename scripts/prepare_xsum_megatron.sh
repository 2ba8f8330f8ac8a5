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

setting MODEL_FAMILY "one-of:$FAMILY_NAMES" - - t5 "Model family; each has its own tokenizer"
setting SAMPLE 'one-of:0|1' - - 0 "1 uses the articles and the tokenizer in megatron_data/sample; needs no network"
setting MEGATRON_DATA_DIR path - - "$FAMILY_DATA" "Directory to write to; a relative path starts at the current directory, the default at the repository"
setting XSUM_SOURCE path? - - "" "Local JSONL or Parquet file with the columns document and summary, or text; a directory of such files; or a pattern, as in 'data/*.jsonl' (unset: EdinburghNLP/xsum from the hub)"
setting XSUM_SPLIT text - - train "Split of the hub's dataset: train, validation or test"
setting XSUM_LIMIT whole:1? - - "" "Stop after this many documents (unset: all)"
setting TOKENIZER_MODEL text? - - "" "Hugging Face name or directory of a tokenizer (unset: $DEFAULT_TOKENIZER; for gpt, GPT-2's from the engine's checkout)"
setting MEGATRON_DIR path - - "$REPO_ROOT/../Megatron-DeepSpeed" "Path to your Megatron-DeepSpeed checkout, for GPT-2's tokenizer"
setting FORCE 'one-of:0|1' - - 0 "1 exports again, and replaces data from another source or tokenizer"
setting WORKERS whole:1? - - "" "Tokenising processes (unset: one per processor)"
setting PYTHON text - - python3 "The Python that has the packages of requirements.txt"

command -v "$PYTHON" >/dev/null || [[ $PYTHON != python3 ]] || PYTHON=python
begin "" "$@"
if ((SAMPLE)); then
  [[ -z $XSUM_SOURCE$TOKENIZER_MODEL ]] ||
    die "SAMPLE=1 uses the bundled articles and tokenizer, but found${XSUM_SOURCE:+ XSUM_SOURCE=$XSUM_SOURCE}${TOKENIZER_MODEL:+ TOKENIZER_MODEL=$TOKENIZER_MODEL}" \
      "Unset one of them; to use the sample with another tokenizer, set XSUM_SOURCE='$REPO_ROOT/megatron_data/sample/articles.jsonl'"
  XSUM_SOURCE=$REPO_ROOT/megatron_data/sample/articles.jsonl
  [[ $MODEL_FAMILY != t5 ]] || TOKENIZER_MODEL=$REPO_ROOT/megatron_data/sample/tokenizer
  export HF_HUB_OFFLINE=1
fi
if [[ -z $TOKENIZER_MODEL && $MODEL_FAMILY != t5 ]]; then
  TOKENIZER_MODEL=$MEGATRON_DIR/examples_deepspeed/rebase
  [[ -f $TOKENIZER_MODEL/gpt2-vocab.json ]] ||
    die "there is no GPT-2 tokenizer in the engine's checkout $MEGATRON_DIR" "Run: bash '$REPO_ROOT/scripts/setup_megatron.sh', or set TOKENIZER_MODEL"
fi
TOKENIZER_MODEL=${TOKENIZER_MODEL:-$DEFAULT_TOKENIZER}
[[ ! -d $TOKENIZER_MODEL ]] || TOKENIZER_MODEL=$(cd -- "$TOKENIZER_MODEL" && pwd)
export "${SETTING_NAMES[@]}"
# Not python_module: a signal to this script must reach Python.
cd -- "$REPO_ROOT" && exec "$PYTHON" -m t5bench prepare-data
