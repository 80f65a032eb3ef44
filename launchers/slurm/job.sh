# shellcheck shell=bash disable=SC2034
#
# What the jobs of this folder share: sourced by them, with the recipe and its options as "$@".
#
# A job stops in good order before its time is up, goes back into the queue, and goes on from its newest checkpoint: SLURM sends
# USR1 to the batch script as many seconds before the limit as `--signal` says, which must be enough for one step and its save.
# A job that fails after a while, since a node went away say, is put back as well, RESTARTS times (3) without an orderly stop in
# between; SLURM itself does so for nodes that it finds dead (`--requeue`). One whose trainers fail within PATIENCE seconds (300)
# has a mistake in it and stays down.

: "${1:?a recipe name or file}"
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}             # trainer ranks per node
launchers=${DRMAS_LAUNCHERS:-${SLURM_SUBMIT_DIR:?}/launchers} # the batch script itself is a copy somewhere else
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun doesn't take it from sbatch
failures=${SLURM_SUBMIT_DIR:?}/.failures-$SLURM_JOB_ID # how many there were in a row

# rendezvous NODE: where trainers meet. The port goes by the job, so that jobs on one node don't meet each other.
rendezvous() {
  echo "$1:$((20000 + SLURM_JOB_ID % 10000))"
}

# finish PID STEP: wait for the trainers, which the srun PID runs as the job's step of that number, and end as they end.
finish() {
  local trainers=$1 step=$2 started=$SECONDS stopped="" status=0 before=0
  # To torchrun, which hands it on to the ranks and waits for them. (srun itself would take SIGTERM for the end of the step.)
  trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID.$step"' USR1
  wait "$trainers" || status=$?
  while kill -0 "$trainers" 2>/dev/null; do # a signal ends `wait` before its time
    status=0
    wait "$trainers" || status=$?
  done
  if [[ -f $failures ]]; then before=$(<"$failures"); fi
  if [[ -n $stopped ]]; then
    rm -f "$failures"
    scontrol requeue "$SLURM_JOB_ID"
  elif ((status != 0 && SECONDS - started > ${PATIENCE:-300} && before < ${RESTARTS:-3})); then
    echo $((before + 1)) >"$failures"
    scontrol requeue "$SLURM_JOB_ID"
  else
    rm -f "$failures"
  fi
  exit "$status"
}
