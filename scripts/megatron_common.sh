# shellcheck shell=bash
# From a strategy's declaration to a running engine: settings, checks, the command line, the run directory.
#
# A launcher declares what makes its strategy itself and calls `run_strategy "$@"`:
#   STRATEGY            name; the run directory is outputs/<name> and the W&B run megatron-<name>
#   STRATEGY_TITLE      one line for people
#   STRATEGY_PORT       default rendezvous port, unique to the strategy
#   STRATEGY_TP, _PP    tensor- and pipeline-parallel sizes (1 when not declared); every further process is data parallel
#   STRATEGY_DS_CONFIG  the file in ds_configs/ that makes a ZeRO strategy
#   STRATEGY_FLAGS      array of further engine arguments

# shellcheck source=scripts/common.sh
source "${BASH_SOURCE[0]%/*}/common.sh"

STRATEGY_TP=1 STRATEGY_PP=1 STRATEGY_DS_CONFIG='' STRATEGY_FLAGS=()

# ---- settings: every one of them can be overridden from the environment --------------------------------------------

# The large preset is the benchmark; the others are the same architecture, smaller.
#                 layers (enc dec)  hidden  heads  FFN   lengths (enc dec)
declare -rA MODEL_PRESETS=(
  [tiny]="         2   2             64      4     128   128 64"
  [small]="        6   6            512      8    1024   512 128"
  [base]="        12  12            768     12    2048   512 128"
  [large]="       24  24           1024     16    2816   512 128"
)

engine_dir_setting() { setting MEGATRON_DIR "$REPO_ROOT/../Megatron-DeepSpeed" "Path to your Megatron-DeepSpeed checkout"; }

declare_settings() {
  local enc dec hidden heads ffn enc_length dec_length
  setting MODEL_PRESET large "Model size: tiny, small, base or large"
  require_one_of MODEL_PRESET tiny small base large
  read -r enc dec hidden heads ffn enc_length dec_length <<<"${MODEL_PRESETS[$MODEL_PRESET]}"

  # Where
  setting HOSTS "" "Node host names in rank order, separated by spaces (unset: SLURM's nodes, else this host alone)"
  setting NNODES "" "Number of nodes (unset: as many as HOSTS or SLURM names, 2 for a lone master host)"
  setting NPROC_PER_NODE "${GPUS_PER_NODE:-}" "Processes per node (unset: 2 processes in all, 4 for the hybrid); GPUS_PER_NODE is understood too"
  setting MASTER_PORT "$STRATEGY_PORT" "torchrun rendezvous port"
  setting DEVICE auto "auto, cuda or cpu; auto takes the GPUs where there are any"
  setting SHARE_GPUS 0 "1 lets more processes than GPUs share them over gloo: for correctness, never for speed (not with ZeRO)"
  setting ENGINE megatron "megatron (patched Megatron-DeepSpeed) or native (the engine in native/)"
  engine_dir_setting
  data_dir_setting
  setting TOKENIZER_MODEL "" "Hugging Face name or directory (unset: the tokenizer beside the data, else $DEFAULT_TOKENIZER)"
  setting OUTPUT_DIR "$REPO_ROOT/outputs/$STRATEGY" "Checkpoint and log directory"
  setting RESUME 0 "1 continues the run in OUTPUT_DIR from its newest whole checkpoint"

  # Model
  setting ENCODER_NUM_LAYERS "$enc" "Encoder depth"
  setting DECODER_NUM_LAYERS "$dec" "Decoder depth"
  setting HIDDEN_SIZE "$hidden" "Hidden dimension"
  setting NUM_ATTENTION_HEADS "$heads" "Attention heads"
  setting FFN_HIDDEN_SIZE "$ffn" "FFN intermediate size"
  setting ENCODER_SEQ_LENGTH "$enc_length" "Encoder input length"
  setting DECODER_SEQ_LENGTH "$dec_length" "Decoder output length"
  setting DROPOUT 0.1 "Dropout of hidden states and attention weights"
  setting FLASH_ATTENTION auto "auto, on or off; it serves the decoder's self-attention on CUDA in bf16 or fp16"

  # Training
  setting TRAIN_ITERS 1000 "Total training iterations"
  setting GLOBAL_BATCH_SIZE 16 "Global batch size"
  setting MICRO_BATCH_SIZE 1 "Per-GPU micro-batch size"
  setting PRECISION_FLAG --bf16 "--bf16, --fp16, or empty for fp32"
  setting LR 0.0001 "Peak learning rate"
  setting MIN_LR 0 "Learning rate at the end of the cosine"
  setting LR_WARMUP_ITERS 0 "Iterations of linear warm-up"
  setting WEIGHT_DECAY 0.01 "AdamW weight decay"
  setting CLIP_GRAD 1.0 "Gradient-norm clipping"
  setting GRADIENT_REDUCTION default "default, or fp32: ZeRO too reduces gradients in fp32, as DDP does, and not in the training precision"
  setting SEED 1234 "Seed of weights, data order and dropout"
  setting TENSOR_PARALLEL_SIZE "$STRATEGY_TP" "Tensor-parallel size, for the strategies that have one"
  setting PIPELINE_PARALLEL_SIZE "$STRATEGY_PP" "Pipeline-parallel size, for the strategies that have one"

  # Watching, saving, ending
  setting LOG_INTERVAL 20 "Iterations between log lines"
  setting EVAL_ITERS 0 "Validation batches per evaluation; 0 turns evaluation off, as a benchmark wants"
  setting EVAL_INTERVAL 1000 "Iterations between evaluations"
  setting SAVE_INTERVAL 0 "Iterations between checkpoints; 0 saves none"
  setting WANDB_PROJECT ml710-t5-parallelism "W&B project name"
  setting WANDB_RUN_NAME "megatron-$STRATEGY" "W&B run name"
  setting WANDB_RUN_GROUP "" "W&B group of the runs that are compared with each other"
  setting WANDB_API_KEY "" "Your W&B API key; without one the run is logged offline"
  setting WANDB_MODE "" "online, offline or disabled (unset: online with a key, else offline)"
  setting RENDEZVOUS_TIMEOUT 600 "Seconds that a node waits for the others"
  setting WATCHDOG_SECONDS 3600 "Seconds without an iteration line after which a run is ended, with every worker's stacks; 0: never"
  setting SAMPLE_INTERVAL 2 "Seconds between samples of the GPUs and the network counters"
  setting PROFILE_ITERATION 0 "An iteration to profile: profile.json says where its time went; 0 profiles none"
  setting PEAK_TFLOPS "" "The GPU's dense peak TFLOP/s, for the MFU (unset: by its name, where that is known)"
  setting DISTRIBUTED_TIMEOUT_MINUTES 10 "Minutes after which a stuck collective ends the run"
}

