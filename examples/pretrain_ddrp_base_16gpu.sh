#!/usr/bin/env bash
# The paper's base model on the paper's 16 GPUs: DDRP + MTH, 12 layers x 768, batch 256, 1M steps, fp16.
#
#   hardware   2 machines with 8 GPUs of 32 GB each (V100, which have no bf16); ssh without a password between them
#              and one file system for the data and SAVE
#   time       estimated by DRY_RUN=1, not measured (no V100 was at hand): two and a half days on 16 V100s
#   torch      V100s need a build with CUDA 12.6: docs/install.md
#   result     the paper's GLUE average for this model is 85.00 (its table 1)
#
#   [HOSTFILE=examples/hostfile_2x8] DATA=prefix VOCAB=vocab.txt SAVE=dir [DRY_RUN=1] \
#       bash examples/pretrain_ddrp_base_16gpu.sh [more flags]
#
# The host file has one line `name slots=8` per machine. Start this on the first machine; see docs/launching.md.
# LAUNCHER replaces DeepSpeed's launcher as the command that starts pretrain_bert.py; the Slurm recipe sets it.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

HOSTFILE=${HOSTFILE:-examples/hostfile_2x8}
LAUNCHER=${LAUNCHER:-deepspeed --quiet --hostfile $HOSTFILE}
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
    exec python pretrain_bert.py --dry-run --world-size 16 --device-memory 32 "${ARGS[@]}"
fi
# Kernels are compiled into folders of each machine's own disk. DeepSpeed's launcher sends variables of other names than
# NCCL… and PYTHON… to the other machines only if a file lists them: one without a name, which is gone with its reader.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton_$UID}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/torchinductor_$UID}
if [[ $LAUNCHER == deepspeed* && -z ${DS_ENV_FILE:-} ]]; then
    lines=$(mktemp)
    env | grep -E '^(TRITON_CACHE_DIR|TORCHINDUCTOR_CACHE_DIR|GLOO_SOCKET_IFNAME)=' >"$lines"
    cat ~/.deepspeed_env .deepspeed_env >>"$lines" 2>/dev/null || true
    exec 9<"$lines"
    rm "$lines"
    export DS_ENV_FILE=/dev/fd/9
fi
exec $LAUNCHER pretrain_bert.py "${ARGS[@]}"
