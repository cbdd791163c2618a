#!/usr/bin/env bash
# ELECTRA with DDRP positions: a generator with a third of the heads, 12 layers x 768, batch 256, 1M steps.
#
#   hardware   one machine with 8 GPUs of at least 32 GB; on V100s replace --bf16 by --fp16
#   time       not measured by us; step 1's progress line prints an estimate
#   result     not measured by us; TNF's authors (arXiv:2008.01466) report 86.0 for ELECTRA base with absolute positions
#
#   DATA=prefix VOCAB=vocab.txt SAVE=dir [DRY_RUN=1] bash examples/pretrain_electra_ddrp.sh [more flags]
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_ARGS=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512
    --position-encoding ddrp --relative-distance 64)
OBJECTIVE_ARGS=(--objective electra --generator-size 0.3334 --rtd-weight 50)
TRAINING_ARGS=(--micro-batch-size 32 --global-batch-size 256 --train-iters 1000000
    --lr 1e-4 --lr-warmup-fraction 0.01 --weight-decay 0.01 --clip-grad 1.0 --bf16 --zero-stage 1)
DATA_ARGS=(--data-path "${DATA:-corpus_text_document}" --vocab-file "${VOCAB:-vocab.txt}" --split 949,50,1)
OUTPUT_ARGS=(--log-interval 100 --eval-interval 5000 --eval-iters 20 --save-interval 10000 --keep-last 5
    --save "${SAVE:-runs/electra_ddrp}" --load "${SAVE:-runs/electra_ddrp}")

ARGS=("${DATA_ARGS[@]}" "${MODEL_ARGS[@]}" "${OBJECTIVE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@")

if [[ -n ${DRY_RUN:-} ]]; then
    exec python pretrain_bert.py --dry-run --world-size 8 --device-memory 32 "${ARGS[@]}"
fi
exec deepspeed --quiet --num_gpus 8 pretrain_bert.py "${ARGS[@]}"