check_settings() {
  require_integers 1 ENCODER_NUM_LAYERS DECODER_NUM_LAYERS HIDDEN_SIZE NUM_ATTENTION_HEADS FFN_HIDDEN_SIZE \
    ENCODER_SEQ_LENGTH DECODER_SEQ_LENGTH TRAIN_ITERS GLOBAL_BATCH_SIZE MICRO_BATCH_SIZE LOG_INTERVAL EVAL_INTERVAL \
    TENSOR_PARALLEL_SIZE PIPELINE_PARALLEL_SIZE MASTER_PORT RENDEZVOUS_TIMEOUT DISTRIBUTED_TIMEOUT_MINUTES
  require_integers 0 SEED LR_WARMUP_ITERS EVAL_ITERS SAVE_INTERVAL WATCHDOG_SECONDS PROFILE_ITERATION
  require_numbers LR MIN_LR WEIGHT_DECAY CLIP_GRAD DROPOUT SAMPLE_INTERVAL
  require_one_of DEVICE auto cuda cpu
  require_one_of ENGINE megatron native
  require_one_of FLASH_ATTENTION auto on off
  require_one_of RESUME 0 1
  require_one_of SHARE_GPUS 0 1
  require_one_of GRADIENT_REDUCTION default fp32
  require_one_of PRECISION_FLAG --bf16 --fp16 ''
  [[ -z $PEAK_TFLOPS ]] || require_numbers PEAK_TFLOPS
  [[ -z $WANDB_MODE ]] || require_one_of WANDB_MODE online offline disabled
  ((PROFILE_ITERATION == 0 || (PROFILE_ITERATION >= 2 && PROFILE_ITERATION <= TRAIN_ITERS))) ||
    die "PROFILE_ITERATION must be from 2 to TRAIN_ITERS=$TRAIN_ITERS, found $PROFILE_ITERATION" "The first iteration is all warm-up; 0 profiles none"
  ((MASTER_PORT <= 65535)) || die "MASTER_PORT must be at most 65535, found $MASTER_PORT"
  absolute_path "$MEGATRON_DIR" && MEGATRON_DIR=$REPLY
  absolute_path "$MEGATRON_DATA_DIR" && MEGATRON_DATA_DIR=$REPLY
  absolute_path "$OUTPUT_DIR" && OUTPUT_DIR=$REPLY
}

# ---- device and parallel layout ------------------------------------------------------------------------------------

