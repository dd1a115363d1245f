#!/usr/bin/env bash
# own_namespaces.sh COMMAND ARGUMENT...: the command with processes, mounts and a /run of its own, as on a machine of its own.
#
# `make test` starts the workers of the live tests with it: an agent under test sees neither the ranks of another worker's
# cluster nor its frozen filesystems. The kernel with its log, the network, /tmp and the control groups are shared.
# Whatever the command leaves behind ends with it, also what waits on a frozen filesystem. Without root: just the command.
set -euo pipefail

if [ "$(id -u)" != 0 ]; then
    exec "$@"
fi
if [ "${1:-}" != --inside ]; then
    exec unshare --mount --pid --fork --kill-child=TERM --mount-proc -- bash "$0" --inside "$@"
fi
shift

# A copy of a mount keeps it alive after its owner unmounts it: filesystems on loop devices and networks of others go.
mounted() { awk '$1 ~ "^/dev/loop" && $3 == "ext4" {print $2}' /proc/mounts; }
umount --recursive --lazy /run/netns 2>/dev/null || true
mounted | grep '^/tmp/' | xargs -r umount --lazy || true
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 1777 /run/lock
others=$(mounted)

code=0
trap 'code=143' TERM # the outer process was killed: clean up all the same
exec 3<&0            # a shell gives what it starts in the background an empty standard input
"$@" <&3 3<&- &
wait $! || code=$?

trap '' TERM INT HUP
for point in $(mounted); do
    case $'\n'$others$'\n' in
        *$'\n'"$point"$'\n'*) ;;
        *) timeout 5 fsfreeze --unfreeze "$point" 2>/dev/null || true ;;
    esac
done
kill -KILL -1 2>/dev/null || true
exit "$code"
