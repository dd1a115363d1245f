#!/bin/sh
# slurm.conf: Epilog=/etc/slurm/slurm-watchdog-epilog.sh (or call it from yours)
#
# What is left of the kill switch of a job that has ended here goes: a file and a directory on this node, in memory. The watchdog
# removes its own; this is for those whose controller was not there to do it. It always ends well, and asks Slurm nothing.
case "${SLURM_JOB_ID:-}" in
'' | *[!0-9]*) ;;
*)
    for directory in /run/slurm-watchdog/jobs/"$SLURM_JOB_ID".*; do
        if [ -d "$directory" ] && [ ! -L "$directory" ]; then
            rm -f -- "$directory/kill"
            rmdir -- "$directory" 2>/dev/null
        fi
    done
    ;;
esac
exit 0
