# shellcheck shell=bash
# shellcheck disable=SC2034 # megatron_common.sh reads what is set here
# T5, an encoder and a decoder. megatron_common.sh describes this file's contents.

#                 layers (enc dec)  hidden  heads  FFN   lengths (enc dec)
declare -rA MODEL_PRESETS=(
  [tiny]="         2   2             64      4     128   128 64"
  [small]="        6   6            512      8    1024   512 128"
  [base]="        12  12            768     12    2048   512 128"
  [large]="       24  24           1024     16    2816   512 128"
)
FAMILY_PROGRAM=pretrain_t5.py FAMILY_FIXED=(--tokenizer-type HFTokenizer)

declare_model() {
  local enc dec hidden heads ffn enc_length dec_length
  read -r enc dec hidden heads ffn enc_length dec_length <<<"$1"
  setting ENCODER_NUM_LAYERS whole:1:10000 model --encoder-num-layers "$enc" "Encoder depth"
  setting DECODER_NUM_LAYERS whole:1:10000 model --decoder-num-layers "$dec" "Decoder depth"
  setting HIDDEN_SIZE whole:1 model --hidden-size "$hidden" "Hidden dimension"
  setting NUM_ATTENTION_HEADS whole:1 model --num-attention-heads "$heads" "Attention heads"
  setting FFN_HIDDEN_SIZE whole:1 model --ffn-hidden-size "$ffn" "FFN intermediate size"
  setting ENCODER_SEQ_LENGTH whole:1 model --encoder-seq-length "$enc_length" "Encoder input length"
  setting DECODER_SEQ_LENGTH whole:1 model --decoder-seq-length "$dec_length" "Decoder output length"
}

longest_sequence() { REPLY=$((ENCODER_SEQ_LENGTH > DECODER_SEQ_LENGTH ? ENCODER_SEQ_LENGTH : DECODER_SEQ_LENGTH)); }

tokenizer_arguments() { REPLY=(--tokenizer-model "${PLAN[tokenizer]}"); }
