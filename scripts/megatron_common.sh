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

# A declaration is read in many places and needs nothing else.
[[ ${1:-} == --declaration ]] || source "${BASH_SOURCE[0]%/*}/common.sh"

STRATEGY_COLOUR='' STRATEGY_TP=1 STRATEGY_PP=1 STRATEGY_DS_CONFIG='' STRATEGY_FLAGS='' STRATEGY_FAMILIES='' STRATEGY_ENGINES=''

run_strategy() {
  local declaration command
  printf -v declaration '%s\t' "$STRATEGY" "$STRATEGY_TITLE" "$STRATEGY_PORT" "$STRATEGY_TP" "$STRATEGY_PP" \
    "$STRATEGY_DS_CONFIG" "$STRATEGY_COLOUR" "$STRATEGY_FAMILIES" "$STRATEGY_ENGINES"
  declaration+=$STRATEGY_FLAGS
  if [[ ${1:-} == --declaration ]]; then
    printf '%s\n' "$declaration"
    return 0
  fi
  parse_arguments "$@"
  resolve_nodes "${POSITIONAL[@]}"
  [[ -z $DRY_RUN ]] || exec_plan "$DRY_RUN" "$declaration" -- "${EXTRA_ARGUMENTS[@]}"
  command=$(exec_plan launch "$declaration" "$$" -- "${EXTRA_ARGUMENTS[@]}") || exit
  # shellcheck disable=SC2034 # read by that file, of which only the arrays are wanted here
  LAUNCHED=1
  # shellcheck disable=SC1090 # what --dry-run prints: OUTPUT_DIR, NODE_RANK, PYTHON and the arrays
  source "$command"
  # The recorder starts torchrun, passes its output on and says how the run ended; see t5bench/run/recorder.py.
  exec "$PYTHON" "$REPO_ROOT/t5bench" record "$OUTPUT_DIR" "$NODE_RANK" -- \
    env "${ENVIRONMENT[@]}" "$PYTHON" -m torch.distributed.run "${RENDEZVOUS[@]}" "${PROGRAM[@]}" "${ARGUMENTS[@]}"
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
  --help all       show every setting

HELP
  print_help help "$declaration" "$@"
}
