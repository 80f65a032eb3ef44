#!/usr/bin/env bash
# This host runs engines for trainers elsewhere:   launchers/torchrun/engine_node.sh ADDRESS [--port 8200] [--gpus 0-7] ...
#
# ADDRESS is the one of this host's that trainers see; 0.0.0.0 is all of them. The secret is in DRMAS_ENGINE_TOKEN, the same here
# and for the trainers: it lets whoever knows it start engines here. Trainers name this host:
#   launchers/torchrun/multi_node.sh 8 RECIPE --cluster.engine_hosts '["tcp://ADDRESS:8200"]'
# Logs go to ENGINE_LOGS/HOSTNAME (engine-logs). Runs until it is interrupted, and ends its engines then; they also end with the
# trainer that they serve.
set -euo pipefail

address=${1:?the address that trainers see}
shift
: "${DRMAS_ENGINE_TOKEN:?the secret that trainers have, too; such as the output of: openssl rand -hex 32}"

unset RENDEZVOUS
# shellcheck source-path=SCRIPTDIR source=../env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"

exec drmas serve-engines --host "$address" --logs "${ENGINE_LOGS:-engine-logs}/$(hostname)" "$@"
