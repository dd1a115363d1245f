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

# slurmd gives a health check no PATH at all, and no variable but SLURMD_NODENAME. Slurm's commands are taken from beside slurmd.
slurmd=$(readlink "/proc/$PPID/exe")
PATH="${slurmd%/sbin/*}/bin:${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}:/opt/slurm-watchdog/bin"
export PATH

say() { timeout 5 logger -t slurm-watchdog-health-check -p daemon.warning -- "$1"; }

# One look at a time: slurmd starts the next one whether or not the one before has ended.
lock=/run/slurm-watchdog-health-check.lock
if (: >>"$lock") 2>/dev/null; then
    exec 9>>"$lock"
    flock -n 9 || { say "the look before has not ended yet" && exit 0; }
fi

found=$(slurm-watchdog doctor --node --deadline 20s 2>&1 </dev/null) && exit 0
findings=$(printf '%s\n' "$found" | grep -E '^(CRITICAL|WARNING|UNKNOWN):')
say "$(printf '%s\n' "${findings:-$found}" | tr '\n' ' ')" # without a finding it is an error, such as of the configuration

if [ -n "$DRAIN_ON" ]; then
    found=$(slurm-watchdog doctor --node --deadline 9s --only "$DRAIN_ON" 2>&1 </dev/null)
    if [ $? -eq 2 ]; then # 2: one of these is critical; 1 and 3 are warnings, and what could not be seen
        # The first line is the headline. Without a second one it is a broken configuration (2, too): no reason to drain.
        reason=$(printf '%s\n' "$found" | sed -n 's/^CRITICAL: //p' | sed -n 2p)
        [ -n "$reason" ] || exit 0
        node=${SLURMD_NODENAME:-$(hostname -s)}
        case $(timeout 10 sinfo --noheader --nodes="$node" --format=%T 2>/dev/null) in
        *drain* | *down*) ;; # already, whoever did it
        '') say "$node is not drained, for Slurm does not answer: $reason" ;;
        *) timeout 10 scontrol update NodeName="$node" State=DRAIN Reason="health check: $reason" ||
            say "$node could not be drained: $reason" ;;
        esac
    fi
fi
exit 0