count_gpus() {
  GPU_COUNT=0
  if [[ -n ${CUDA_VISIBLE_DEVICES+given} ]]; then
    local devices
    IFS=, read -r -a devices <<<"$CUDA_VISIBLE_DEVICES"
    [[ ${devices[0]:--1} == -1 ]] || GPU_COUNT=${#devices[@]}
  elif command -v nvidia-smi >/dev/null; then
    GPU_COUNT=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
  fi
}

choose_device() {
  count_gpus
  if [[ $DEVICE == auto ]]; then
    DEVICE=cpu
    ((GPU_COUNT == 0)) || DEVICE=cuda
  fi
}

# NCCL takes one process a GPU, and so does DeepSpeed whatever the backend.
may_share_gpus() { ((SHARE_GPUS && GPU_COUNT > 0)) && [[ -z $STRATEGY_DS_CONFIG ]]; }

# Two processes compare the strategies (four the hybrid) unless told otherwise; a data-parallel strategy runs on one GPU too.
choose_process_count() {
  local model_parallel=$((TENSOR_PARALLEL_SIZE * PIPELINE_PARALLEL_SIZE)) wanted
  if [[ -z $NPROC_PER_NODE ]]; then
    wanted=$((model_parallel > 2 ? model_parallel : 2))
    NPROC_PER_NODE=$(((wanted + NNODES - 1) / NNODES))
    if [[ $DEVICE == cuda ]] && ((model_parallel == 1 && GPU_COUNT > 0 && NPROC_PER_NODE > GPU_COUNT)) && ! may_share_gpus; then
      NPROC_PER_NODE=$GPU_COUNT
    fi
  fi
  require_integers 1 NPROC_PER_NODE
  GPUS_SHARED=0
  if [[ $DEVICE == cuda ]] && ((NPROC_PER_NODE > GPU_COUNT)); then
    if may_share_gpus; then
      GPUS_SHARED=1
      warn "$NPROC_PER_NODE processes share $GPU_COUNT GPU(s) over gloo: what they compute can be trusted, how fast says nothing"
    else
      missing "NPROC_PER_NODE is $NPROC_PER_NODE but this node has $GPU_COUNT visible GPU(s)" \
        "$STRATEGY needs $model_parallel GPU(s) in all: set NNODES and NPROC_PER_NODE to what you have, or DEVICE=cpu"
    fi
  fi
  WORLD_SIZE=$((NNODES * NPROC_PER_NODE))
}

check_layout() {
  local tp=$TENSOR_PARALLEL_SIZE pp=$PIPELINE_PARALLEL_SIZE
  ((tp == 1 || STRATEGY_TP > 1)) || die "TENSOR_PARALLEL_SIZE is $tp but $STRATEGY has no tensor parallelism" \
    "Use run_megatron_t5_tensor.sh or run_megatron_t5_hybrid.sh"
  ((pp == 1 || STRATEGY_PP > 1)) || die "PIPELINE_PARALLEL_SIZE is $pp but $STRATEGY has no pipeline parallelism" \
    "Use run_megatron_t5_pipeline.sh or run_megatron_t5_hybrid.sh"
  ((WORLD_SIZE % (tp * pp) == 0)) || die \
    "$STRATEGY needs a multiple of $((tp * pp)) processes (TP=$tp x PP=$pp), found $WORLD_SIZE ($NNODES node(s) x $NPROC_PER_NODE)" \
    "Set NNODES and NPROC_PER_NODE so that their product is divisible by $((tp * pp))"
  DATA_PARALLEL_SIZE=$((WORLD_SIZE / (tp * pp)))

  local samples=$((MICRO_BATCH_SIZE * DATA_PARALLEL_SIZE))
  ((GLOBAL_BATCH_SIZE % samples == 0)) || die \
    "GLOBAL_BATCH_SIZE=$GLOBAL_BATCH_SIZE is not divisible by $samples (MICRO_BATCH_SIZE=$MICRO_BATCH_SIZE x data-parallel size $DATA_PARALLEL_SIZE)" \
    "Change GLOBAL_BATCH_SIZE or MICRO_BATCH_SIZE"
  MICRO_BATCHES=$((GLOBAL_BATCH_SIZE / samples))

  ((HIDDEN_SIZE % NUM_ATTENTION_HEADS == 0)) ||
    die "HIDDEN_SIZE=$HIDDEN_SIZE is not divisible by NUM_ATTENTION_HEADS=$NUM_ATTENTION_HEADS"
  ((NUM_ATTENTION_HEADS % tp == 0)) ||
    die "NUM_ATTENTION_HEADS=$NUM_ATTENTION_HEADS is not divisible by the tensor-parallel size $tp"
  ((FFN_HIDDEN_SIZE % tp == 0)) || die "FFN_HIDDEN_SIZE=$FFN_HIDDEN_SIZE is not divisible by the tensor-parallel size $tp"
  # Padding to a multiple of 128 in every layout: the engine multiplies its divisor by TP, which would change the model.
  ((128 % tp == 0)) || die "the tensor-parallel size must divide 128, the padding of the vocabulary; found $tp"
  VOCAB_DIVISOR=$((128 / tp))

  if ((pp > 1)); then
    ((pp % 2 == 0)) || die "the pipeline-parallel size must be even (half encoder, half decoder), found $pp"
    SPLIT_RANK=$((pp / 2))
    ((ENCODER_NUM_LAYERS % SPLIT_RANK == 0 && DECODER_NUM_LAYERS % SPLIT_RANK == 0)) || die \
      "$ENCODER_NUM_LAYERS encoder and $DECODER_NUM_LAYERS decoder layers do not divide over $SPLIT_RANK stages each"
  fi
}

# ---- engine, data and run directory --------------------------------------------------------------------------------

# What the checkout holds, by checksum: the whole series, or megatron_t5_fixes.patch alone, which suffices on CUDA.
check_engine() {
  ENGINE_PATCHES=series
  ENGINE_SCRIPT=$REPO_ROOT/native/pretrain_t5.py
  [[ $ENGINE == megatron ]] || return 0
  ENGINE_SCRIPT=$MEGATRON_DIR/pretrain_t5.py
  local setup="Run: MEGATRON_DIR='$MEGATRON_DIR' bash '$REPO_ROOT/scripts/setup_megatron.sh'"
  if [[ ! -f $ENGINE_SCRIPT ]]; then
    missing "there is no Megatron-DeepSpeed checkout at $MEGATRON_DIR" "$setup"
  elif ! engine_matches series; then
    if ! engine_matches megatron_t5_fixes; then
      missing "the Megatron-DeepSpeed checkout at $MEGATRON_DIR is not patched as patches/ says (--check tells how it differs)" "$setup"
    elif [[ $DEVICE == cpu ]]; then
      missing "the Megatron-DeepSpeed checkout at $MEGATRON_DIR has megatron_t5_fixes.patch alone, and CPU needs the whole series" "$setup"
    else
      ENGINE_PATCHES=megatron_t5_fixes
      ((GPUS_SHARED == 0)) || missing "SHARE_GPUS=1 needs the whole series of patches, and the checkout at $MEGATRON_DIR has megatron_t5_fixes.patch alone" "$setup"
      warn "only megatron_t5_fixes.patch is applied: no W&B keys by the README's names, TFLOPs of the encoder alone. $setup"
    fi
  fi
}

# engine_matches STATE: whether the checkout is as patches/checksums/STATE.sha256 says.
engine_matches() {
  (cd -- "$MEGATRON_DIR" && sha256sum --check --strict --status -- "$REPO_ROOT/patches/checksums/$1.sha256" 2>/dev/null)
}

choose_tokenizer() {
  if [[ -z $TOKENIZER_MODEL ]]; then
    TOKENIZER_MODEL=$DEFAULT_TOKENIZER
    [[ ! -d $MEGATRON_DATA_DIR/tokenizer ]] || TOKENIZER_MODEL=$MEGATRON_DATA_DIR/tokenizer
  elif [[ -d $TOKENIZER_MODEL ]]; then
    absolute_path "$TOKENIZER_MODEL" && TOKENIZER_MODEL=$REPLY
  fi
}

choose_wandb() {
  if [[ -z $WANDB_MODE ]]; then
    WANDB_MODE=offline
    if [[ -n $WANDB_API_KEY ]] || grep -qs 'api\.wandb\.ai' "${NETRC:-$HOME/.netrc}"; then
      WANDB_MODE=online
    else
      note "W&B: no WANDB_API_KEY, logging offline; upload later with: wandb sync '$OUTPUT_DIR'/wandb/offline-run-*"
    fi
  fi
}

# The iteration of the newest checkpoint, whole or not, or nothing.
last_checkpoint() {
  local path number
  REPLY=''
  for path in "$OUTPUT_DIR"/checkpoints/iter_[0-9]* "$OUTPUT_DIR"/checkpoints/global_step[0-9]*; do
    number=${path##*[!0-9]}
    [[ -z $number ]] || ((10#$number <= ${REPLY:-0})) || REPLY=$((10#$number))
  done
}

check_output_dir() {
  local status=none host='' pid=''
  [[ ! -s $OUTPUT_DIR/node$NODE_RANK.status ]] || read -r status host pid <"$OUTPUT_DIR/node$NODE_RANK.status" || true
  if [[ $status == running && $host == "${HOSTNAME:-}" ]] && kill -0 "$pid" 2>/dev/null; then
    missing "a run is going on in $OUTPUT_DIR (process $pid)" "Wait for it, end it, or choose another OUTPUT_DIR"
  fi
  if ((RESUME)); then
    look_at_checkpoints check && WHOLE_CHECKPOINT=$REPLY
    return 0
  fi
  local remedy="Choose another OUTPUT_DIR, continue it with RESUME=1, or delete it"
  [[ $status != complete ]] || missing "$OUTPUT_DIR holds a finished run, and nothing is overwritten" \
    "Choose another OUTPUT_DIR, or delete it"
  last_checkpoint
  [[ -z $REPLY ]] ||
    missing "$OUTPUT_DIR holds checkpoints of an earlier run (up to iteration $REPLY), and nothing is overwritten" "$remedy"
}

# look_at_checkpoints TASK [OPTION...]: what t5bench/record/checkpoints.py finds, an iteration, in REPLY.
look_at_checkpoints() {
  local report problem status=0
  require_python
  describe_run
  report=$("$PYTHON" -m t5bench.record.checkpoints "$1" \
    "${RUN_DESCRIPTION[@]}" ${STRATEGY_DS_CONFIG:+--ds-config "$REPO_ROOT/ds_configs/$STRATEGY_DS_CONFIG"} "${@:2}") || status=$?
  REPLY=$report
  ((status)) || return 0
  [[ $report == problem=* ]] || die "the checkpoints in $OUTPUT_DIR could not be checked (exit status $status)"
  REPLY=0 problem=${report%%$'\n'*}
  missing "${problem#problem=}" "${report#*$'\n'remedy=}"
}

# All nodes take the same checkpoint, and the engines find no other.
choose_checkpoint() {
  ((RESUME)) || return 0
  look_at_checkpoints choose --whole "$WHOLE_CHECKPOINT" --master-address "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    --seconds "$RENDEZVOUS_TIMEOUT"
  note "resuming from the checkpoint of iteration $REPLY"
}

require_python() {
  command -v "$PYTHON" >/dev/null || die "there is no '$PYTHON' on PATH" "Activate the environment that has torch, or set PYTHON"
}

# One Python process for what is easier there: the data's headers, library versions, the effective DeepSpeed JSON.
inspect_environment() {
  local key value
  FLASH_ATTENTION_VERSION='' DEEPSPEED_VERSION='' DS_CONFIG_TEXT='' ZERO_STAGE=0
  local arguments=(--data-prefix "$DATA_PREFIX" --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size "$GLOBAL_BATCH_SIZE" --clip-grad "$CLIP_GRAD" "--precision=$PRECISION_FLAG"
    --gradient-reduction "$GRADIENT_REDUCTION")
  [[ -z $STRATEGY_DS_CONFIG ]] || arguments+=(--ds-config "$REPO_ROOT/ds_configs/$STRATEGY_DS_CONFIG")
  require_python
  local report
  report=$("$PYTHON" -m t5bench.plan.inspect_environment "${arguments[@]}") || exit "$?"
  while IFS='=' read -r key value; do
    case $key in
      data_problem) missing "$value" "Run: bash '$REPO_ROOT/scripts/prepare_xsum_megatron.sh'   (SAMPLE=1 for the bundled sample)" ;;
      flash_attention) FLASH_ATTENTION_VERSION=$value ;;
      deepspeed) DEEPSPEED_VERSION=$value ;;
      zero_stage) ZERO_STAGE=$value ;;
      ds_config) DS_CONFIG_TEXT+=$value$'\n' ;;
      *) die "inspect_environment.py reported '$key', which nothing here knows" ;;
    esac
  done <<<"$report"
}

