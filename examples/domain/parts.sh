#!/usr/bin/env bash
# What three parts of continued pre-training are worth, each beside a run without it: the mean of checkpoints in place of a decay, a
# causal phase first, and steps of a new head alone. docs/lab/experiments.md (E) says what is asked and expected.
#
#   hardware   2 CPU cores, 8 GB of memory, 5 GB of disk
#   time       one to two hours of one core
#   result     OUT/parts.md, each difference with its interval over seeds
#
#   INPUT=file   general text, one JSON object with a "text" on each line; 30 MB or more
#   OUT=dir      output folder (default: parts)
#   SEEDS="n …"  seeds (default: "1 2 3 4"); two calls with two seeds each, into one folder, use two cores
#
# The field is the film reviews of minilm.sh. To resume after a stop, run the same command again.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

INPUT=$(realpath "${INPUT:?"give INPUT=FILE"}")
SEEDS=${SEEDS:-1 2 3 4}
SHAPE=(--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --init-method-std 0.05 --hidden-dropout 0
    --attention-dropout 0 --layernorm-position pre --position-encoding rope --objective mlm)
TRAINING=(--packing --micro-batch-size 8 --global-batch-size 8 --log-interval 50 --eval-iters 100)
GENERAL=("${SHAPE[@]}" "${TRAINING[@]}" --mask-prob 0.3 --data-path general_text_document --vocab-file vocab.txt --lr 2e-3
    --lr-warmup-iters 180 --eval-interval 600)

mkdir -p "${OUT:=parts}"
cd "$OUT"

# trained NAME STEPS FLAGS…: train the run NAME, or go on with it; FLAGS may say where a new run begins (--load)
trained() {
    local name=$1 steps=$2
    shift 2
    [[ ! -e $name/latest ]] || set -- "$@" --load "$name"
    megatron-ddrp pretrain "$@" --train-iters "$steps" --save "$name" --seed "$seed"
}

exec 9> lock
flock 9
source "$here/minilm_and_texts.sh"
made vocab.txt megatron-ddrp train-tokenizer --input "$INPUT" --vocab-size 8192 --output vocab.txt
made general_text_document.idx megatron-ddrp preprocess --input "$INPUT" --output-prefix general --vocab-file vocab.txt
made field_text_document.idx megatron-ddrp preprocess --input field.jsonl --output-prefix field --vocab-file vocab.txt
made theirs_text_document.idx megatron-ddrp preprocess --input field.jsonl --output-prefix theirs --tokenizer-type HuggingFace \
    --tokenizer-model minilm
made start megatron-ddrp convert --from-hf minilm --output start
flock -u 9

for seed in $SEEDS; do
    # 3,600 steps at a constant rate; from step 3,000 a decay, and the mean of the six checkpoints since then
    trained "constant-$seed" 3600 "${GENERAL[@]}" --lr-decay-style constant --save-interval 100 --keep-last 7
    trained "decay-$seed" 3600 "${GENERAL[@]}" --load "constant-$seed/iter_0003000" --lr-decay-style wsd \
        --lr-wsd-decay-iters 600 --lr-wsd-decay-style minus_sqrt
    grep -qs "^mean →" "mean-$seed.log" ||
        megatron-ddrp merge --load "constant-$seed"/iter_000{3100,3200,3300,3400,3500,3600} --overwrite \
            --output "mean-$seed" --data-path general_text_document | tee "mean-$seed.log"

    # what the decay gave reads the field for 400 steps, with a causal phase and without
    made "export-$seed" megatron-ddrp convert --load "decay-$seed" --output "export-$seed"
    made "import-$seed" megatron-ddrp convert --from-hf "export-$seed" --output "import-$seed"
    for way in mlm detour; do
        phases=()
        [[ $way == mlm ]] || phases=(--objective-phases clm:0.3)
        trained "$way-$seed" 400 --config "import-$seed/config.json" --load "import-$seed" "${TRAINING[@]}" \
            --data-path field_text_document --split 90,10,0 --lr 5e-4 --lr-warmup-fraction 0.06 --eval-interval 100 "${phases[@]}"
    done

    # a released encoder with a new head: 50 steps of both, or after 25 of the head alone
    for alone in 0 25; do
        trained "head-$alone-$seed" $((50 + alone)) --config start/config.json --load start "${TRAINING[@]}" \
            --data-path theirs_text_document --split 90,10,0 --lr 5e-5 --lr-warmup-fraction 0.06 --new-head-iters "$alone" \
            --seq-length-phases 64:1
    done
done
python "$here/parts.py" . | tee parts.md
