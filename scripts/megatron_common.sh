# shellcheck shell=bash
# From a strategy's declaration to a running engine: settings, the plan, the command line, the run directory.
#
# A launcher declares what is specific to its strategy and calls `run_strategy "$@"`:
#   STRATEGY            name; the run directory is outputs/<name> and the W&B run megatron-<name>
#   STRATEGY_TITLE      one line for people
#   STRATEGY_PORT       default rendezvous port, unique to the strategy; tables list strategies in the order of their ports
#   STRATEGY_COLOUR     the colour of its lines and bars in every picture
#   STRATEGY_TP, _PP    tensor- and pipeline-parallel sizes (1 when not declared); every further process is data parallel
#   STRATEGY_DS_CONFIG  the file in ds_configs/, for a ZeRO strategy
#   STRATEGY_FLAGS      array of further engine arguments
#   STRATEGY_FAMILIES   the model families that it supports (all when not declared)
#   STRATEGY_ENGINES    the engines that have it (both when not declared); the first is the launcher's default
#
# families/<name>.sh holds what is specific to a model family:
#   MODEL_PRESETS       sizes by the name of the preset, in the order in which declare_model takes them
#   FAMILY_PROGRAM      the engine's program; FAMILY_FIXED: array of engine arguments that are the same in every run
#   declare_model SIZES declares its settings; longest_sequence and tokenizer_arguments answer in REPLY

source "${BASH_SOURCE[0]%/*}/common.sh"

STRATEGY_COLOUR='' STRATEGY_TP=1 STRATEGY_PP=1 STRATEGY_DS_CONFIG='' STRATEGY_FLAGS=() STRATEGY_FAMILIES=${FAMILIES[*]} STRATEGY_ENGINES="megatron native"
HOST_LIST=()

# ---- settings: every one of them can be overridden from the environment --------------------------------------------

