#!/usr/bin/env bash
# The fastest recipe that we know, on a CPU: rotary positions, pre-norm, Muon, small batches and many masks
# (docs/lab/plateau.md).
#
#   hardware   2 CPU cores with 2 GB of memory
#   time       10 to 25 minutes for 6 million tokens; STEPS=16384 is 17 million
#   result     four runs on Wikipedia left the plateau after 0.8 to 0.9 million tokens and ended at a validation loss of 4.5 to 4.6
#
#   DATA=prefix VOCAB=vocab.txt SAVE=dir [STEPS=n] [DRY_RUN=1] bash examples/pretrain_fast_cpu.sh [more flags]
#
# Measured in fp32 with 2 layers x 128 and a vocabulary of 8,192 pieces. With DDRP give --position-encoding ddrp
# --absolute-embedding --attention-init offsets --lr 1.5e-3, with BERT's own positions --position-encoding absolute
# --attention-init offsets --lr 1e-3 --optimizer-options scale=0.6. On GPUs, give --layernorm-position pre --mask-prob 0.4:0.25
# --optimizer muon --zero-stage 0 --lr 1e-3 to any recipe with --bf16, such as examples/pretrain_ddrp_base_1gpu.sh, and with
# DDRP --absolute-embedding --attention-init offsets too.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_ARGS=(--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --init-method-std 0.05
    --hidden-dropout 0 --attention-dropout 0 --layernorm-position pre
    --position-encoding rope --objective mlm --mask-prob 0.4:0.25)
TRAINING_ARGS=(--packing --micro-batch-size 8 --global-batch-size 8 --train-iters "${STEPS:-6144}"
    --optimizer muon --zero-stage 0 --lr 3e-3 --lr-warmup-fraction 0.05)
DATA_ARGS=(--data-path "${DATA:-corpus_text_document}" --vocab-file "${VOCAB:-vocab.txt}")
OUTPUT_ARGS=(--log-interval 50 --eval-interval 1024 --eval-iters 40 --save-interval 1024 --keep-last 2
    --save "${SAVE:-runs/fast}" --load "${SAVE:-runs/fast}")

ARGS=("${DATA_ARGS[@]}" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@")

if [[ -n ${DRY_RUN:-} ]]; then
    exec python pretrain_bert.py --dry-run --world-size 1 --device-memory 2 "${ARGS[@]}"
fi
exec deepspeed --quiet --num_gpus 1 pretrain_bert.py "${ARGS[@]}"
