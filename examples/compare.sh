#!/usr/bin/env bash
# Repeat the paper's comparison at a scale you can afford: train each model of a plan, score and analyse it, and write
# one page.
#
#   hardware   as the plan says on top: cpu-hours (2 CPU cores), gpu-30min (one GPU), paper (16 GPUs)
#   time       as the plan says
#   result     OUT/page.html and OUT/page.md
#
#   OUT=dir           output folder (default: compare)
#   CORPUS="a.jsonl"  texts instead of the plan's; file names without blanks
#   GLUE=dir          GLUE's folder instead of the plan's; GLUE=none skips GLUE
#   PAIRS=dir         folder of minimal pairs (BLiMP) instead of the plan's; PAIRS=none skips them
#
#   [OUT=…] [CORPUS=…] [GLUE=…] [PAIRS=…] [DRY_RUN=1] bash examples/compare.sh [PLAN.yaml] [more flags]
#
# To resume after a kill, run the same command again.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PLAN=examples/compare/cpu-hours.yaml
if [[ $# -gt 0 && $1 != -* ]]; then
    PLAN=$1
    shift
fi

ARGS=("$PLAN" --output-dir "${OUT:-compare}")
if [[ -n ${CORPUS:-} ]]; then
    read -ra TEXTS <<< "$CORPUS"
    ARGS+=(--input "${TEXTS[@]}")
fi
if [[ ${GLUE:-} == none ]]; then
    ARGS+=(--no-glue)
elif [[ -n ${GLUE:-} ]]; then
    ARGS+=(--glue-dir "$GLUE")
fi
if [[ ${PAIRS:-} == none ]]; then
    ARGS+=(--no-minimal-pairs)
elif [[ -n ${PAIRS:-} ]]; then
    ARGS+=(--minimal-pairs-dir "$PAIRS")
fi
[[ -z ${DRY_RUN:-} ]] || ARGS+=(--dry-run)

exec python -m tasks.compare "${ARGS[@]}" "$@"
