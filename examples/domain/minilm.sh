#!/usr/bin/env bash
# Is a released encoder better at a task of a field once it has read the field's text? all-MiniLM-L6-v2, film reviews, and ratings of
# sentences from four fields, all from PyPI. docs/lab/experiments.md (D) says what is asked and expected.
#
#   hardware   2 CPU cores, 8 GB of memory, 2 GB of disk
#   time       an evening
#   result     OUT/scores/table.md, every encoder on every test; OUT/gains.md, the gains of each way to continue
#
#   OUT=dir    output folder (default: domain)
#   SEEDS=n    pre-training seeds of each way to continue (default: 5)
#   STEPS=n    steps of 32 sentences (default: 288, of which the encoder rests in the first 32: 260,000 tokens, 1.26 passes)
#
# To resume after a stop, run the same command again.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

OUT=${OUT:-domain}
SEEDS=${SEEDS:-5}
STEPS=${STEPS:-288}
ARMS=(mlm detour vocabulary)
TRAINING=(--packing --seq-length-phases 128:1 --micro-batch-size 16 --global-batch-size 32 --train-iters "$STEPS" --lr 1e-4
    --lr-warmup-fraction 0.06 --log-interval 8 --eval-interval 64 --eval-iters 8 --save-interval 64 --keep-last 1
    --new-head-iters $((STEPS / 9)))

mkdir -p "$OUT"
cd "$OUT"

source "$here/minilm_and_texts.sh"

made vocab.txt megatron-ddrp train-tokenizer --input field.jsonl --vocab-size 8192 --output vocab.txt
made theirs_text_document.idx megatron-ddrp preprocess --input field.jsonl --output-prefix theirs --tokenizer-type HuggingFace \
    --tokenizer-model minilm
made mine_text_document.idx megatron-ddrp preprocess --input field.jsonl --output-prefix mine --vocab-file vocab.txt
made start megatron-ddrp convert --from-hf minilm --output start
made start_vocabulary megatron-ddrp convert --from-hf minilm --vocab-file vocab.txt --output start_vocabulary

encoders=(minilm)
for seed in $(seq "$SEEDS"); do
    for arm in "${ARMS[@]}"; do
        start=start data=theirs more=()
        [[ $arm != vocabulary ]] || start=start_vocabulary data=mine
        [[ $arm != detour ]] || more=(--objective-phases clm:0.7)
        run=runs/$arm-$seed
        [[ -e $run/latest ]] && from=$run || from=$start
        megatron-ddrp pretrain --config "$start/config.json" --load "$from" --save "$run" --data-path "${data}_text_document" \
            --seed "$seed" "${TRAINING[@]}" "${more[@]}"
        encoders+=("$run")
    done
done

tests=()
for field in films products editorials tweets; do tests+=("$field=test-$field.csv"); done
megatron-ddrp finetune --train train.csv --valid valid.csv --test "${tests[@]}" --load "${encoders[@]}" --output-dir scores \
    --batch-size 16 --lr 5e-5 --epochs 4 --seeds "$SEEDS" --max-seq-length 64
python "$here/gains.py" scores minilm "${ARMS[@]}" | tee gains.md
