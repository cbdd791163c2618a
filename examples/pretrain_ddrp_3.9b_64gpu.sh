#!/usr/bin/env bash
# A BERT of 3.9 billion parameters, as large as Megatron-LM's largest, on tensor 8 x pipeline 2 x data 4 ranks: 48 layers
# x 2560, LayerNorm before each block, batch 1024.
#
#   hardware   8 machines with 8 GPUs of 80 GB each (A100 or H100) and NVLink inside, where tensor parallelism stays
#   time       estimated by DRY_RUN=1, not measured: 1M steps are 40 days of 64 A100s or 13 of 64 H100s; a model of this
#              size reaches a larger share of the peak, and this layout communicates more, than the estimate assumes
#   result     not measured by us; Megatron-LM's 3.9B (absolute positions, arXiv:1909.08053) reached 91.4 on MNLI
#
#   [HOSTFILE=hostfile] DATA=prefix VOCAB=vocab.txt SAVE=dir [DRY_RUN=1] \
#       bash examples/pretrain_ddrp_3.9b_64gpu.sh [more flags]
#
# On other machines, choose tensor x pipeline x data = the number of GPUs; DRY_RUN=1 refuses a layout that does not fit.
# Pipelines also talk through gloo: where machines have several networks, export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.
# With more memory use a larger --micro-batch-size, with less use --checkpoint-activations.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL_ARGS=(--num-layers 48 --hidden-size 2560 --num-attention-heads 40 --seq-length 512 --layernorm-position pre
    --position-encoding ddrp --relative-distance 64)
OBJECTIVE_ARGS=(--objective mth --tcd-weight 1.0 --hcd-weight 0.01 --tcd-tokens 50 --hcd-heads 2)
LAYOUT_ARGS=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --zero-stage 1)
TRAINING_ARGS=(--micro-batch-size 8 --global-batch-size 1024 --train-iters 1000000 --bf16 "${LAYOUT_ARGS[@]}"
    --lr 1e-4 --lr-warmup-fraction 0.01 --weight-decay 0.01 --clip-grad 1.0)
DATA_ARGS=(--data-path "${DATA:-corpus_text_document}" --vocab-file "${VOCAB:-vocab.txt}" --split 949,50,1)
OUTPUT_ARGS=(--log-interval 100 --eval-interval 5000 --eval-iters 20 --save-interval 2000 --keep-last 5
    --save "${SAVE:-runs/ddrp_3.9b}" --load "${SAVE:-runs/ddrp_3.9b}")

ARGS=("${DATA_ARGS[@]}" "${MODEL_ARGS[@]}" "${OBJECTIVE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@")

if [[ -n ${DRY_RUN:-} ]]; then
    exec python pretrain_bert.py --dry-run --world-size 64 --device-memory 80 "${ARGS[@]}"
fi
# Kernels are compiled into folders of each machine's own disk. DeepSpeed's launcher sends variables of other names than
# NCCL… and PYTHON… to the other machines only if a file lists them: one without a name, which is gone with its reader.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton_$UID}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/torchinductor_$UID}
if [[ -z ${DS_ENV_FILE:-} ]]; then
    lines=$(mktemp)
    env | grep -E '^(TRITON_CACHE_DIR|TORCHINDUCTOR_CACHE_DIR|GLOO_SOCKET_IFNAME)=' >"$lines"
    cat ~/.deepspeed_env .deepspeed_env >>"$lines" 2>/dev/null || true
    exec 9<"$lines"
    rm "$lines"
    export DS_ENV_FILE=/dev/fd/9
fi
exec deepspeed --quiet --hostfile "${HOSTFILE:-hostfile}" pretrain_bert.py "${ARGS[@]}"
