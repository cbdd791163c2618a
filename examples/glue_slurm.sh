#!/usr/bin/env bash
#SBATCH --job-name=glue
#SBATCH --array=1-8
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=32G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# A GLUE sweep as a Slurm job array: every task takes runs that nobody else is doing, until none is left, and the one
# that finishes last writes the tables.
#
#   hardware   one GPU per task; as many tasks as --array says, on any nodes
#   time       the hours of one GPU, divided by the number of tasks
#   result     OUT/table.md, .json and .png, the same as from one machine
#
#   DATA=glue LOAD="runs/bert runs/ddrp" OUT=scores sbatch [--array=1-32] examples/glue_slurm.sh [more flags]
#   DATA=glue LOAD="runs/bert runs/ddrp" OUT=scores DRY_RUN=1 bash examples/glue_slurm.sh
#
# Submit it with the environment active. LOAD holds checkpoints and Hugging Face folders, names without blanks. OUT must
# lie on a file system whose locks hold between nodes: docs/launching.md says how to test that. To go on after failures
# or a time limit, submit the same again: finished runs are not repeated.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
read -ra ENCODERS <<< "${LOAD:?checkpoints or Hugging Face folders}"

ARGS=(--data-dir "${DATA:?folder of GLUE}" --load "${ENCODERS[@]}" --output-dir "${OUT:?folder for the results}")
[[ -z ${DRY_RUN:-} ]] || ARGS+=(--dry-run)

exec megatron-ddrp glue "${ARGS[@]}" --workers 1 --no-wait "$@"
