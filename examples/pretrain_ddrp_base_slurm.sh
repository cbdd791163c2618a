#!/usr/bin/env bash
#SBATCH --job-name=ddrp_base
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# The paper's base model under Slurm: each rank runs examples/pretrain_ddrp_base_16gpu.sh, which has the flags. Five
# minutes before its time limit the job saves and queues itself again, until the last step is done.
#
#   hardware   2 nodes with 8 GPUs of 32 GB each; on A100 and newer replace --fp16 in that script by --bf16
#   time       an estimate, not measured: two days on V100s at 23 % of their peak, so two or three jobs
#   result     the paper's GLUE average for this model is 85.00 (its table 1)
#
#   DATA=prefix VOCAB=vocab.txt SAVE=dir sbatch examples/pretrain_ddrp_base_slurm.sh [more flags]
#   DRY_RUN=1 bash examples/pretrain_ddrp_base_slurm.sh
#
# Submit it from the project's folder with the environment active: srun passes both on. DeepSpeed's launcher is not used.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}" # Slurm runs a copy of this file

if [[ -n ${DRY_RUN:-} ]]; then
    exec bash examples/pretrain_ddrp_base_16gpu.sh "$@"
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export LAUNCHER=python # srun has started the ranks

code=0
# Since Slurm 22.05 srun does not take the job's --cpus-per-task.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-4}" \
    bash examples/pretrain_ddrp_base_16gpu.sh "$@" || code=$?
if [[ $code == 75 ]]; then # stopped by the signal, with a checkpoint
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
