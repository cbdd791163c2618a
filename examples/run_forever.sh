#!/usr/bin/env bash
# Start a training command again and again until it is done: what a node, a disk or a colleague does to it costs the
# steps since the last checkpoint, and no night.
#
#   hardware   whatever the command needs
#   time       until the last step
#   result     exit code 0 when training is done; 75 when somebody asked it to stop (go on by the same command);
#              2 for wrong arguments; 1 when it failed MAX_FAILURES times without a new checkpoint
#
#   [MAX_FAILURES=5] [BACKOFF=10] [GRACE=120] \
#       bash examples/run_forever.sh deepspeed --quiet --num_gpus 8 pretrain_bert.py … --save D --load D
#
# SIGTERM and SIGUSR1 sent to this script let the step in hand finish and be saved. Between failures it waits BACKOFF
# seconds, then twice as long, up to ten minutes; a new checkpoint sets both back. Ranks that outlive their launcher have
# GRACE seconds to save.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || exec sed -n '1d; /^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"

save='' load=''
for ((i = 1; i <= $#; i++)); do
    next=$((i + 1))
    case ${!i} in
        --save) save=${!next:-} ;;
        --load) load=${!next:-} ;;
        --save=*) save=${!i#*=} ;;
        --load=*) load=${!i#*=} ;;
    esac
done
if [[ -z $save || $save != "$load" ]]; then
    echo "run_forever.sh: error: the command needs --save and --load with one folder, so that it can go on" >&2
    exit 2
fi

# The command is a process group of its own: `deepspeed` dies of a SIGTERM without telling its ranks, so all are told.
set -m
asked='' child=''
ask() { asked=1; [[ -z $child ]] || kill -TERM -- "-$child" 2>/dev/null || true; }
trap ask TERM USR1 INT

failures=0 pause=${BACKOFF:-10} limit=${MAX_FAILURES:-5}
while true; do
    before=$(cat "$save/latest" 2>/dev/null || true)
    rm -f "$save/exit_code"
    "$@" &
    child=$!
    code=0
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal of ours ended the waiting, not the command
        code=0
        wait "$child" || code=$?
    done
    for ((seconds = 0; seconds < ${GRACE:-120}; seconds++)); do # ranks may outlive their launcher while they save
        kill -0 -- "-$child" 2>/dev/null || break
        sleep 1
    done
    kill -KILL -- "-$child" 2>/dev/null || true
    child=''
    # torchrun exits 1 for every code but 0; the run's own stands in its folder.
    [[ $code == 0 ]] || code=$(cat "$save/exit_code" 2>/dev/null || echo "$code")
    case $code in
        0 | 2 | 75) exit "$code" ;;
    esac
    [[ -z $asked ]] || exit 75
    if [[ $(cat "$save/latest" 2>/dev/null || true) != "$before" ]]; then
        failures=0 pause=${BACKOFF:-10}
    fi
    failures=$((failures + 1))
    if ((failures >= limit)); then
        echo "run_forever.sh: error: failed $failures times without a new checkpoint, last with code $code" >&2
        exit 1
    fi
    echo "run_forever.sh: ended with code $code (failure $failures of $limit); starting again in $pause s" >&2
    sleep "$pause" &
    wait $! || true
    [[ -z $asked ]] || exit 75
    pause=$((pause * 2 < 600 ? pause * 2 : 600))
done
