# shellcheck shell=bash
# shellcheck disable=SC2034 # megatron_common.sh reads what is set here
# GPT-2, a decoder without an encoder. megatron_common.sh describes this file's contents.

#                 layers  hidden  heads  FFN   length
declare -rA MODEL_PRESETS=(
  [tiny]="         4       64      4     128   128"
  [small]="        6      512      8    2048   512"
  [base]="        12      768     12    3072  1024"
  [large]="       24     1024     16    4096  1024"
)
FAMILY_PROGRAM=pretrain_gpt.py FAMILY_FIXED=()

declare_model() {
  local layers hidden heads ffn length
  read -r layers hidden heads ffn length <<<"$1"
  setting NUM_LAYERS whole:1:10000 model --num-layers "$layers" "Depth"
  setting HIDDEN_SIZE whole:1 model --hidden-size "$hidden" "Hidden dimension"
  setting NUM_ATTENTION_HEADS whole:1 model --num-attention-heads "$heads" "Attention heads"
  setting FFN_HIDDEN_SIZE whole:1 model --ffn-hidden-size "$ffn" "FFN intermediate size"
  setting SEQ_LENGTH whole:1 model --seq-length "$length" "Sequence length"
}

longest_sequence() { REPLY=$SEQ_LENGTH; }

# GPT-2's own vocabulary or a Hugging Face tokenizer, as for the data.
tokenizer_arguments() {
  REPLY=(--tokenizer-type "${PLAN[tokenizer_type]}" --tokenizer-model "${PLAN[tokenizer]}")
  [[ ${PLAN[tokenizer_type]} != GPT2BPETokenizer ]] || REPLY=(--tokenizer-type GPT2BPETokenizer
    --vocab-file "${PLAN[tokenizer]}/vocab.json" --merge-file "${PLAN[tokenizer]}/merges.txt")
}
