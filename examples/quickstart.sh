#!/usr/bin/env bash
# The whole path from text to a fine-tuned encoder, small enough for a laptop. `make quickstart` runs it.
#
#   hardware   2 CPU cores, 2 GB of memory (it uses one GPU if there is one)
#   time       about 6 minutes
#   result     OUT/report/report.md: the validation masked-LM loss falls well below the unigram level, and the
#              pre-trained encoder is more accurate than the same encoder with random weights. Before it a line
#              says how often the encoder finds a masked piece in held-out text
#
#   OUT=dir            output folder (default: quickstart)
#   CORPUS=file.jsonl  your own text (default: the documentation inside the installed Python)
#   STEPS=n            pre-training steps (default: 1200)
#
# To resume after a kill, run the same command again: finished stages are skipped. If a command line or your corpus has
# changed, that stage and all later ones run again.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT=${OUT:-quickstart}
CORPUS=${CORPUS:-}
STEPS=${STEPS:-1200}

MODEL_ARGS=(--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --position-encoding ddrp
    --hidden-dropout 0 --attention-dropout 0)
OBJECTIVE_ARGS=(--objective mth --tcd-tokens 50 --hcd-heads 2)
TRAINING_ARGS=(--micro-batch-size 32 --global-batch-size 32 --train-iters "$STEPS" --lr 2e-3 --lr-warmup-fraction 0.1)
OUTPUT_ARGS=(--log-interval 20 --eval-interval 200 --eval-iters 16 --save-interval 400 --keep-last 1)
TASK=$OUT/task/word-order
NOTE="The task is to recognise sentences of the corpus in which two words were swapped. It is scored on documents \
that fine-tuning has not seen. A constant guess has an accuracy of 50."
FINETUNE_ARGS=(--train "$TASK/train.csv" --valid "$TASK/valid.csv" --load "$OUT/huggingface"
    --output-dir "$OUT/finetune" --batch-size 32 --lr 5e-4 --epochs 3 --seeds 1 --max-seq-length 64)

fail() {
    echo "quickstart: error: $*" >&2
    exit 1
}

# quoted WORD…: print the words as you would type them in a shell
quoted() {
    local word line=
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=,+@-]+$ ]] || word=${word@Q}
        line+="$word "
    done
    echo "${line% }"
}

# stage NAME STALE COMMAND…: print and run COMMAND, unless an earlier start has finished it. The folder STALE is deleted
# if another command wrote it; the same command resumes from it.
number=0
stage() {
    local name=$1 stale=$2 command marker later
    shift 2
    command=$(quoted "$@")
    echo "$command" >> "$OUT/commands.txt"
    number=$((number + 1))
    marker=$OUT/stages/$number
    command="$command # $corpus_sum"
    if [[ -f $marker.done && $(< "$marker.done") == "$command" ]]; then
        printf '\n== %s: already done\n' "$name"
        return
    fi
    printf '\n== %s\n$ %s\n' "$name" "${command% # *}"
    if [[ -n $stale ]] && ! [[ -f $marker.begun && $(< "$marker.begun") == "$command" ]]; then
        rm -rf "$stale"
    fi
    for ((later = number; later <= 10; later++)); do
        rm -f "$OUT/stages/$later".*
    done
    echo "$command" > "$marker.begun"
    "$@"
    mv "$marker.begun" "$marker.done"
}

command -v deepspeed > /dev/null || fail "no deepspeed command; run make quickstart, or put .venv/bin on your PATH"
mkdir -p "$OUT/stages"
: > "$OUT/commands.txt"
if [[ -n $CORPUS ]]; then
    [[ -r $CORPUS && ! -d $CORPUS ]] || fail "CORPUS=$CORPUS is not a readable file"
    corpus_sum=$(cksum < "$CORPUS")
else
    corpus_sum=
    CORPUS=$OUT/corpus.jsonl
    stage "Text: the documentation inside Python" "" \
        python tools/collect_documentation.py --output "$CORPUS"
fi

stage "Tokenizer" "" \
    python tools/train_tokenizer.py --input "$CORPUS" --vocab-size 8192 --output "$OUT/vocab.txt" --overwrite

stage "Preprocessing" "" \
    python tools/preprocess_data.py --input "$CORPUS" --output-prefix "$OUT/corpus" --overwrite \
    --vocab-file "$OUT/vocab.txt" --tokenizer-type BertWordPieceLowerCase --workers 2

stage "Pre-training: DDRP positions, MTH objective" "$OUT/checkpoint" \
    deepspeed --quiet --num_gpus 1 pretrain_bert.py --data-path "$OUT/corpus_text_document" --vocab-file "$OUT/vocab.txt" \
    --split 949,50,1 --save "$OUT/checkpoint" --load "$OUT/checkpoint" \
    "${MODEL_ARGS[@]}" "${OBJECTIVE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${OUTPUT_ARGS[@]}"

stage "Export to a Hugging Face folder" "$OUT/huggingface" \
    python tools/convert_checkpoint.py --load "$OUT/checkpoint" --output "$OUT/huggingface"

stage "A task from the corpus: real sentences, and sentences with two words swapped" "" \
    python tools/swap_words.py --input "$CORPUS" --output-dir "$TASK" --train-rows 16000

stage "Fine-tuning" "$OUT/finetune" \
    python -m tasks.finetune "${FINETUNE_ARGS[@]}"

stage "Fine-tuning the same encoder with random weights, to compare" "" \
    python -m tasks.finetune "${FINETUNE_ARGS[@]}" --random-init

stage "Held-out text: is the masked piece among the first ten guesses?" "" \
    python tools/analyze.py masked-places --load "$OUT/checkpoint" --data-path "$OUT/corpus_text_document" \
    --output "$OUT/masked_places.json"

stage "Report" "$OUT/report" \
    python tools/training_report.py --load "$OUT/checkpoint" --data-path "$OUT/corpus_text_document" \
    --scores-dir "$OUT/finetune" --note "$NOTE" --commands "$OUT/commands.txt" --output-dir "$OUT/report"

printf '\nThe report: %s\n' "$OUT/report/report.md"
