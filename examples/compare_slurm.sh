#!/usr/bin/env bash
#SBATCH --job-name=compare
#SBATCH --array=1-8
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=32G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# A comparison as a Slurm job array: every task takes training runs and measurements that nobody else is doing, until
# none is left, and the one that finishes last writes the page.
#
#   hardware   one GPU per task; any number of tasks and nodes
#   time       the plan's hours, divided by the number of tasks
#   result     OUT/page.html and OUT/page.md, the same as from one machine
#
#   PLAN=plan.yaml OUT=compare sbatch [--array=1-16] examples/compare_slurm.sh [more flags]
#   PLAN=plan.yaml OUT=compare DRY_RUN=1 bash examples/compare_slurm.sh
#
# Submit it with the environment active. OUT must lie on a file system whose locks hold between nodes: docs/launching.md
# says how to test that. To go on after failures or a time limit, submit the same again: finished jobs are not repeated,
# and training resumes from its last checkpoint. At first, while the dataset is built, all tasks but one wait.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"

ARGS=("${PLAN:?plan, such as examples/compare/gpu-30min.yaml}" --output-dir "${OUT:?folder for everything}")
[[ -z ${DRY_RUN:-} ]] || ARGS+=(--dry-run)

exec megatron-ddrp compare "${ARGS[@]}" --workers 1 --no-wait "$@"
