#!/usr/bin/env bash
# All trainer ranks on this host:   launchers/torchrun/single_node.sh RANKS RECIPE [--train.steps 5 ...]
#
# torchrun picks a free port for its rendezvous, so that jobs can run side by side. Rank 0 starts the engines here, or at the hosts
# of cluster.engine_hosts. On SIGTERM or Ctrl-C the step in progress is finished and saved.
set -euo pipefail

ranks=${1:?how many trainer ranks}
recipe=${2:?a recipe name or file}
shift 2
if [[ ! $ranks =~ ^[1-9][0-9]*$ ]]; then
  echo "$0: the first argument is $ranks; expected how many trainer ranks, then a recipe" >&2
  exit 2
fi

unset RENDEZVOUS
# shellcheck source-path=SCRIPTDIR source=../env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"

exec torchrun --standalone --nproc-per-node "$ranks" --module drmas.cli train "$recipe" "$@"