# Releases in which each micro-batch of ZeRO-2 overwrites the gradients of the one before (DeepSpeed issue 7718).
check_deepspeed() {
  [[ -n $STRATEGY_DS_CONFIG ]] || return 0
  [[ -n $DEEPSPEED_VERSION ]] || {
    missing "DeepSpeed is not installed for $PYTHON" "Run: pip install -r '$REPO_ROOT/requirements.txt'"
    return 0
  }
  if [[ $ZERO_STAGE == 2 && $DEEPSPEED_VERSION =~ ^(0\.17\.6|0\.18\.[0-2])([^0-9].*)?$ ]] && ((MICRO_BATCHES > 1)); then
    die "DeepSpeed $DEEPSPEED_VERSION trains ZeRO-2 on only the last of the $MICRO_BATCHES micro-batches of an iteration" \
      "Install the pinned release: pip install -r '$REPO_ROOT/requirements.txt'"
  fi
}

# ---- the command line ----------------------------------------------------------------------------------------------

choose_attention() {
  local reason=''
  if [[ $ENGINE == native ]]; then
    note "attention: PyTorch scaled_dot_product_attention"
    USE_FLASH_ATTENTION=0
    return 0
  fi
  [[ $DEVICE == cuda ]] || reason="no CUDA"
  [[ -n $PRECISION_FLAG ]] || reason="fp32"
  [[ -n $FLASH_ATTENTION_VERSION ]] || reason="flash-attn is not installed"
  [[ $FLASH_ATTENTION != off ]] || reason="FLASH_ATTENTION=off"
  USE_FLASH_ATTENTION=0
  if [[ -z $reason ]]; then
    USE_FLASH_ATTENTION=1
    note "attention: flash-attn $FLASH_ATTENTION_VERSION in the decoder's self-attention, standard in encoder and cross-attention"
  elif [[ $FLASH_ATTENTION == on ]]; then
    missing "FLASH_ATTENTION=on cannot be done: $reason" "FLASH_ATTENTION=auto uses standard attention where it must"
  else
    note "attention: standard ($reason)"
  fi
}

