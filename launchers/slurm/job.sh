# shellcheck shell=bash disable=SC2034
#
# What the jobs of this folder share: sourced by them, with the recipe and its options as "$@".
#
# A job stops in good order before its time is up, goes back into the queue, and goes on from its newest checkpoint: SLURM sends
# USR1 to the batch script as many seconds before the limit as `--signal` says, which must be enough for one step and its save.
# A job that fails after a while, since a node went away say, is put back as well, RESTARTS times (3); SLURM itself does so for
# nodes that it finds dead (`--requeue`). One that fails at once has a mistake in it and stays down.

: "${1:?a recipe name or file}"
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}             # trainer ranks per node
launchers=${DRMAS_LAUNCHERS:-${SLURM_SUBMIT_DIR:?}/launchers} # the batch script itself is a copy somewhere else
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun doesn't take it from sbatch
patience=300                                        # seconds after which a failure is no mistake of the recipe

# rendezvous NODE: where trainers meet. The port goes by the job, so that jobs on one node don't meet each other.
rendezvous() {
  echo "$1:$((20000 + SLURM_JOB_ID % 10000))"
}

# finish PID STEP: wait for the trainers, which the srun PID runs as the job's step of that number, and end as they end.
finish() {
  local trainers=$1 step=$2 stopped="" status=0
  # To torchrun, which hands it on to the ranks and waits for them. (srun itself would take SIGTERM for the end of the step.)
  trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID.$step"' USR1
  wait "$trainers" || status=$?
  while kill -0 "$trainers" 2>/dev/null; do # a signal ends `wait` before its time
    status=0
    wait "$trainers" || status=$?
  done
  if [[ -n $stopped ]] || ((status != 0 && SECONDS > patience && ${SLURM_RESTART_COUNT:-0} < ${RESTARTS:-3})); then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$status"
}
