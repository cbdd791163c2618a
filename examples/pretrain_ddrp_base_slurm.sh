#!/usr/bin/env bash
#SBATCH --job-name=ddrp_base
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# The paper's base model under Slurm: each rank runs examples/pretrain_ddrp_base_16gpu.sh, which has the flags. Five
# minutes before its time limit the job saves and queues itself again, until the last step is done.
#
#   hardware   2 nodes with 8 GPUs of 32 GB each; on A100 and newer replace --fp16 in that script by --bf16
#   time       estimated by DRY_RUN=1, not measured: two and a half days on 16 V100s, so three jobs
#   result     the paper's GLUE average for this model is 85.00 (its table 1)
#
#   [NODES=2] [GPUS=8] [SEEDS=1-5] DATA=prefix VOCAB=vocab.txt SAVE=dir [DRY_RUN=1] \
#       bash examples/pretrain_ddrp_base_slurm.sh [more flags]
#
# SEEDS makes a job array, one run of all nodes per seed: seed 3 is saved in SAVE-seed3. SEEDS=1-5%2 runs two at a time.
# NODES and GPUS (per node) make the ranks. A dry run checks flags, batches and memory (DEVICE_MEMORY=32, in GB) for them,
# and nothing is queued if it refuses them; DRY_RUN=1 ends there. Run it on the login node, from the project's folder,
# with the environment active: sbatch and srun pass both on. DeepSpeed's launcher is not used. sbatch also reads
# SBATCH_ACCOUNT, SBATCH_PARTITION and SBATCH_TIMELIMIT; the last one replaces the 24 hours.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}" # Slurm runs a copy of this file
RECIPE=examples/pretrain_ddrp_base_16gpu.sh

NODES=${SLURM_NNODES:-${NODES:-2}}
GPUS=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-${GPUS:-8}}}
GPUS=${GPUS##*:} # Slurm may name their kind: v100:8
RANKS=$((NODES * GPUS))

SEED=${SLURM_ARRAY_TASK_ID:-}
if [[ -n ${SEEDS:-}$SEED && " $*" =~ \ --(save|load|seed)(=|\ ) ]]; then
    echo "$0: error: --${BASH_REMATCH[1]} beside SEEDS would be the same for every seed; give SAVE and SEEDS alone" >&2
    exit 2
fi
if [[ -n $SEED ]]; then
    export SAVE=${SAVE:-runs/ddrp_base}-seed$SEED
    set -- --seed "$SEED" "$@"
fi

if [[ -n ${DRY_RUN:-} || -z ${SLURM_JOB_ID:-} ]]; then
    DRY_RUN=1 bash "$RECIPE" --world-size "$RANKS" --device-memory "${DEVICE_MEMORY:-32}" "$@"
    if [[ -n ${SEEDS:-} ]]; then
        echo "array: seeds $SEEDS, each on $NODES nodes, saved in ${SAVE:-runs/ddrp_base}-seedN, not as above" >&2
    fi
    [[ -z ${DRY_RUN:-} ]] || exit 0
    exec sbatch ${SEEDS:+--array="$SEEDS"} --nodes="$NODES" --ntasks-per-node="$GPUS" --gpus-per-node="$GPUS" \
        examples/pretrain_ddrp_base_slurm.sh "$@"
fi

save=${SAVE:-runs/ddrp_base}
for ((i = 1; i <= $#; i++)); do
    next=$((i + 1))
    case ${!i} in
        --save) save=${!next:-} ;;
        --save=*) save=${!i#*=} ;;
    esac
done
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export LAUNCHER=python # srun has started the ranks
export SLURM_NTASKS=$RANKS SLURM_NTASKS_PER_NODE=$GPUS # as srun's --ntasks and --ntasks-per-node

rm -f "$save/exit_code"
code=0
# Since Slurm 22.05 srun does not take the job's --cpus-per-task.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-4}" bash "$RECIPE" "$@" || code=$?
# A rank that srun kills because another one ended first has a code of its own; the run's code is in its folder.
[[ $code == 0 ]] || code=$(cat "$save/exit_code" 2>/dev/null || echo "$code")
if [[ $code == 75 ]]; then # stopped by the signal, with a checkpoint
    # The last task of an array has the array's id as its job's, which stands for all tasks.
    [[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || SLURM_JOB_ID=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
