#!/usr/bin/env bash
# Restart a training command until it is done. A failure of a node or a disk then costs only the steps since the last
# checkpoint, also at night.
#
#   hardware   whatever the command needs
#   time       until the last step
#   result     exit code 0 if training is done; 75 if it was stopped by a signal (the same command resumes); 2 for wrong
#              arguments (torchrun says 1); 1 if it failed MAX_FAILURES times without a new checkpoint
#
#   [MAX_FAILURES=5] [BACKOFF=10] [GRACE=120] \
#       bash examples/run_forever.sh deepspeed --quiet --num_gpus 8 pretrain_bert.py … --save D --load D
#
# Send SIGTERM or SIGUSR1 to this script to finish the current step, save and stop. After a failure it waits BACKOFF
# seconds, then twice as long, up to ten minutes; a new checkpoint resets the failures and the wait. Ranks that outlive
# their launcher have GRACE seconds to save.
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
    echo "run_forever.sh: error: the command needs --save and --load with the same folder, so that it can resume" >&2
    exit 2
fi

# The command has its own process group, and a signal goes to all of it: `deepspeed` dies of a SIGTERM without signalling
# its ranks.
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
    while kill -0 "$child" 2>/dev/null; do # a signal to this script ended the wait, not the command
        code=0
        wait "$child" || code=$?
    done
    for ((seconds = 0; seconds < ${GRACE:-120}; seconds++)); do # ranks may outlive their launcher while they save
        kill -0 -- "-$child" 2>/dev/null || break
        sleep 1
    done
    kill -KILL -- "-$child" 2>/dev/null || true
    child=''
    # torchrun exits 1 for every code but 0, and deepspeed 0 if a signal ended its ssh. The run's own code is in its
    # folder; a run that ended well always writes it.
    [[ $code != 0 ]] || code=1
    code=$(cat "$save/exit_code" 2>/dev/null || echo "$code")
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
    echo "run_forever.sh: ended with code $code (failure $failures of $limit); restarting in $pause s" >&2
    sleep "$pause" &
    wait $! || true
    [[ -z $asked ]] || exit 75
    pause=$((pause * 2 < 600 ? pause * 2 : 600))
done
