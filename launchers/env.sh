# shellcheck shell=bash
#
# The environment of every drmas process, in one place. The launchers source it; nothing runs it. What is set already stays as it
# is, so that `NAME=value launchers/...` overrides a line, and editing a line here changes it for all launchers, the Kubernetes
# ones included: `drmas launch kubernetes` puts this very file into the pods.
#
# Hosts of one job must agree on all of it but the interfaces; a job starts by comparing them (cluster.preflight).

# --- Python
export PYTHONSAFEPATH=1   # the folder that a job is started from doesn't shadow packages
export PYTHONUNBUFFERED=1 # a job that is killed leaves its last lines in the log

# --- Threads
# Trainer ranks and engines share the cores of a host. Threads that spin while they wait would take them from each other.
# (How many threads a rank computes with is train.threads, whatever OMP_NUM_THREADS says.)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-0}

# --- CUDA and NCCL
# Kernels start in the order in which they are queued: tensor parallelism hides its communication behind a matrix product by
# queueing the communication first.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Trainers and engines form communicators for the weights, and both ends must have the same value. 0 is what vLLM's processes had
# for long, and leaves more memory beside CUDA graphs. Racks with NVLink between hosts (NVL72) want 1 on both ends.
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0}

# --- Which network
# gloo listens on the address that this host's name stands for, which is often loopback or a management network. Of one host it is
# loopback. Of several, the interface that leads to the host where they meet (RENDEZVOUS, set by multi_node.sh); NCCL makes its
# connections there, too, and then moves data over whatever it finds that is faster.
if [[ -n ${RENDEZVOUS:-} ]]; then
  if [[ -z ${GLOO_SOCKET_IFNAME:-} ]]; then
    GLOO_SOCKET_IFNAME=$(python "$(dirname "${BASH_SOURCE[0]}")/interface_towards.py" "${RENDEZVOUS%:*}")
  fi
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$GLOO_SOCKET_IFNAME}
fi
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

# --- How a job ends
# On SIGTERM or Ctrl-C the step in progress is finished and saved. torchrun kills what is left after so many seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# --- Caches
# Models: the same path on every host, on a shared disk or copied to each. HF_HUB_OFFLINE=1 keeps jobs from asking the hub at all,
# once `hf download NAME` has been there; without it every start asks whether there is something new.
export HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}
export DRMAS_CACHE=${DRMAS_CACHE:-$HOME/.cache/drmas}
# Compiled kernels: on a disk of this host, since on a shared one all hosts wait for each other's locks. Code is loaded from there,
# so the folder must be one's own.
drmas_local=${DRMAS_LOCAL:-${TMPDIR:-/tmp}/drmas-$(id -u)}
(umask 077 && mkdir -p "$drmas_local")
if [[ ! -O $drmas_local || -L $drmas_local ]]; then
  echo "launchers/env.sh: $drmas_local belongs to somebody else; set DRMAS_LOCAL to a folder of your own on this host" >&2
  exit 2
fi
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$drmas_local/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$drmas_local/inductor}