build_engine_arguments() {
  ENGINE_ARGUMENTS=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL_SIZE"
    --pipeline-model-parallel-size "$PIPELINE_PARALLEL_SIZE"
    --encoder-num-layers "$ENCODER_NUM_LAYERS" --decoder-num-layers "$DECODER_NUM_LAYERS"
    --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$NUM_ATTENTION_HEADS"
    --kv-channels "$((HIDDEN_SIZE / NUM_ATTENTION_HEADS))" --ffn-hidden-size "$FFN_HIDDEN_SIZE"
    --encoder-seq-length "$ENCODER_SEQ_LENGTH" --decoder-seq-length "$DECODER_SEQ_LENGTH"
    --max-position-embeddings "$((ENCODER_SEQ_LENGTH > DECODER_SEQ_LENGTH ? ENCODER_SEQ_LENGTH : DECODER_SEQ_LENGTH))"
    --attention-dropout "$DROPOUT" --hidden-dropout "$DROPOUT"
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE" --train-iters "$TRAIN_ITERS"
    --lr "$LR" --min-lr "$MIN_LR" --lr-decay-style cosine --lr-warmup-iters "$LR_WARMUP_ITERS"
    --weight-decay "$WEIGHT_DECAY" --clip-grad "$CLIP_GRAD" --seed "$SEED"
    --data-path "$DATA_PREFIX" --data-impl mmap --split "949,50,1" --num-workers 2
    --tokenizer-type HFTokenizer --tokenizer-model "$TOKENIZER_MODEL" --make-vocab-size-divisible-by "$VOCAB_DIVISOR"
    --log-interval "$LOG_INTERVAL" --eval-interval "$EVAL_INTERVAL" --eval-iters "$EVAL_ITERS"
    --distributed-timeout-minutes "$DISTRIBUTED_TIMEOUT_MINUTES" --DDP-impl local --no-gradient-accumulation-fusion
    --tensorboard-dir "$OUTPUT_DIR/tensorboard" --tensorboard-log-interval "$LOG_INTERVAL"
  )
  if ((PIPELINE_PARALLEL_SIZE > 1)); then
    ENGINE_ARGUMENTS+=(--pipeline-model-parallel-split-rank "$SPLIT_RANK")
  fi
  if ((GPUS_SHARED)); then
    ENGINE_ARGUMENTS+=(--distributed-backend gloo)
    [[ $ENGINE != native ]] || ENGINE_ARGUMENTS+=(--share-gpus)
  elif [[ $DEVICE == cuda ]]; then
    ENGINE_ARGUMENTS+=(--distributed-backend nccl)
  else
    ENGINE_ARGUMENTS+=(--distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion)
  fi
  [[ -z $PRECISION_FLAG ]] || ENGINE_ARGUMENTS+=("$PRECISION_FLAG")
  # DeepSpeed's first loss scale, so that every strategy starts from the same.
  [[ $PRECISION_FLAG != --fp16 ]] || ENGINE_ARGUMENTS+=(--initial-loss-scale 65536)
  ((USE_FLASH_ATTENTION == 0)) || ENGINE_ARGUMENTS+=(--use-flash-attn-v2)
  [[ $ENGINE_PATCHES != series ]] || ENGINE_ARGUMENTS+=(--layout-independent-init)
  if [[ $WANDB_MODE != disabled ]]; then
    ENGINE_ARGUMENTS+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "$WANDB_RUN_NAME" --wandb-save-dir "$OUTPUT_DIR")
  fi
  ((SAVE_INTERVAL == 0)) || ENGINE_ARGUMENTS+=(--save "$OUTPUT_DIR/checkpoints" --save-interval "$SAVE_INTERVAL")
  ((RESUME == 0)) || ENGINE_ARGUMENTS+=(--load "$OUTPUT_DIR/checkpoints")
  if [[ -n $STRATEGY_DS_CONFIG ]]; then
    # The pipeline engine of DeepSpeed is not Megatron's: ZeRO runs without it.
    ENGINE_ARGUMENTS+=(--deepspeed --deepspeed_config "$OUTPUT_DIR/ds_config.json" --zero-stage "$ZERO_STAGE"
      --no-pipeline-parallel)
  fi
  ENGINE_ARGUMENTS+=("${STRATEGY_FLAGS[@]}" "${EXTRA_ARGUMENTS[@]}")
}

