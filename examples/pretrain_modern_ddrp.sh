#!/usr/bin/env bash
# The paper's positions and objective, DDRP + MTH, in the backbone of pretrain_modern_base.sh: 22 layers x 768, two of
# three layers local, GEGLU, pre-norm, no biases. Batch, lengths and steps are those of pretrain_ddrp_base_8gpu.sh.
#
#   hardware   one machine with 8 GPUs of at least 32 GB and bf16 (A100 and newer)
#   time       estimated by DRY_RUN=1 (docs/plan.md says how), not measured: 1,000,000 steps are 60 hours of
#              8 A100s or 19 of 8 H100s. The vocabulary has 30,522 pieces
#   result     not measured by us
#
#   [STEPS=1000000] DATA=prefix VOCAB=vocab.txt SAVE=dir [DRY_RUN=1] bash examples/pretrain_modern_ddrp.sh [more flags]
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_ARGS=(--num-layers 22 --hidden-size 768 --num-attention-heads 12 --ffn geglu --ffn-hidden-size 1152
    --seq-length 512 --layernorm-position pre --no-first-norm --no-bias --layernorm-epsilon 1e-5
    --position-encoding ddrp --relative-distance 64 --local-attention 128 --global-every 3
    --hidden-dropout 0 --attention-dropout 0)
OBJECTIVE_ARGS=(--objective mth --tcd-weight 1.0 --hcd-weight 0.01 --tcd-tokens 50 --hcd-heads 2)
TRAINING_ARGS=(--micro-batch-size 32 --global-batch-size 256 --train-iters "${STEPS:-1000000}" --packing
    --lr 1e-4 --lr-warmup-fraction 0.01 --weight-decay 0.01 --clip-grad 1.0 --bf16 --zero-stage 1)
DATA_ARGS=(--data-path "${DATA:-corpus_text_document}" --vocab-file "${VOCAB:-vocab.txt}" --split 949,50,1)
OUTPUT_ARGS=(--log-interval 100 --eval-interval 5000 --eval-iters 20 --save-interval 10000 --keep-last 5
    --save "${SAVE:-runs/modern_ddrp}" --load "${SAVE:-runs/modern_ddrp}")

ARGS=("${DATA_ARGS[@]}" "${MODEL_ARGS[@]}" "${OBJECTIVE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@")

if [[ -n ${DRY_RUN:-} ]]; then
    exec python pretrain_bert.py --dry-run --world-size 8 --device-memory 32 "${ARGS[@]}"
fi
exec deepspeed --quiet --num_gpus 8 pretrain_bert.py "${ARGS[@]}"
