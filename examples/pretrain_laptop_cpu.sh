#!/usr/bin/env bash
# An English encoder from text alone, in an evening on two CPU cores: rotary positions, six layers, Muon, short sentences
# (docs/laptop.md).
#
#   hardware   2 CPU cores with 8 GB of memory; with bf16 instructions twice as fast (--no-bf16 without)
#   time       116 minutes for 36 million tokens on an AMD EPYC with AVX512_BF16; without such instructions about twice
#   result     one run had 65 % of BLiMP's 67,000 pairs right, after novels and Wikipedia
#
#   DATA="[WEIGHT] prefix …" VOCAB=vocab.txt SAVE=dir [STEPS=n] [DRY_RUN=1] bash examples/pretrain_laptop_cpu.sh [more flags]
#
# The text is one sentence of at most 20 words per document: tools/split_sentences.py makes it so. docs/laptop.md has all
# commands.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

read -ra DATA_PATH <<< "${DATA:-corpus_text_document}"
MODEL_ARGS=(--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --init-method-std 0.04
    --position-encoding rope --layernorm-position pre --ffn geglu --norm rmsnorm --no-bias --num-segments 0
    --hidden-dropout 0 --attention-dropout 0
    --objective mlm --mask-prob 0.3:0.15)
TRAINING_ARGS=(--packing --micro-batch-size 112 --global-batch-size 224 --train-iters "${STEPS:-7500}" --bf16 --num-threads 1
    --optimizer muon --zero-stage 0 --lr 5e-3 --lr-warmup-iters 200 --adam-beta2 0.98 --weight-decay 0.1)
DATA_ARGS=(--data-path "${DATA_PATH[@]}" --split 995,4,1 --vocab-file "${VOCAB:-vocab.txt}")
OUTPUT_ARGS=(--log-interval 40 --eval-interval 800 --eval-iters 20 --save-interval 800 --keep-last 2 --milestone-interval 1600
    --save "${SAVE:-runs/laptop}" --load "${SAVE:-runs/laptop}")

ARGS=("${DATA_ARGS[@]}" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@")

if [[ -n ${DRY_RUN:-} ]]; then
    exec python pretrain_bert.py --dry-run --world-size 2 --device-memory 8 "${ARGS[@]}"
fi
exec deepspeed --quiet --num_gpus 2 pretrain_bert.py "${ARGS[@]}"
