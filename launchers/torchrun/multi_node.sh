#!/usr/bin/env bash
# Trainer ranks on several hosts; run this on every one of them:
#
#   NODES=2 NODE_RANK=0 RENDEZVOUS=node1:29500 launchers/torchrun/multi_node.sh RANKS RECIPE [--train.steps 5 ...]
#
# RANKS       trainer ranks per host, one per GPU that is a trainer's
# NODES       how many hosts
# NODE_RANK   the number of this one, from 0; SLURM and Kubernetes say it themselves
# RENDEZVOUS  HOST:PORT where they meet: host number 0, by a name or address that all of them know, and a port that is free there
#
# Models and the run's folder have the same path everywhere. Hosts wait for each other for 15 minutes. When one goes away, all
# others end within cluster.host_timeout_seconds, with an exit status that isn't 0; started again with --auto-resume, the job goes
# on from its newest checkpoint. (That is why torchrun's static rendezvous is used here: with c10d, agents that are cut off from
# host 0 were seen to hang.)
set -euo pipefail

ranks=${1:?how many trainer ranks per host}
recipe=${2:?a recipe name or file}
shift 2
: "${NODES:?how many hosts}"
: "${RENDEZVOUS:?HOST:PORT where they meet}"
NODE_RANK=${NODE_RANK:-${SLURM_PROCID:-${JOB_COMPLETION_INDEX:?NODE_RANK, the number of this host}}}
export RENDEZVOUS
if [[ ! $ranks =~ ^[1-9][0-9]*$ ]]; then
  echo "$0: the first argument is $ranks; expected how many trainer ranks per host, then a recipe" >&2
  exit 2
fi
if [[ ! $RENDEZVOUS =~ ^.+:[0-9]+$ ]]; then
  echo "$0: RENDEZVOUS is $RENDEZVOUS; expected HOST:PORT" >&2
  exit 2
fi

# shellcheck source-path=SCRIPTDIR source=../env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"

exec torchrun --nnodes "$NODES" --nproc-per-node "$ranks" --node-rank "$NODE_RANK" \
  --master-addr "${RENDEZVOUS%:*}" --master-port "${RENDEZVOUS##*:}" --rdzv-conf timeout=900 \
  --module drmas.cli train "$recipe" "$@"
