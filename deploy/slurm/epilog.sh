#!/bin/sh
# slurm.conf: Epilog=/etc/slurm/slurm-watchdog-epilog.sh (or call it from yours)
#
# What is left of the kill switch and the heartbeat of a job that has ended here goes: files in memory on this node. The agent
# removes its switches; this is for the time without one. It always ends well, and asks Slurm nothing.
case "${SLURM_JOB_ID:-}" in
'' | *[!0-9]*) ;;
*)
    for directory in /run/slurm-watchdog/jobs/"$SLURM_JOB_ID".*; do
        if [ -d "$directory" ] && [ ! -L "$directory" ]; then
            rm -f -- "$directory/kill"
            rmdir -- "$directory" 2>/dev/null
        fi
    done
    timeout 5 rm -rf -- /dev/shm/slurm-watchdog-"$SLURM_JOB_ID".[0-9]*
    ;;
esac
exit 0
