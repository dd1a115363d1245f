#!/bin/bash
# Runs the one long command of a batch script so that the job can be told to save, and goes on in a next job.
#
#   #SBATCH --requeue --open-mode=append --signal=B:USR1@600
#   ... whatever prepares the run ...
#   exec ./batch.sh -- srun --kill-on-bad-exit=1 --wait=60 python train.py ...
#
# `exec` matters: `B:` signals one process only, the batch shell, and this file has to be it.
#
# A file of its own, bash 4.2 or newer, nothing of ours is needed beside it. It
# - passes SIGUSR1 (Slurm's warning before the time limit, `--signal=B:USR1@SECONDS`, or a user's) to all tasks of the job,
#   where deploy/trainers/*.py take it for the kill switch: save, and leave with 0;
# - passes SIGTERM (scancel, preemption) to them, too, and never starts the job again after it;
# - after a command that ended well *because* of SIGUSR1, starts the next job: --next=requeue (default; the same job id,
#   needs --requeue), --next=submit (sbatch of the same script, so needs --script=FILE), or --next=none;
# - counts these starts, and stops at --max-starts=N (default 100), so that no loop is endless;
# - ends with the command's exit code. A command that fails is the watchdog's business, not this file's.
set -u

usage() {
    sed -n '2,18s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

say() { echo "batch.sh: $*" >&2; }

next=requeue script='' max_starts=100
while [ $# -gt 0 ]; do
    case $1 in
    --next=requeue | --next=submit | --next=none) next=${1#--next=} ;;
    --script=*) script=${1#--script=} ;;
    --max-starts=*) max_starts=${1#--max-starts=} ;;
    --) shift && break ;;
    *) usage ;;
    esac
    shift
done
[ $# -gt 0 ] || usage
case $max_starts in '' | *[!0-9]*) usage ;; esac
if [ "$next" = submit ] && ! [ -r "$script" ]; then
    say "--next=submit needs --script=FILE, the script that sbatch was given (Slurm keeps only a copy of it)"
    exit 2
fi

starts=$((${SLURM_WATCHDOG_STARTS:-0} + ${SLURM_RESTART_COUNT:-0} + 1))
: "${SLURM_WATCHDOG_KILL_SWITCH:=/run/slurm-watchdog/jobs/${SLURM_JOB_ID:-0}.${SLURM_RESTART_COUNT:-0}/kill}"
export SLURM_WATCHDOG_KILL_SWITCH

asked_to_save='' ended=''
# Without --batch scancel signals the tasks of all steps and leaves this shell alone. Outside of a job: the command itself.
to_tasks() {
    if [ -n "${SLURM_JOB_ID:-}" ] && command -v scancel >/dev/null; then
        scancel --signal="$1" "$SLURM_JOB_ID" || say "scancel --signal=$1 $SLURM_JOB_ID failed"
    else
        kill -s "$1" "$child" 2>/dev/null
    fi
}
trap 'asked_to_save=yes; say "SIGUSR1: all tasks are asked to save and exit"; to_tasks USR1' USR1
trap 'ended=yes; say "SIGTERM: all tasks are asked to end"; to_tasks TERM' TERM

"$@" <&0 &
child=$!
while :; do
    wait "$child"
    code=$?
    # A trap ends `wait` with more than 128 although the command still runs.
    kill -0 "$child" 2>/dev/null || break
done
wait "$child" 2>/dev/null
again=$?
[ "$again" -eq 127 ] || code=$again

if [ -n "$asked_to_save" ] && [ -z "$ended" ] && [ "$code" -eq 0 ] && [ "$next" != none ]; then
    if [ "$starts" -ge "$max_starts" ]; then
        say "saved; this was start $starts of at most $max_starts: no other one"
    elif [ "$next" = requeue ] && [ -z "${SLURM_JOB_ID:-}" ]; then
        say "saved; this is not a Slurm job, so nothing is requeued: start it again manually to continue"
    elif [ "$next" = requeue ]; then
        say "saved; start $starts ends here, requeued"
        scontrol requeue "$SLURM_JOB_ID" || say "the requeue was refused: sbatch the script manually to continue"
    else
        say "saved; start $starts ends here, $script is submitted again"
        SLURM_WATCHDOG_STARTS=$starts sbatch --export=ALL "$script" || say "sbatch refused it: submit it manually to continue"
    fi
fi
exit "$code"
