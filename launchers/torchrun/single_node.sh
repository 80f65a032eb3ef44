#!/usr/bin/env bash
# All trainer ranks on this host:   launchers/torchrun/single_node.sh NPROC RECIPE [--train.steps 5 ...]
#
# torchrun picks a free port for its rendezvous, so that jobs can run side by side. On SIGTERM or Ctrl-C the step in progress is
# finished and saved, if that takes less than the 30 seconds after which torchrun kills what is left.
set -euo pipefail

nproc=${1:?how many trainer ranks}
recipe=${2:?a recipe name or file}
shift 2

export PYTHONSAFEPATH=1          # the folder this is started from doesn't shadow packages
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-0}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

exec torchrun --standalone --nproc-per-node "$nproc" --module drmas.cli train "$recipe" "$@"
