# shellcheck shell=bash
# From a strategy's declaration to a running engine: nodes, the plan, torchrun, the record.
#
# A launcher declares what is specific to its strategy and calls `run_strategy "$@"`:
#   STRATEGY            name; the run directory is outputs/<name> and the W&B run megatron-<name>
#   STRATEGY_TITLE      one line for people
#   STRATEGY_PORT       default rendezvous port, unique to the strategy; tables list strategies in the order of their ports
#   STRATEGY_COLOUR     the colour of its lines and bars in every picture
#   STRATEGY_TP, _PP    tensor- and pipeline-parallel sizes (1 when not declared); every further process is data parallel
#   STRATEGY_DS_CONFIG  the file in ds_configs/, for a ZeRO strategy
#   STRATEGY_FLAGS      further engine arguments, separated by spaces
#   STRATEGY_FAMILIES   the model families that it supports (all when not declared)
#   STRATEGY_ENGINES    the engines that it supports (all when not declared)
#
# Settings are environment variables; t5bench/record/settings.py declares them. t5bench/plan makes the plan of the run from
# them, this declaration, the nodes and this machine.

source "${BASH_SOURCE[0]%/*}/common.sh"
remember_signals

STRATEGY_COLOUR='' STRATEGY_TP=1 STRATEGY_PP=1 STRATEGY_DS_CONFIG='' STRATEGY_FLAGS='' STRATEGY_FAMILIES='' STRATEGY_ENGINES=''

run_strategy() {
  local declaration
  printf -v declaration '%s\t' "$STRATEGY" "$STRATEGY_TITLE" "$STRATEGY_PORT" "$STRATEGY_TP" "$STRATEGY_PP" \
    "$STRATEGY_DS_CONFIG" "$STRATEGY_COLOUR" "$STRATEGY_FAMILIES" "$STRATEGY_ENGINES"
  declaration+=$STRATEGY_FLAGS
  if [[ ${1:-} == --declaration ]]; then
    printf '%s\n' "$declaration"
    return 0
  fi
  parse_arguments "$@"
  resolve_nodes "${POSITIONAL[@]}"
  if [[ -n $DRY_RUN ]]; then
    trap - "${ENDING_SIGNALS[@]}"
    plan "$DRY_RUN" "$declaration" -- "${EXTRA_ARGUMENTS[@]}"
    return
  fi
  # Sets OUTPUT_DIR, DEVICE, NODE_RANK and MASTER_PORT, and the arrays that run_torchrun uses.
  ask launch "$declaration" "$$" -- "${EXTRA_ARGUMENTS[@]}"
  run_torchrun
}

# Runs torchrun with the engine's program and arguments, its output going to the recorder, and says how the run ended.
run_torchrun() {
  local exit_status=0 node=$OUTPUT_DIR/node$NODE_RANK status='' reason='' remedy=''
  # Beyond the file-size limit (ulimit -f), or with nobody left to read, a write fails, but this shell continues.
  trap '' XFSZ PIPE
  run_to_end record_run "$node.end" \
    env "${ENVIRONMENT[@]}" "$PYTHON" -m torch.distributed.run "${RENDEZVOUS[@]}" "${PROGRAM[@]}" "${ARGUMENTS[@]}" || exit_status=$?
  # On a machine without GPUs, DeepSpeed leaves these in memory, 66 MiB for each process.
  [[ $DEVICE != cpu ]] || rm -f -- "/dev/shm/deepspeed_allreduce_buffer_${UID}_${MASTER_ADDR}_${MASTER_PORT}_"*
  [[ ! -f $node.status ]] || { read -r status reason && read -r remedy; } 2>/dev/null <"$node.status" || true
  if [[ $status == running ]]; then
    status=crashed reason="the recorder was killed" remedy=''
    [[ -z $interrupted_by ]] || status=cancelled reason="$interrupted_by received, and the recorder did not stop"
    printf '%s %s\n\n' "$status" "$reason" >"$node.status" || true
  fi
  [[ -n $status ]] || { status=crashed reason="its record cannot be read: $OUTPUT_DIR was removed or is not writable" remedy=''; }
  if ((exit_status == 0)); then
    note "$STRATEGY: complete; record in $OUTPUT_DIR"
  else
    note "error: $STRATEGY on node $NODE_RANK: $status: $reason"
    [[ -z $remedy ]] || note "       $remedy"
    note "       exit status $exit_status; the output is in $node.log"
  fi
  return "$exit_status"
}

# Records the run's output, from standard input; see t5bench/run/recorder.py.
record_run() {
  local node=$OUTPUT_DIR/node$NODE_RANK
  cd -- "$REPO_ROOT" || exit
  exec "$PYTHON" -m t5bench record --plan "$node.plan" --end-file "$node.end" --launcher "$$" --mark "$1"
}

print_usage() {
  cat <<HELP
Usage: bash scripts/${0##*/} [master-host] [node-rank] [option] [-- ...]

$STRATEGY_TITLE

Run this on every node, with the master's host name and the node's rank. One machine needs neither.
  --dry-run        print the command and the DeepSpeed config, and report anything that would
                   stop a real run
  --dry-run=json   print the whole plan, for programs
  --               pass everything after it to the engine unchanged

HELP
  print_help help "$declaration"
}
