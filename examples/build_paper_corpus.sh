#!/usr/bin/env bash
# The paper's corpus, English Wikipedia and a folder of books, as one indexed dataset in their natural proportions, with
# its documents in a random order, so that training and validation have both.
#
#   hardware   CPU cores (WORKERS of them), 8 GB of memory, 4 times the size of the text on disk
#   time       an estimate, not measured: 16 GB of text in about an hour on 16 cores
#   result     OUT/paper_text_document.{bin,idx,json}, 3 to 4 billion tokens from 16 GB, and the vocabulary beside it
#
#   WIKI=dir       WikiExtractor's output for a dump (dumps.wikimedia.org: enwiki-latest-pages-articles.xml.bz2):
#                      wikiextractor enwiki-latest-pages-articles.xml.bz2 -o wiki        (with or without --json)
#   BOOKS=dir      books as .txt, one per file, also compressed; BooksCorpus itself is no longer distributed
#   VOCAB=file     vocab.txt; the paper uses BERT's, 30,522 pieces. Default: train one of that size on the text
#   OUT=dir        default: corpus      WORKERS=n  default: 8
#
#   WIKI=wiki BOOKS=books [VOCAB=vocab.txt] bash examples/build_paper_corpus.sh
#
# To resume after a kill, run the same command again. Then: bash examples/compare.sh examples/compare/paper.yaml
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT=${OUT:-corpus}
WORKERS=${WORKERS:-8}

fail() {
    echo "build_paper_corpus: error: $*" >&2
    exit 2
}

[[ -n ${WIKI:-} ]] || fail "WIKI is missing: name the folder (or file) that WikiExtractor wrote; see the top of this script"
[[ -n ${BOOKS:-} ]] || fail "BOOKS is missing: name a folder of books as .txt, one per file; see the top of this script"
[[ -e $WIKI ]] || fail "WIKI=$WIKI: no such file or folder; expected WikiExtractor's output"
[[ -e $BOOKS ]] || fail "BOOKS=$BOOKS: no such folder; expected books as .txt, one per file"
[[ -z ${VOCAB:-} || -f $VOCAB ]] || fail "VOCAB=$VOCAB: no such file; expected a WordPiece vocabulary, or leave VOCAB out to train one"
mkdir -p "$OUT"

printf '\n== Books: one document each\n'
python tools/books_to_jsonl.py --input "$BOOKS" --output "$OUT/books.jsonl"

if [[ -n ${VOCAB:-} ]]; then
    [[ $VOCAB -ef $OUT/vocab.txt ]] || cp "$VOCAB" "$OUT/vocab.txt"
elif [[ ! -f $OUT/vocab.txt ]]; then
    printf '\n== Vocabulary\n'
    python tools/train_tokenizer.py --input "$WIKI" "$OUT/books.jsonl" --vocab-size "${VOCAB_SIZE:-30522}" \
        --output "$OUT/vocab.txt"
fi

printf '\n== Wikipedia and books: one dataset\n'
python tools/preprocess_data.py --input "$WIKI" "$OUT/books.jsonl" --output-prefix "$OUT/paper" --overwrite \
    --vocab-file "$OUT/vocab.txt" --tokenizer-type BertWordPieceLowerCase --workers "$WORKERS"

printf '\n== Documents in a random order\n'
python tools/dataset.py shuffle "$OUT/paper_text_document" --output-prefix "$OUT/paper_text_document" --overwrite

printf '\nFor pretrain_bert.py: --data-path %s --vocab-file %s\n' "$OUT/paper_text_document" "$OUT/vocab.txt"
