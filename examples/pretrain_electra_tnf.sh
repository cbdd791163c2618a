#!/usr/bin/env bash
# ELECTRA with Taking Notes on the Fly (TNF): absolute positions, 12 layers x 768, batch 256, 1M steps.
#
#   hardware   one machine with 8 GPUs of at least 32 GB; on V100s replace --bf16 by --fp16
#   time       not measured by us; step 1's progress line prints an estimate
#   result     not measured by us; TNF's authors (arXiv:2008.01466) report a GLUE average of 86.7, and 86.0 without notes
#
#   DATA=prefix VOCAB=vocab.txt SAVE=dir [DRY_RUN=1] bash examples/pretrain_electra_tnf.sh [more flags]
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_ARGS=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512
    --position-encoding absolute)
OBJECTIVE_ARGS=(--objective electra --generator-size 0.3334 --rtd-weight 50
    --notes --notes-min-count 100 --notes-max-count 500 --notes-window 16
    --notes-decay 0.1 --notes-mix 0.5)
TRAINING_ARGS=(--micro-batch-size 32 --global-batch-size 256 --train-iters 1000000
    --lr 1e-4 --lr-warmup-fraction 0.01 --weight-decay 0.01 --clip-grad 1.0 --bf16 --zero-stage 1)
DATA_ARGS=(--data-path "${DATA:-corpus_text_document}" --vocab-file "${VOCAB:-vocab.txt}" --split 949,50,1)
OUTPUT_ARGS=(--log-interval 100 --eval-interval 5000 --eval-iters 20 --save-interval 10000 --keep-last 5
    --save "${SAVE:-runs/electra_tnf}" --load "${SAVE:-runs/electra_tnf}")

ARGS=("${DATA_ARGS[@]}" "${MODEL_ARGS[@]}" "${OBJECTIVE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@")

if [[ -n ${DRY_RUN:-} ]]; then
    exec python pretrain_bert.py --dry-run --world-size 8 --device-memory 32 "${ARGS[@]}"
fi
exec deepspeed --quiet --num_gpus 8 pretrain_bert.py "${ARGS[@]}"
