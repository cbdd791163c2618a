#!/usr/bin/env bash
# DDRP + MTH, 4 layers x 256, on real text with two CPU cores: the run of docs/lab/measurements.md.
#
#   hardware   2 CPU cores with bf16 instructions (drop --bf16 elsewhere), 2 GB of memory
#   time       about half an hour
#   result     validation masked-LM loss more than 0.5 nats below the unigram level; see docs/lab/measurements.md
#
#   DATA=prefix VOCAB=vocab.txt SAVE=dir [DRY_RUN=1] bash examples/pretrain_ddrp_small_cpu.sh [more flags]
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_ARGS=(--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128
    --hidden-dropout 0 --attention-dropout 0 --position-encoding ddrp --objective mth)
TRAINING_ARGS=(--micro-batch-size 16 --global-batch-size 32 --train-iters 1200
    --lr 1e-3 --lr-warmup-fraction 0.02 --bf16)
DATA_ARGS=(--data-path "${DATA:-corpus_text_document}" --vocab-file "${VOCAB:-vocab.txt}")
OUTPUT_ARGS=(--log-interval 25 --eval-interval 200 --eval-iters 40 --save-interval 500 --keep-last 2
    --save "${SAVE:-runs/ddrp_small}" --load "${SAVE:-runs/ddrp_small}")

ARGS=("${DATA_ARGS[@]}" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@")

if [[ -n ${DRY_RUN:-} ]]; then
    exec python pretrain_bert.py --dry-run --world-size 1 --device-memory 2 "${ARGS[@]}"
fi
exec deepspeed --quiet --num_gpus 1 pretrain_bert.py "${ARGS[@]}"
