#!/bin/sh
# slurm.conf: Prolog=/etc/slurm/slurm-watchdog-prolog.sh (or call it from yours)
#
# A node that gets a job has its agent: one that was stopped and forgotten is started. It waits for nothing and always ends
# well, for a prolog that fails drains the node. It asks Slurm nothing: thousands of nodes would ask at once.
if [ -d /run/systemd/system ] && systemctl is-enabled --quiet slurm-watchdog-agent.service 2>/dev/null; then
    timeout 5 systemctl start --no-block slurm-watchdog-agent.service >/dev/null 2>&1
fi
exit 0
