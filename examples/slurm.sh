#!/usr/bin/env bash
# Submit with: sbatch examples/slurm.sh config.yaml --train.lr=1e-5 …
# One torchrun per node; they find each other through c10d on the first node. The same command after a
# preemption resumes from the last checkpoint.
#SBATCH --job-name=seqbraid
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A job that is requeued gets the same id: the restart count keeps its rendezvous apart.
rendezvous_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"

srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_NNODES" \
  --nproc-per-node="${GPUS_PER_NODE:-8}" \
  --max-restarts=3 \
  --rdzv-backend=c10d \
  --rdzv-endpoint="$head_node:${RENDEZVOUS_PORT:-29400}" \
  --rdzv-id="$rendezvous_id" \
  -m seqbraid train "$@"
