#!/bin/bash
#SBATCH --job-name=ensemble
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --requeue
# One torchrun a node, which starts one process a core. Without Slurm: two processes on this computer.
set -euo pipefail

nodes=${SLURM_JOB_NUM_NODES:-1}
processes=${SLURM_CPUS_PER_TASK:-2}
head=localhost
start=()
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  start=(srun)
fi
"${start[@]}" torchrun --nnodes="$nodes" --nproc-per-node="$processes" --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-endpoint="$head:29400" --rdzv-id="${SLURM_JOB_ID:-0}" \
  "${SCRIPT:-ensemble.py}" "${STORE:-ensemble-store}"
