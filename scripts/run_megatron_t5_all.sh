#!/usr/bin/env bash
# Every strategy, one run after another, REPEATS times in turn, and the comparison of them all.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/sweep.sh
source "$REPO_ROOT/scripts/sweep.sh"

declare_settings() {
  setting STRATEGIES "" "Strategies to run, separated by spaces (unset: all)"
  setting REPEATS 1 "Times that each is run, in turn (A B C A B C), so that drift of the machine hits all alike"
  sweep_settings "$REPO_ROOT/outputs/all"
}

print_help() {
  cat <<'HELP'
Usage: bash scripts/run_megatron_t5_all.sh [--dry-run] [--help]

Runs the strategies on this machine's processes and compares them. DDP is also run with as many processes as any strategy
needs, so that every row has a baseline of its own world size. Run it again to go on after an interruption.
  --dry-run   print what would run, and what would not
Exit status: 0 when every run is complete and trains as DDP does, 1 when one does not, 2 when none could be
started or compared.

Settings, from the environment (name, default, meaning); the launchers' settings work too:
HELP
  print_settings
}

parse_arguments() {
  while (($#)); do
    case $1 in
      --dry-run) DRY_RUN=1 ;;
      -h | --help) print_help && exit 0 ;;
      *) die "unknown argument '$1'" 'Name strategies in STRATEGIES="ddp zero1"; --help tells the rest' ;;
    esac
    shift
  done
}

print_plan() {
  local directory
  for directory in "$@"; do
    if is_complete "$directory"; then printf 'complete  %s\n' "$directory"; else printf 'run       %s\n' "$directory"; fi
  done
}

# compare_runs DIRECTORY...: a run that was refused may have left no record, and the others are compared all the same.
compare_runs() {
  local directory recorded=() answer=0
  for directory in "$@"; do
    if has_record "$directory"; then
      recorded+=("$directory")
    else
      note "${directory#"$RUNS_DIR/"} left no record, and is not in the comparison"
    fi
  done
  if ((${#recorded[@]})); then
    t5bench compare "${recorded[@]}" --output "$RUNS_DIR/comparison" || answer=$?
    # It answers as compare does, and says itself what it could not do.
    [[ ${WANDB_MODE:-} == disabled || $answer == 2 ]] ||
      t5bench wandb "${recorded[@]}" --comparison "$RUNS_DIR/comparison" || true
  fi
  ((answer || ${#recorded[@]} == $#)) || answer=1
  # What waited in vain for a node that refused may have a record; nothing was trained all the same.
  any_began || answer=$EXIT_CONFIGURATION
  return "$answer"
}

main() {
  local repeat runs=() chosen=()
  declare_settings
  parse_arguments "$@"
  require_integers 1 REPEATS
  require_integers 0 RETRIES
  absolute_path "$RUNS_DIR" && RUNS_DIR=$REPLY
  check_launch
  read -r -d '' -a chosen <<<"$STRATEGIES" || true
  choose_strategies "${chosen[@]}"
  plan_rows
  plan_baselines
  for ((repeat = 1; repeat <= REPEATS; repeat++)); do
    runs+=("${ROW_NAMES[@]/#/$RUNS_DIR/repeat$repeat/}")
  done
  if ((DRY_RUN)); then
    print_plan "${runs[@]}"
    return 0
  fi
  GOES_ON="The same command goes on from here." run_all "${runs[@]}"
  printf '\n'
  compare_runs "${runs[@]}"
}

main "$@"
