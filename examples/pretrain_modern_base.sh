#!/usr/bin/env bash
# ModernBERT's backbone (arXiv:2412.13663): 22 layers x 768, rope with two bases, two of three layers local, GEGLU,
# pre-norm, no biases, no segments, no dropout. tools/convert_checkpoint.py exports it as a plain ModernBERT.
# 30 % of the tokens are masked at first and 15 % at the end; the last tenth of the steps decays.
#
#   hardware   one machine with 8 GPUs of at least 32 GB and bf16 (A100 and newer)
#   time       estimated by DRY_RUN=1 (docs/plan.md says how), not measured: 100,000 steps, up to 52 billion tokens,
#              are 25 hours of 8 A100s or 8 of 8 H100s
#   result     not measured by us; the learning rate is not tuned
#
#   [STEPS=100000] DATA=prefix VOCAB=vocab.txt SAVE=dir [DRY_RUN=1] bash examples/pretrain_modern_base.sh [more flags]
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_ARGS=(--num-layers 22 --hidden-size 768 --num-attention-heads 12 --ffn geglu --ffn-hidden-size 1152
    --seq-length 1024 --layernorm-position pre --no-first-norm --no-bias --layernorm-epsilon 1e-5 --num-segments 0
    --position-encoding rope --rope-theta 160000 --local-attention 128 --global-every 3 --local-rope-theta 10000
    --hidden-dropout 0 --attention-dropout 0)
OBJECTIVE_ARGS=(--objective mlm --mask-prob 0.3:0.15 --masking token)
TRAINING_ARGS=(--micro-batch-size 16 --global-batch-size 512 --train-iters "${STEPS:-100000}" --packing
    --lr 5e-4 --lr-warmup-fraction 0.02 --lr-decay-style wsd --lr-wsd-decay-style minus_sqrt
    --adam-beta2 0.98 --weight-decay 0.01 --clip-grad 1.0 --bf16 --zero-stage 1)
DATA_ARGS=(--data-path "${DATA:-corpus_text_document}" --vocab-file "${VOCAB:-vocab.txt}" --split 949,50,1)
OUTPUT_ARGS=(--log-interval 100 --eval-interval 5000 --eval-iters 20 --save-interval 5000 --keep-last 5
    --save "${SAVE:-runs/modern_base}" --load "${SAVE:-runs/modern_base}")

ARGS=("${DATA_ARGS[@]}" "${MODEL_ARGS[@]}" "${OBJECTIVE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@")

if [[ -n ${DRY_RUN:-} ]]; then
    exec python pretrain_bert.py --dry-run --world-size 8 --device-memory 32 "${ARGS[@]}"
fi
exec deepspeed --quiet --num_gpus 8 pretrain_bert.py "${ARGS[@]}"