build_environment() {
  RUN_ENVIRONMENT=(CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONFAULTHANDLER=1 "WANDB_MODE=$WANDB_MODE" "WANDB_RUN_GROUP=$WANDB_RUN_GROUP"
    "WANDB_JOB_TYPE=${WANDB_JOB_TYPE:-train}")
  # W&B takes the run's configuration from this file as well, which the recorder fills while torch is being loaded; see
  # t5bench/run/wandb_config.py. A sweep's agent has one of its own.
  WANDB_CONFIG_FILE=''
  if [[ $WANDB_MODE != disabled && -z ${WANDB_SWEEP_PARAM_PATH:-} ]]; then
    WANDB_CONFIG_FILE=$OUTPUT_DIR/node$NODE_RANK.wandb.yaml
    RUN_ENVIRONMENT+=("WANDB_SWEEP_PARAM_PATH=$WANDB_CONFIG_FILE")
  fi
  [[ $ENGINE != megatron ]] || RUN_ENVIRONMENT+=("PYTHONPATH=$MEGATRON_DIR${PYTHONPATH:+:$PYTHONPATH}")
  if [[ $DEVICE == cpu ]]; then
    local threads=$(($(nproc) / NPROC_PER_NODE))
    RUN_ENVIRONMENT+=(CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu "LOCAL_SIZE=$NPROC_PER_NODE"
      "OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}")
  fi
}