declare_settings() {
  setting MODEL_FAMILY "one-of:$FAMILY_NAMES" model - t5 "Model family: t5 or gpt (docs/gpt.md has GPT's settings)"
  local family=${BASH_SOURCE[0]%/*}/families/${MODEL_FAMILY//[^a-z0-9]/}.sh
  [[ -f $family ]] || family=${BASH_SOURCE[0]%/*}/families/t5.sh # the plan refuses the name
  # shellcheck source=scripts/families/t5.sh
  source "$family"
  setting MODEL_PRESET 'one-of:tiny|small|base|large' layout - large "Model size: tiny, small, base or large"

  setting HOSTS text? place - "" "Node host names in rank order, separated by spaces (unset: SLURM's nodes, or only this host)"
  setting NNODES whole:1? layout - "" "Number of nodes (unset: from HOSTS or SLURM; 2 if only a master is given)"
  setting NPROC_PER_NODE whole:1? layout - "${GPUS_PER_NODE:-}" "Processes per node (unset: TP x PP in all and at least 2, but 1 if TP x PP is 1 and there is one GPU); GPUS_PER_NODE also works"
  setting MASTER_PORT whole:1:65535 layout - "$STRATEGY_PORT" "torchrun rendezvous port"
  setting DEVICE 'one-of:auto|cuda|cpu' layout - auto "auto, cuda or cpu; auto uses GPUs if there are any"
  setting SHARE_GPUS 'one-of:0|1' load - 0 "1 lets several processes share a GPU over gloo: valid results, meaningless timings (not with ZeRO)"
  setting ENGINE 'one-of:megatron|native' layout - "${STRATEGY_ENGINES%% *}" "megatron (patched Megatron-DeepSpeed) or native (the engine in native/)"
  engine_dir_setting
  setting MEGATRON_DATA_DIR path place - "$FAMILY_DATA" "Directory containing indexed dataset files"
  setting TOKENIZER_MODEL text? place - "" "Hugging Face name or directory (unset: the tokenizer next to the data, or $DEFAULT_TOKENIZER)"
  setting OUTPUT_DIR path place - "$REPO_ROOT/outputs/$FAMILY_PREFIX$STRATEGY" "Checkpoint and log directory"
  setting RESUME 'one-of:0|1' watch - 0 "1 continues the run in OUTPUT_DIR from its newest intact checkpoint"

  declare_model "${MODEL_PRESETS[${MODEL_PRESET:-large}]:-${MODEL_PRESETS[large]}}"
  setting VOCABULARY_MULTIPLE whole:1 model - 128 "The vocabulary is padded to a multiple of this in every layout"
  setting DROPOUT decimal model --attention-dropout,--hidden-dropout 0.1 "Dropout of hidden states and attention weights"
  setting GLOBAL_BATCH_SIZE whole:1 model --global-batch-size 16 "Global batch size"
  setting MICRO_BATCH_SIZE whole:1 model --micro-batch-size 1 "Per-GPU micro-batch size"
  setting PRECISION_FLAG 'one-of:--bf16|--fp16?' model = --bf16 "--bf16, --fp16, or empty for fp32"
  setting FLASH_ATTENTION 'one-of:auto|on|off' method - auto "auto, on or off: for the decoder's self-attention, on CUDA in bf16 or fp16"
  setting GRADIENT_REDUCTION 'one-of:default|fp32' method - default "default, or fp32: ZeRO also reduces gradients in fp32, as DDP does, instead of the training precision"
  setting RECOMPUTE 'one-of:none|selective|full' method - none "none, selective (attention) or full (layers): recompute activations in the backward pass"
  setting FSDP_KEEP_PARAMETERS 'one-of:0|1' method - 0 "FSDP2: 1 gathers parameters once an iteration and keeps them until its end (as ZeRO-2), instead of layer by layer"
  setting FSDP_SHARD_SIZE whole:0 method - 0 "FSDP2: processes that share one copy of the states, the others have further copies (HSDP); 0: all data-parallel processes"
  setting TENSOR_PARALLEL_SIZE whole:1 layout --tensor-model-parallel-size "$STRATEGY_TP" "Tensor-parallel size, for strategies with tensor parallelism"
  setting PIPELINE_PARALLEL_SIZE whole:1 layout --pipeline-model-parallel-size "$STRATEGY_PP" "Pipeline-parallel size, for strategies with pipeline parallelism"

  setting TRAIN_ITERS whole:1 recipe --train-iters 1000 "Total training iterations"
  setting RAMPUP_BATCH_SIZE text? recipe - "" "Three numbers, start step samples: the batch grows from start by step over that many samples; the run has TRAIN_ITERS x GLOBAL_BATCH_SIZE samples"
  setting LR decimal recipe --lr 0.0001 "Peak learning rate"
  setting MIN_LR decimal recipe --min-lr 0 "Learning rate at the end of the cosine"
  setting LR_WARMUP_ITERS whole:0 recipe --lr-warmup-iters 0 "Iterations of linear warm-up"
  setting WEIGHT_DECAY decimal recipe --weight-decay 0.01 "AdamW weight decay"
  setting CLIP_GRAD decimal recipe --clip-grad 1.0 "Gradient-norm clipping"
  setting SEED whole:1 recipe --seed 1234 "Seed of weights, data order and dropout"
  setting LOG_INTERVAL whole:1 recipe --log-interval 20 "Iterations between log lines; each has the mean loss since the previous one"

  setting EVAL_ONLY 'one-of:0|1' watch - 0 "1 only evaluates the newest intact checkpoint in OUTPUT_DIR; the record goes to OUTPUT_DIR/evaluation"
  setting EVAL_ITERS whole:0 watch --eval-iters 0 "Validation batches per evaluation; 0 turns evaluation off, as a benchmark should"
  setting EVAL_INTERVAL whole:1 watch --eval-interval 1000 "Iterations between evaluations"
  setting SAVE_INTERVAL whole:0 watch - 0 "Iterations between checkpoints; 0 saves none"
  setting PROFILE_ITERATION whole:0 watch - 0 "Iteration to profile; profile.json shows where its time went; 0 profiles none"
  setting SAMPLE_INTERVAL decimal:0.01 watch - 2 "Seconds between samples of the GPUs and the network counters"
  setting PEAK_TFLOPS decimal? watch - "" "The GPU's dense peak TFLOP/s, for the MFU (unset: looked up by the GPU's name)"
  setting WATCHDOG_SECONDS whole:0 watch - 3600 "Seconds without an iteration line after which a run is stopped and every worker's stack logged; 0: never"
  setting RENDEZVOUS_TIMEOUT whole:1 watch - 600 "Seconds that a node waits for the others"
  setting DISTRIBUTED_TIMEOUT_MINUTES whole:1 watch --distributed-timeout-minutes 10 "Minutes after which a stuck collective ends the run"

  setting T5_RUN_SECRET secret? label - "" "Secret that the nodes of a run share (unset: the one in your home directory)"
  setting WANDB_PROJECT text label - ml710-t5-parallelism "W&B project name"
  setting WANDB_RUN_NAME text label - "megatron-$FAMILY_PREFIX$STRATEGY" "W&B run name"
  setting WANDB_RUN_GROUP text? label - "" "W&B group of the runs to compare"
  setting WANDB_API_KEY secret? label - "" "Your W&B API key; without one the run is logged offline"
  setting WANDB_MODE 'one-of:online|offline|disabled?' label - "" "online, offline or disabled (unset: online with a key, else offline)"
}

# ---- the plan ------------------------------------------------------------------------------------------------------

request() {
  group declaration "${DECLARATION[@]}"
  settings_group
  group fixed "${FIXED_ARGUMENTS[@]}"
  group extra "${EXTRA_ARGUMENTS[@]}"
  group hosts "${HOST_LIST[@]}"
  group facts "launcher=$$" "node=$NODE_RANK" "master_address=$MASTER_ADDR" "dry_run=$DRY_RUN" "default_tokenizer=$DEFAULT_TOKENIZER"
}

# One Python process checks everything, says what is wrong, prepares the run directory, and answers with what is derived
# from the settings: the array PLAN, and the settings that become absolute paths or that engine arguments change.
make_plan() {
  local status
  declare -gA PLAN=()
  hear make request && return 0 || status=$?
  [[ $DRY_RUN != json || -z ${PLAN[json]:-} ]] || printf '%s\n' "${PLAN[json]}"
  exit "$status"
}

# The plan with everything that was built from it; the recorder and --dry-run=json read this.
plan_words() {
  printf '%s\0' "${PLAN[json]}"
  group settings "${SETTING_ARGUMENTS[@]}"
  group fixed "${FIXED_ARGUMENTS[@]}"
  group own "${OWN_ARGUMENTS[@]}"
  group extra "${EXTRA_ARGUMENTS[@]}"
  group environment "${RUN_ENVIRONMENT[@]}"
  group command "${COMMAND[@]}"
}

# ---- the command line ----------------------------------------------------------------------------------------------

# The engine arguments of the settings, as declared. A run whose batch grows is counted in samples.
build_setting_arguments() {
  local name argument
  SETTING_ARGUMENTS=()
  for name in "${SETTING_NAMES[@]}"; do
    for argument in ${SETTING_ARGUMENT[$name]//,/ }; do
      case ${RAMPUP_BATCH_SIZE:+ramp}$argument in
        - | ramp-) ;;
        ramp--train-iters | ramp--lr-warmup-iters)
          SETTING_ARGUMENTS+=("${argument/iters/samples}" "$((${!name} * GLOBAL_BATCH_SIZE))")
          ;;
        = | ramp=) [[ -z ${!name} ]] || SETTING_ARGUMENTS+=("${!name}") ;;
        *) SETTING_ARGUMENTS+=("$argument" "${!name}") ;;
      esac
    done
  done
}

# The engine arguments that the strategy, the machine and the run's place decide.
build_own_arguments() {
  local REPLY
  longest_sequence
  # The engine multiplies the vocabulary's multiple by the tensor-parallel size.
  OWN_ARGUMENTS=(--kv-channels "$((HIDDEN_SIZE / NUM_ATTENTION_HEADS))" --max-position-embeddings "$REPLY"
    --make-vocab-size-divisible-by "$((VOCABULARY_MULTIPLE / PLAN[tp]))")
  tokenizer_arguments
  OWN_ARGUMENTS+=(--data-path "${PLAN[data_prefix]}" "${REPLY[@]}"
    --tensorboard-dir "$OUTPUT_DIR/tensorboard" --tensorboard-log-interval "$LOG_INTERVAL")
  [[ -z ${PLAN[split_rank]} ]] || OWN_ARGUMENTS+=(--pipeline-model-parallel-split-rank "${PLAN[split_rank]}")
  if ((PLAN[gpus_shared])); then
    OWN_ARGUMENTS+=(--distributed-backend gloo)
    [[ $ENGINE != native ]] || OWN_ARGUMENTS+=(--share-gpus)
  elif [[ ${PLAN[device]} == cuda ]]; then
    OWN_ARGUMENTS+=(--distributed-backend nccl)
  else
    OWN_ARGUMENTS+=(--distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion)
  fi
  # DeepSpeed's initial loss scale, so that every strategy starts from the same one.
  [[ $PRECISION_FLAG != --fp16 ]] || OWN_ARGUMENTS+=(--initial-loss-scale 65536)
  ((PLAN[flash_attention] == 0)) || OWN_ARGUMENTS+=(--use-flash-attn-v2)
  [[ ${PLAN[engine_patches]} != series ]] || OWN_ARGUMENTS+=(--layout-independent-init)
  [[ ${PLAN[wandb_mode]} == disabled ]] ||
    OWN_ARGUMENTS+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "$WANDB_RUN_NAME" --wandb-save-dir "$OUTPUT_DIR")
  ((SAVE_INTERVAL == 0 || EVAL_ONLY)) || OWN_ARGUMENTS+=(--save "$OUTPUT_DIR/checkpoints" --save-interval "$SAVE_INTERVAL")
  [[ -z ${PLAN[load]} ]] || OWN_ARGUMENTS+=(--load "${PLAN[load]}")
  ((EVAL_ONLY == 0)) || OWN_ARGUMENTS+=(--skip-train)
  [[ $RECOMPUTE == none ]] || OWN_ARGUMENTS+=(--recompute-granularity "$RECOMPUTE")
  [[ $RECOMPUTE != full ]] || OWN_ARGUMENTS+=(--recompute-method uniform --recompute-num-layers 1)
  # shellcheck disable=SC2206 # three numbers, as the plan has checked
  [[ -z $RAMPUP_BATCH_SIZE ]] || OWN_ARGUMENTS+=(--rampup-batch-size $RAMPUP_BATCH_SIZE)
  if [[ -n $STRATEGY_DS_CONFIG ]]; then
    OWN_ARGUMENTS+=(--deepspeed --deepspeed_config "$OUTPUT_DIR/ds_config.json" --zero-stage "${PLAN[zero_stage]}")
    # DeepSpeed's pipeline engine is not Megatron's; without pipeline stages ZeRO must not use it.
    ((PLAN[pp] > 1)) || OWN_ARGUMENTS+=(--no-pipeline-parallel)
    ((PLAN[cpu_optimizer] == 0)) || OWN_ARGUMENTS+=(--cpu-optimizer)
  fi
  OWN_ARGUMENTS+=("${STRATEGY_FLAGS[@]}")
  if [[ " ${STRATEGY_FLAGS[*]} " == *" --fsdp2 "* ]]; then
    ((FSDP_KEEP_PARAMETERS == 0)) || OWN_ARGUMENTS+=(--fsdp2-keep-parameters)
    ((FSDP_SHARD_SIZE == 0)) || OWN_ARGUMENTS+=(--fsdp2-shard-size "$FSDP_SHARD_SIZE")
  fi
}

build_environment() {
  local path=$PYTHONPATH name
  [[ $ENGINE != megatron ]] || path=$MEGATRON_DIR:$PYTHONPATH
  RUN_ENVIRONMENT=(CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONFAULTHANDLER=1 "PYTHONPATH=$path" "WANDB_MODE=${PLAN[wandb_mode]}"
    "WANDB_RUN_GROUP=$WANDB_RUN_GROUP" "WANDB_JOB_TYPE=${WANDB_JOB_TYPE:-train}")
  # W&B also reads the run's configuration from this file, which the recorder writes while torch is loading; see
  # t5bench/run/recorder.py. A W&B sweep's agent has its own.
  [[ -z ${PLAN[wandb_config]} ]] || RUN_ENVIRONMENT+=("WANDB_SWEEP_PARAM_PATH=${PLAN[wandb_config]}")
  ((PROFILE_ITERATION == 0)) || RUN_ENVIRONMENT+=("T5_PROFILE=$PROFILE_ITERATION:$OUTPUT_DIR/profile.json")
  for name in CUDA_HOME CPATH LIBRARY_PATH; do
    [[ -z ${PLAN[$name]:-} ]] || RUN_ENVIRONMENT+=("$name=${PLAN[$name]}")
  done
  if [[ ${PLAN[device]} == cpu ]]; then
    RUN_ENVIRONMENT+=(CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu "LOCAL_SIZE=${PLAN[nproc_per_node]}"
      "OMP_NUM_THREADS=${OMP_NUM_THREADS:-${PLAN[threads]}}")
  fi
}

build_command() {
  local program=("$MEGATRON_DIR/$FAMILY_PROGRAM")
  [[ $ENGINE != native ]] || program=("$REPO_ROOT/native/$FAMILY_PROGRAM")
  program=("$REPO_ROOT/t5bench/run/worker.py" "$OUTPUT_DIR/node$NODE_RANK.stack" "${program[@]}")
  # The static rendezvous: with c10d torchrun ignores --node_rank, and the encoder would not be on node 0.
  COMMAND=(torchrun --nnodes "${PLAN[nnodes]}" --nproc_per_node "${PLAN[nproc_per_node]}" --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --rdzv_conf "timeout=$RENDEZVOUS_TIMEOUT"
    "${program[@]}" "${SETTING_ARGUMENTS[@]}" "${FIXED_ARGUMENTS[@]}" "${OWN_ARGUMENTS[@]}" "${EXTRA_ARGUMENTS[@]}")
}

# A script that does what the launcher does, to paste or to pipe to bash.
print_command() {
  printf 'mkdir -p %q\n' "$OUTPUT_DIR"
  [[ -z ${PLAN[ds_config]} ]] || printf "cat >%q <<'JSON'\n%sJSON\n" "$OUTPUT_DIR/ds_config.json" "${PLAN[ds_config]}"
  [[ -z ${PLAN[wandb_config]} ]] || printf "echo 'wandb_version: 1' >%q\n" "${PLAN[wandb_config]}"
  printf 'env'
  printf ' %q' "${RUN_ENVIRONMENT[@]}" "${COMMAND[@]}"
  printf '\n'
}

# ---- the run -------------------------------------------------------------------------------------------------------

# Records the run's output, from standard input; see t5bench/run/recorder.py.
record_run() {
  local node=$OUTPUT_DIR/node$NODE_RANK
  cd -- "$REPO_ROOT" || exit
  exec "$PYTHON" -m t5bench record --plan "$node.plan" --end-file "$node.end" --launcher "$$" --mark "$1"
}

start_run() {
  local exit_status=0 node=$OUTPUT_DIR/node$NODE_RANK status='' reason='' remedy=''
  # Beyond the file-size limit (ulimit -f), or with nobody left to read, a write fails, but this shell continues.
  trap '' XFSZ PIPE
  { plan_words >"$node.plan" && print_command >"$node.command.sh"; } || {
    printf 'configuration  ' 1<>"$node.status" || true
    die "cannot write to the run directory $OUTPUT_DIR" "Free space and inodes there (df -h, df -i), or choose another OUTPUT_DIR"
  }
  note "$STRATEGY_TITLE: node $NODE_RANK of $NNODES, master $MASTER_ADDR:$MASTER_PORT, world size ${PLAN[world_size]}" \
    "(TP=${PLAN[tp]} PP=${PLAN[pp]} DP=${PLAN[dp]}, ${PLAN[micro_batches]} micro-batches), ${PLAN[device]}, engine $ENGINE"
  run_to_end record_run "$node.end" env -u T5_RUN_SECRET "${RUN_ENVIRONMENT[@]}" "${COMMAND[@]}" || exit_status=$?
  # On a machine without GPUs, DeepSpeed leaves these in memory, 66 MiB for each process.
  [[ ${PLAN[device]} != cpu ]] || rm -f -- "/dev/shm/deepspeed_allreduce_buffer_${UID}_${MASTER_ADDR}_${MASTER_PORT}_"*
  { read -r status reason && read -r remedy; } 2>/dev/null <"$node.status" || true
  if [[ $status == running ]]; then
    status=crashed reason="the recorder was killed" remedy=''
    [[ -z $interrupted_by ]] || status=cancelled reason="$interrupted_by received, and the recorder did not stop"
    printf '%s %s\n\n' "$status" "$reason" >"$node.status" || true
  fi
  [[ -n $status ]] || { status=crashed reason="its record cannot be read: $OUTPUT_DIR was removed or is not writable" remedy=''; }
  if ((exit_status == 0)); then
    note "$STRATEGY: $status; record in $OUTPUT_DIR"
  else
    note "error: $STRATEGY on node $NODE_RANK: $status: $reason"
    [[ -z $remedy ]] || note "       $remedy"
    note "       exit status $exit_status; the output is in $node.log"
  fi
  return "$exit_status"
}

print_usage() {
  cat <<HELP
Usage: bash scripts/${0##*/} [master-host] [node-rank] [option] [-- ...]

$STRATEGY_TITLE

Run this on every node, with the master's host name and the node's rank. One machine needs neither.
  --dry-run        print the command, the DeepSpeed JSON and what would stop a real run
  --dry-run=json   print the whole plan, for programs
  --               pass everything after it to the engine unchanged

HELP
  print_help
}

run_strategy() {
  DECLARATION=("$STRATEGY" "$STRATEGY_TITLE" "$STRATEGY_PORT" "$STRATEGY_TP" "$STRATEGY_PP" "$STRATEGY_DS_CONFIG"
    "$STRATEGY_COLOUR" "$STRATEGY_FAMILIES" "$STRATEGY_ENGINES" "${STRATEGY_FLAGS[@]}")
  if [[ ${1:-} == --declaration ]]; then
    printf '%s\0' "${DECLARATION[@]}"
    return 0
  fi
  declare_settings
  parse_arguments "$@"
  # The same in every run; arguments after -- win over these.
  FIXED_ARGUMENTS=(--lr-decay-style cosine --data-impl mmap --split "949,50,1" --num-workers 2 "${FAMILY_FIXED[@]}"
    --DDP-impl local --no-gradient-accumulation-fusion)
  resolve_topology "${POSITIONAL[@]}"
  make_plan
  build_setting_arguments
  build_own_arguments
  build_environment
  build_command
  case $DRY_RUN in
    1) print_command ;;
    json) plan_words | python_module t5bench.plan print ;;
    *) start_run ;;
  esac
}
