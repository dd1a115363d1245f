#!/usr/bin/env bash
# other_slurm.sh WHERE [ARGUMENT...]: pytest against another release of Slurm than this machine's (`make test SLURM=WHERE ARGS=…`).
#
# WHERE is a prefix with bin/squeue and sbin/slurmctld (./configure --prefix=WHERE --enable-multiple-slurmd), or the root
# directory of another distribution, such as
#     debootstrap --variant=minbase --include=slurm-wlm,munge,iproute2,e2fsprogs,python3,python3-venv,procps,ca-certificates trixie WHERE
# In a root directory the tests run on its Python, in an environment made from requirements.lock at the first time (network), in
# mount and network namespaces of their own. Processes are not hidden: locks protect clusters of others on this machine.
# Without arguments: the tests of the Slurm client and of the main job.
#
# Where no distribution has the release (25.11), build it into a prefix of its own:
#     apt-get install libmunge-dev libdbus-1-dev libhwloc-dev libmariadb-dev-compat     # the last one for slurmdbd alone
#     ./configure --prefix=/opt/slurm-25.11 --sysconfdir=/etc/slurm --enable-multiple-slurmd --disable-debug --disable-static --with-munge
#     (cd src && make && "make" install) && "make" install-pkgincludeHEADERS
# With processes, mounts and /run of their own, as `make test` has them: bash tests/own_namespaces.sh bash tests/other_slurm.sh WHERE ...
# pyslurm has to be of the same release. The tests of the client compare both clients where they find it, and the controllers of all live
# tests list by it, if SLURM_WATCHDOG_TEST_PYSLURM names an interpreter that has it:
#     python3 -m venv /opt/pyslurm-25.11
#     SLURM_LIB_DIR=/opt/slurm-25.11/lib SLURM_INCLUDE_DIR=/opt/slurm-25.11/include /opt/pyslurm-25.11/bin/pip install 'pyslurm==25.11.*'
#     SLURM_WATCHDOG_TEST_PYSLURM=/opt/pyslurm-25.11/bin/python make test SLURM=/opt/slurm-25.11
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { echo "other_slurm.sh: $*" >&2; exit 2; }

if [ "${1:-}" = --inside ]; then
    where=$2
    shift 2
    mount --make-rprivate /
    mount --bind "$where" "$where"
    mkdir -p "$where$checkout" "$where/.old"
    mount -t proc proc "$where/proc"
    mount --rbind /sys "$where/sys"
    mount --rbind /dev "$where/dev"
    mount --bind "$checkout" "$where$checkout"
    mount -t tmpfs -o mode=755 tmpfs "$where/run"
    mkdir -m 1777 "$where/run/lock"
    cd "$where"
    pivot_root . .old
    umount --lazy /.old
    ip link set lo up
    cd "$checkout"
    export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    exec /opt/slurm-watchdog-tests/bin/python -m pytest -p no:cacheprovider "$@"
fi

[ $# -gt 0 ] && [ -d "$1" ] || fail "SLURM='${1:-}' is no directory: give a prefix with bin/squeue, or the root of another system"
where=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- tests/integration/test_slurm_client.py tests/integration/test_main_job.py

if [ ! -e "$where/etc/os-release" ]; then
    [ -x "$where/bin/squeue" ] && [ -x "$where/sbin/slurmctld" ] || fail "$where has neither bin/squeue and sbin/slurmctld nor etc/os-release"
    "$where/sbin/slurmctld" -V
    PATH="$where/bin:$where/sbin:$PATH" exec "$checkout/.venv/bin/python" -m pytest "$@"
fi

[ "$(id -u)" = 0 ] || fail "tests in a root directory need root"
for command in squeue slurmctld munged ip mkfs.ext4 python3; do
    [ -n "$(chroot "$where" /bin/sh -c "PATH=/usr/sbin:/usr/bin:/sbin:/bin command -v $command" || true)" ] ||
        fail "$where has no $command; how to make it: see the head of tests/other_slurm.sh"
done
lock=$(sha256sum <"$checkout/requirements.lock")
tests=$where/opt/slurm-watchdog-tests
if [ "$(cat "$tests/lock" 2>/dev/null)" != "$lock" ]; then
    echo "making an environment from requirements.lock in $where ..." >&2
    cp "$checkout/requirements.lock" "$where/tmp/requirements.lock"
    cp -L /etc/resolv.conf "$where/etc/resolv.conf" 2>/dev/null || true
    [ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$where/etc/pip.conf"
    # The same certificates are trusted there as here.
    cp -L "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$where/etc/ssl/certs/ca-certificates.crt" || true
    rm -rf "$tests"
    chroot "$where" /usr/bin/env HOME=/root python3 -m venv /opt/slurm-watchdog-tests
    chroot "$where" /usr/bin/env -u PIP_FIND_LINKS HOME=/root \
        /opt/slurm-watchdog-tests/bin/python -m pip install --quiet --disable-pip-version-check \
        --require-hashes -r /tmp/requirements.lock
    echo "$lock" >"$tests/lock"
fi
# The checkout itself, wherever it lies this time, and its command.
printf '%s\n' "$checkout/watchdog" "$checkout" >"$(echo "$tests"/lib/python3.*/site-packages)/checkout.pth"
printf '#!%s\nfrom slurm_watchdog.cli.main import main\nmain()\n' /opt/slurm-watchdog-tests/bin/python >"$tests/bin/slurm-watchdog"
chmod +x "$tests/bin/slurm-watchdog"
chroot "$where" slurmctld -V
exec unshare --mount --net -- bash "${BASH_SOURCE[0]}" --inside "$where" "$@"