build_command() {
  local profiler=()
  ((PROFILE_ITERATION == 0)) ||
    profiler=("$REPO_ROOT/t5bench/run/profile_step.py" --iteration "$PROFILE_ITERATION" --output "$OUTPUT_DIR/profile.json")
  # The static rendezvous: with c10d torchrun ignores --node_rank, and the encoder would not be on node 0.
  COMMAND=(torchrun --nnodes "$NNODES" --nproc_per_node "$NPROC_PER_NODE" --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --rdzv_conf "timeout=$RENDEZVOUS_TIMEOUT"
    "${profiler[@]}" "$ENGINE_SCRIPT" "${ENGINE_ARGUMENTS[@]}")
}

# A script that does what the launcher does: paste it, or pipe it to bash.
print_command() {
  printf 'mkdir -p %q\n' "$OUTPUT_DIR"
  [[ -z $STRATEGY_DS_CONFIG ]] ||
    printf "cat >%q <<'JSON'\n%sJSON\n" "$OUTPUT_DIR/ds_config.json" "$DS_CONFIG_TEXT"
  [[ -z $WANDB_CONFIG_FILE ]] || printf "echo 'wandb_version: 1' >%q\n" "$WANDB_CONFIG_FILE"
  printf 'env'
  printf ' %q' "${RUN_ENVIRONMENT[@]}" "${COMMAND[@]}"
  printf '\n'
}

# ---- the run -------------------------------------------------------------------------------------------------------

# Earlier attempts keep their files: node0.log becomes node0.log.1 and so on.
keep_earlier() {
  local file=$1 number=1
  [[ -e $file ]] || return 0
  while [[ -e $file.$number ]]; do number=$((number + 1)); done
  mv -- "$file" "$file.$number"
}

write_run_directory() {
  local node=$OUTPUT_DIR/node$NODE_RANK file
  mkdir -p -- "$OUTPUT_DIR" 2>/dev/null && [[ -w $OUTPUT_DIR ]] ||
    die "cannot write to the run directory $OUTPUT_DIR" "Choose another OUTPUT_DIR"
  for file in "$node.log" "$node.json" "$node.samples.jsonl" "$node.wandb.yaml"; do
    keep_earlier "$file"
  done
  # The last node writes the metrics; a run that goes on adds to them.
  ((RESUME || NODE_RANK < NNODES - 1)) || keep_earlier "$OUTPUT_DIR/metrics.jsonl"
  { print_command >"$node.command.sh" && printf '%s %s %s\n' running "${HOSTNAME:-unnamed}" "$$" >"$node.status"; } ||
    die "cannot write to the run directory $OUTPUT_DIR" "Free space there, or choose another OUTPUT_DIR"
  # Without the file W&B does not start.
  [[ -z $WANDB_CONFIG_FILE ]] || printf 'wandb_version: 1\n' >"$WANDB_CONFIG_FILE"
  if [[ -n $STRATEGY_DS_CONFIG ]]; then
    # Every node writes the same bytes, perhaps to the same shared file: a rename shows no half of it.
    printf '%s' "$DS_CONFIG_TEXT" >"$node.ds_config"
    mv -- "$node.ds_config" "$OUTPUT_DIR/ds_config.json"
  fi
}

# What t5bench's record and the check of checkpoints are both told, as RUN_DESCRIPTION.
describe_run() {
  local name
  RUN_DESCRIPTION=(
    --directory "$OUTPUT_DIR" --node "$NODE_RANK" --strategy "$STRATEGY" --engine "$ENGINE" --data-prefix "$DATA_PREFIX"
    --layout "nnodes=$NNODES" --layout "nproc_per_node=$NPROC_PER_NODE" --layout "world_size=$WORLD_SIZE"
    --layout "tp=$TENSOR_PARALLEL_SIZE" --layout "pp=$PIPELINE_PARALLEL_SIZE" --layout "dp=$DATA_PARALLEL_SIZE"
    --layout "micro_batches=$MICRO_BATCHES"
  )
  for name in "${SETTING_NAMES[@]}"; do
    # Other users of the machine can read a command line.
    [[ $name != WANDB_API_KEY ]] || continue
    RUN_DESCRIPTION+=("--setting=$name=${!name}")
  done
}

