#!/usr/bin/env bash
#SBATCH --job-name=preprocess
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --time=4:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Preprocessing on many machines: a Slurm job array in which each task takes one part of the input, and a job that joins
# the parts when all of them are there.
#
#   hardware   8 CPU cores and 16 GB per task, no GPU; PARTS tasks, as many at once as Slurm gives
#   time       bytes of text / (PARTS x 8 x the speed of one core, see docs/lab/benchmarks.md); the merge copies the files
#   result     PREFIX_text_document.{bin,idx,json}, the same bytes as one run over the whole input
#
#   INPUT="corpus/ more/*.jsonl" PREFIX=data/corpus VOCAB=vocab.txt PARTS=64 bash examples/preprocess_slurm.sh [flags]
#   ARRAY=7,9 ...   only these parts, such as those that failed, and the merge after them
#   DRY_RUN=1 ...   print the two sbatch commands
#
# Run it on the login node with the environment active. INPUT holds files, folders and patterns, names without blanks;
# the flags are those of `megatron-ddrp preprocess`. A task that is stopped and queued again begins its part
# again. The parts may be removed after the merge.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
: "${INPUT:?files, folders or patterns of text}" "${PREFIX:?beginning of the names of the datasets}" "${PARTS:?number of parts}"

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    export INPUT PREFIX PARTS VOCAB="${VOCAB:-}"
    SUBMIT=(sbatch --parsable)
    [[ -z ${DRY_RUN:-} ]] || SUBMIT=(echo "${SUBMIT[@]}")
    ARRAY_JOB=$("${SUBMIT[@]}" --array="${ARRAY:-1-$PARTS}" "${BASH_SOURCE[0]}" "$@")
    echo "parts: $ARRAY_JOB"
    ARRAY_JOB=${ARRAY_JOB%%;*} # "job;cluster" where there are several clusters
    [[ -z ${DRY_RUN:-} ]] || ARRAY_JOB=JOB
    echo "merge: $("${SUBMIT[@]}" --dependency=afterok:"$ARRAY_JOB" --kill-on-invalid-dep=yes --cpus-per-task=1 "${BASH_SOURCE[0]}")"
    exit
fi

if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    read -ra FILES <<< "$INPUT" # patterns stay patterns, which preprocess resolves alike on every machine
    ARGS=(--input "${FILES[@]}" --output-prefix "$PREFIX" --workers "${SLURM_CPUS_PER_TASK:-1}")
    [[ -z $VOCAB ]] || ARGS+=(--vocab-file "$VOCAB")
    exec megatron-ddrp preprocess --partition "$SLURM_ARRAY_TASK_ID/$PARTS" "${ARGS[@]}" "$@"
fi

printf -v FIRST "%0*d" ${#PARTS} 1
for part in "${PREFIX}_part$FIRST-of-${PARTS}_"*.idx; do # one dataset per JSON key
    NAME=${part#"${PREFIX}_part$FIRST-of-${PARTS}_"}
    megatron-ddrp dataset merge --output-prefix "${PREFIX}_${NAME%.idx}" "${PREFIX}_part"*"-of-${PARTS}_$NAME"
done
