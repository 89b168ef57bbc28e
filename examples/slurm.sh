#!/bin/bash
# Trains on 8 nodes of 8 GPUs under SLURM:  sbatch examples/slurm.sh examples/recipes/pretrain-8b-128k.yaml [--section.key value ...]
# One torchrun per node, with rendezvous on the first node. The job is requeued before its time limit, and if a rank or a node fails,
# and resumes from its last checkpoint: set checkpoint.every so that little is lost. It ends after MAX_FAILURES (3) failures
# without a new checkpoint, as a mistake in settings would fail for ever.
# In a container, by pyxis and enroot:  IMAGE='registry#longctx:0.1.0' sbatch ..  (or a .sqsh file)
#SBATCH --job-name=longctx
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -euo pipefail

if (($# == 0)); then
  echo "usage: sbatch $0 run.yaml [--section.key value ...]" >&2
  exit 2
fi
run_dir=${RUN_DIR:-runs/$SLURM_JOB_ID}  # on storage shared by all nodes; a requeued job keeps its id
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 10000))

# Nodes with several network interfaces: name the one that connects the nodes. See docs/clusters.md.
# export NCCL_SOCKET_IFNAME=eth GLOO_SOCKET_IFNAME=eth0

container=()
if [[ -n ${IMAGE:-} ]]; then
  container=(--container-image "$IMAGE" --container-mounts "${MOUNTS:-$PWD:$PWD}" --container-workdir "$PWD")
fi

newest_checkpoint() { readlink "$run_dir/latest" || true; }
before=$(newest_checkpoint)
failures_file=$run_dir.failures

trap 'scontrol requeue "$SLURM_JOB_ID"; exit 0' USR1

# All cores of the node for its one task: srun does not take --cpus-per-task from sbatch. Each process gets its share of them, for
# optimizers in host memory; torchrun would set 1.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_ON_NODE / SLURM_GPUS_ON_NODE))}

# On SIGTERM the processes finish their step and save, which takes a large model longer than the 30 s after which torchrun would
# kill them (PyTorch 2.12 and later read this). SLURM itself kills after its KillWait.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

# Nodes may start minutes apart, so the rendezvous timeouts exceed torchrun's defaults. A rank that hangs ends the run after
# train.timeout_s, a rank that fails ends it at once.
srun --kill-on-bad-exit=1 --cpus-per-task "$SLURM_CPUS_ON_NODE" "${container[@]}" torchrun \
  --nnodes "$SLURM_NNODES" \
  --nproc-per-node "$SLURM_GPUS_ON_NODE" \
  --rdzv-backend c10d \
  --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-endpoint "$head_node:$port" \
  --rdzv-conf join_timeout=1800,read_timeout=1800 \
  --max-restarts 0 \
  -m longctx train "$@" --train.run_dir "$run_dir" --resume-if-any &
status=0
wait $! || status=$?
if ((status == 0)); then
  rm -f "$failures_file"
  exit 0
fi

failures=1
if [[ $(newest_checkpoint) == "$before" && -f $failures_file ]]; then
  failures=$(($(<"$failures_file") + 1))
fi
mkdir -p "$(dirname "$run_dir")"
echo "$failures" >"$failures_file"
if ((failures >= ${MAX_FAILURES:-3})); then
  echo "$failures failures without a new checkpoint: job $SLURM_JOB_ID is not requeued" >&2
  exit "$status"
fi
echo "failed with status $status: job $SLURM_JOB_ID is requeued, and continues from $(newest_checkpoint)" >&2
scontrol requeue "$SLURM_JOB_ID"
exit "$status"
