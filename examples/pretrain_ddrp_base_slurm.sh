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
# The paper's base model under Slurm: DDRP + MTH, 12 layers x 768, batch 256, 1M steps. Five minutes before its time is
# up the job saves and queues itself again, until the last step.
#
#   hardware   2 nodes with 8 GPUs of 32 GB each; with bf16 (A100 and newer) replace --fp16 by --bf16
#   time       an estimate, not measured: 8e19 FLOP, a day and a half on V100s at 30 % of their peak, so two jobs
#   result     the paper's GLUE average for this model is 85.00 (its table 1)
#
#   DATA=prefix VOCAB=vocab.txt SAVE=dir sbatch examples/pretrain_ddrp_base_slurm.sh [more flags]
#   DRY_RUN=1 bash examples/pretrain_ddrp_base_slurm.sh
#
# Submit it in the project's folder with the environment active: srun hands both on. DeepSpeed's launcher is not used.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}" # Slurm runs a copy of this file

MODEL_ARGS=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512
    --position-encoding ddrp --relative-distance 64)
OBJECTIVE_ARGS=(--objective mth --tcd-weight 1.0 --hcd-weight 0.01 --tcd-tokens 50 --hcd-heads 2)
TRAINING_ARGS=(--micro-batch-size 16 --global-batch-size 256 --train-iters 1000000
    --lr 1e-4 --lr-warmup-fraction 0.01 --weight-decay 0.01 --clip-grad 1.0 --fp16 --zero-stage 1)
DATA_ARGS=(--data-path "${DATA:-corpus_text_document}" --vocab-file "${VOCAB:-vocab.txt}" --split 949,50,1)
OUTPUT_ARGS=(--log-interval 100 --eval-interval 5000 --eval-iters 20 --save-interval 10000 --keep-last 5
    --save "${SAVE:-runs/ddrp_base}" --load "${SAVE:-runs/ddrp_base}")

ARGS=("${DATA_ARGS[@]}" "${MODEL_ARGS[@]}" "${OBJECTIVE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@")

if [[ -n ${DRY_RUN:-} ]]; then
    exec python pretrain_bert.py "${ARGS[@]}" --dry-run --world-size 16 --device-memory 32
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

code=0
srun --kill-on-bad-exit=1 python pretrain_bert.py "${ARGS[@]}" || code=$?
if [[ $code == 75 ]]; then # stopped by the signal, with a checkpoint
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