# Reads the run's output from its standard input; see t5bench/run/recorder.py.
record_run() {
  describe_run
  local arguments=(
    "${RUN_DESCRIPTION[@]}" --end-file "$OUTPUT_DIR/node$NODE_RANK.end" --launcher "$$" --mark "$1" --title "$STRATEGY_TITLE"
    --device "$DEVICE" --engine-patches "$ENGINE_PATCHES" --tokenizer "$TOKENIZER_MODEL" --sample-interval "$SAMPLE_INTERVAL"
    --watchdog-seconds "$WATCHDOG_SECONDS" --master-address "$MASTER_ADDR" --master-port "$MASTER_PORT"
  )
  [[ $ENGINE != megatron ]] || arguments+=(--engine-directory "$MEGATRON_DIR")
  [[ -z $STRATEGY_DS_CONFIG ]] || arguments+=(--ds-config "$OUTPUT_DIR/ds_config.json")
  exec "$PYTHON" -m t5bench record "${arguments[@]}" -- \
    env "${RUN_ENVIRONMENT[@]}" "${COMMAND[@]}"
}

start_run() {
  local exit_status=0 node=$OUTPUT_DIR/node$NODE_RANK status='' reason='' remedy=''
  choose_checkpoint
  write_run_directory
  note "$STRATEGY_TITLE: node $NODE_RANK of $NNODES, master $MASTER_ADDR:$MASTER_PORT, $WORLD_SIZE processes" \
    "(TP=$TENSOR_PARALLEL_SIZE PP=$PIPELINE_PARALLEL_SIZE DP=$DATA_PARALLEL_SIZE, $MICRO_BATCHES micro-batches), $DEVICE, engine $ENGINE"
  run_to_end record_run "$node.end" env "${RUN_ENVIRONMENT[@]}" "${COMMAND[@]}" || exit_status=$?
  # DeepSpeed leaves these in the memory of a machine without GPUs, 66 MiB for each process.
  [[ $DEVICE != cpu ]] || rm -f -- "/dev/shm/deepspeed_allreduce_buffer_${UID}_${MASTER_ADDR}_${MASTER_PORT}_"*
  { read -r status reason && read -r remedy; } <"$node.status" || true
  [[ $status != running ]] || { status=crashed reason="what keeps the record was killed" remedy=''; }
  if ((exit_status == 0)); then
    note "$STRATEGY: $status; record in $OUTPUT_DIR"
  else
    note "error: $STRATEGY on node $NODE_RANK: $status: $reason"
    [[ -z $remedy ]] || note "       $remedy"
    note "       exit status $exit_status; its output is in $node.log"
  fi
  return "$exit_status"
}

print_help() {
  cat <<HELP
Usage: bash scripts/${0##*/} [master-host] [node-rank] [--dry-run] [--help] [-- engine arguments]

$STRATEGY_TITLE

Run it on every node, with the master's host name and the node's rank; on one machine it needs no argument.
  --dry-run   print the command (and the DeepSpeed JSON) that would run, and what a real run would miss
  --          everything after it goes to the engine as it stands

Settings, from the environment (name, default, meaning):
HELP
  print_settings
}

parse_arguments() {
  POSITIONAL=() EXTRA_ARGUMENTS=() HELP=0
  while (($#)); do
    case $1 in
      --dry-run) DRY_RUN=1 ;;
      -h | --help) HELP=1 ;;
      --)
        EXTRA_ARGUMENTS=("${@:2}")
        break
        ;;
      -*) die "unknown option '$1'" "Engine arguments go after --; --help tells the rest" ;;
      *) POSITIONAL+=("$1") ;;
    esac
    shift
  done
  ((${#POSITIONAL[@]} <= 2)) || die "at most two arguments are expected, found ${#POSITIONAL[@]}: ${POSITIONAL[*]}" \
    "Usage: bash scripts/${0##*/} [master-host] [node-rank]"
}

run_strategy() {
  parse_arguments "$@"
  declare_settings
  if ((HELP)); then
    print_help
    return 0
  fi
  check_settings
  DATA_PREFIX=$MEGATRON_DATA_DIR/xsum_text_document
  resolve_topology "${POSITIONAL[@]}"
  choose_device
  choose_process_count
  check_layout

  host_resolves "$MASTER_ADDR" || missing "the master host name '$MASTER_ADDR' does not resolve on ${HOSTNAME:-this host}" \
    "Check the spelling, or use the address that 'getent hosts' prints on the master"
  if ((NODE_RANK == 0)) && port_is_taken "$MASTER_PORT"; then
    missing "port $MASTER_PORT is already in use on this node" "Choose another on every node: MASTER_PORT=29900 bash scripts/${0##*/} ..."
  fi
  check_output_dir
  check_engine
  inspect_environment
  check_deepspeed
  command -v torchrun >/dev/null || missing "torchrun is not on PATH" "Activate the environment that has torch"

  choose_tokenizer
  choose_wandb
  choose_attention
  build_engine_arguments
  build_environment
  build_command
  if ((DRY_RUN)); then
    print_command
  else
    start_run
  fi
}
