#!/bin/sh
# Tells every task of a job where its kill switch and its heartbeat are: slurm.conf: TaskProlog=/etc/slurm/slurm-watchdog-task-prolog.sh
# slurmd runs it as the job's user and sets what its lines "export NAME=value" say. Other lines would do other things,
# so it prints nothing else; it touches memory alone and always ends well, for a task prolog that fails fails the task.
#
# The path is the default of `jobs.kill_switch`; change both together. An element of an array has its own,
# because it has a SLURM_JOB_ID of its own.
# A value of the user's own (another path) is kept; one that was inherited from another job is replaced.

# "yes": PyTorch with NCCL keeps the last collectives of each rank, some MiB, and writes them when the watchdog asks: it then
# says which rank did not enter which collective (docs/evidence.md). Variables that a job sets itself are kept.
RECORD_COLLECTIVES=no

case "${SLURM_WATCHDOG_KILL_SWITCH:-/run/slurm-watchdog/jobs/}" in
/run/slurm-watchdog/jobs/*)
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        echo "export SLURM_WATCHDOG_KILL_SWITCH=/run/slurm-watchdog/jobs/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}/kill"
        # A directory of the user's own; where another user has made it there is no heartbeat, and the logs are read.
        place=/dev/shm/slurm-watchdog-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
        mkdir -m 0700 "$place" 2>/dev/null
        if [ -O "$place" ] && [ ! -L "$place" ]; then
            echo "export SLURM_WATCHDOG_HEARTBEAT=$place/heartbeat"
        fi
    fi
    ;;
esac
if [ "$RECORD_COLLECTIVES" = yes ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    [ -n "${TORCH_FR_BUFFER_SIZE+set}" ] || echo "export TORCH_FR_BUFFER_SIZE=2000"
    [ -n "${TORCH_NCCL_TRACE_BUFFER_SIZE+set}" ] || echo "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000"
    [ -n "${TORCH_NCCL_DUMP_ON_TIMEOUT+set}" ] || echo "export TORCH_NCCL_DUMP_ON_TIMEOUT=1"
    [ -n "${TORCH_NCCL_DEBUG_INFO_TEMP_FILE+set}" ] ||
        echo "export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/tmp/fr_${SLURM_JOB_ID}_"
    [ -n "${TORCH_NCCL_DEBUG_INFO_PIPE_FILE+set}" ] ||
        echo "export TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/tmp/ask_fr_${SLURM_JOB_ID}_"
fi
exit 0
