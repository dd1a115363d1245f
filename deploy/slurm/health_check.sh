#!/bin/sh
# slurm.conf: HealthCheckProgram=/etc/slurm/slurm-watchdog-health-check.sh
#             HealthCheckInterval=300
#
# Looks at the node with `slurm-watchdog doctor --node` and writes what is wrong to the system's log. It answers in 30 s at most, also when
# a filesystem or the GPU driver hangs (slurmd ends it after 60 s), changes nothing and ends well, whatever it finds. By itself
# it drains no node: name the findings that shall, in DRAIN_ON below. A node that could not be looked at is never drained for it.
#
# Sensible: DRAIN_ON="nvml" (the driver does not answer, or a GPU has gone) where nothing else checks that.
DRAIN_ON="${SLURM_WATCHDOG_DRAIN_ON:-}"

say() { logger -t slurm-watchdog-health-check -p daemon.warning -- "$1"; }

found=$(slurm-watchdog doctor --node --deadline 20s 2>&1 </dev/null) && exit 0
say "$(printf '%s\n' "$found" | grep -E '^(CRITICAL|WARNING|UNKNOWN):' | tr '\n' ' ')"

if [ -n "$DRAIN_ON" ]; then
    found=$(slurm-watchdog doctor --node --deadline 9s --only "$DRAIN_ON" 2>&1 </dev/null)
    if [ $? -eq 2 ]; then # 2: one of these is critical; 1 and 3 are warnings, and what could not be seen
        reason=$(printf '%s\n' "$found" | sed -n 's/^CRITICAL: //p' | sed -n 2p)
        node=${SLURMD_NODENAME:-$(hostname -s)}
        case $(timeout 10 sinfo --noheader --nodes="$node" --format=%T 2>/dev/null) in
        *drain* | *down* | '') ;; # drained already, whoever did it, or Slurm does not answer
        *) timeout 10 scontrol update NodeName="$node" State=DRAIN Reason="health check: $reason" ;;
        esac
    fi
fi
exit 0
