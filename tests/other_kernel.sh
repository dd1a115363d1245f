#!/usr/bin/env bash
# other_kernel.sh COMMAND ARGUMENT...: the command under a Debian kernel of its own, in QEMU, with control groups of version 2 alone.
#
# The guest sees this machine's files through 9p, read-only, with a layer in memory over them: interpreter, checkout and Slurm
# are the same, and nothing that it writes stays. No network but its loopback, no systemd; memory, cpuset, cpu, io and pids
# are in /sys/fs/cgroup. Without hardware virtualization it is some ten times slower than here: SECONDS_LIMIT=1200 ends it.
# Needs root, qemu-system-x86, busybox-static and cpio; the kernel is Debian's package linux-image-amd64, which is
# unpacked into KERNEL=/var/tmp/slurm-watchdog-kernel and installed nowhere.
#
#     tests/other_kernel.sh .venv/bin/python -m pytest -q tests/integration/test_cgroup_v2.py
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
kernel=${KERNEL:-/var/tmp/slurm-watchdog-kernel}
limit=${SECONDS_LIMIT:-1200}
[ $# -gt 0 ] || { echo "other_kernel.sh: no command" >&2; exit 2; }
for command in qemu-system-x86_64 busybox cpio; do
    command -v "$command" >/dev/null || { echo "other_kernel.sh: no $command: apt-get install qemu-system-x86 busybox-static cpio" >&2; exit 2; }
done

if [ ! -e "$kernel/vmlinuz" ]; then
    mkdir -p "$kernel"
    chmod 755 "$kernel"
    package=$(apt-cache depends linux-image-amd64 | awk '/Depends/ {print $2; exit}')
    (cd "$kernel" && apt-get download "$package" >&2 && dpkg -x "$package"_*.deb . && rm "$package"_*.deb)
    cp "$kernel"/boot/vmlinuz-* "$kernel/vmlinuz"
fi
modules=$(echo "$kernel"/lib/modules/*)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/root/{bin,m,ro,rw,newroot,proc,sys,dev}
cp "$(command -v busybox)" "$work/root/bin/busybox"
for module in fs/fscache/fscache fs/netfs/netfs net/9p/9pnet net/9p/9pnet_virtio fs/9p/9p drivers/virtio/virtio drivers/virtio/virtio_ring \
    drivers/virtio/virtio_pci drivers/virtio/virtio_pci_legacy_dev drivers/virtio/virtio_pci_modern_dev fs/overlayfs/overlay drivers/block/loop; do
    cp "$modules/kernel/$module.ko" "$work/root/m/" 2>/dev/null || true # some are built in, in some releases
done
cat >"$work/root/init" <<'INIT'
#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
for pass in 1 2 3 4 5; do for m in /m/*.ko; do $B insmod $m 2>/dev/null; done; done # until each has what it depends on
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,ro,cache=loose host /ro
$B mount -t tmpfs -o size=60%,mode=755 tmpfs /rw; $B mkdir /rw/upper /rw/work
$B mount -t overlay -o lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/work overlay /newroot || $B poweroff -f
$B umount /proc /sys; $B mount --move /dev /newroot/dev
$B cp /guest /newroot/.guest
exec $B switch_root /newroot /bin/bash /.guest
INIT
cat >"$work/root/guest" <<GUEST
exec </dev/null >/dev/ttyS0 2>&1
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /dev/pts /dev/shm /run/lock; mount -t devpts devpts /dev/pts; mount -t tmpfs shm /dev/shm
mount -t cgroup2 none /sys/fs/cgroup
hostname guest; ip link set lo up; ip addr add 10.77.250.1/32 dev lo; echo "10.77.250.1 guest" >>/etc/hosts
mkdir -p /sys/fs/cgroup/system.slice
for group in /sys/fs/cgroup /sys/fs/cgroup/system.slice; do echo "+cpuset +cpu +memory +pids +io" >\$group/cgroup.subtree_control; done
cd $(printf %q "$checkout")
timeout $limit $(printf '%q ' "$@")
echo "other_kernel: exit code \$?"
echo o >/proc/sysrq-trigger
while :; do :; done # until it is off; an init that ends is a panic
GUEST
chmod +x "$work/root/init"
(cd "$work/root" && find . | cpio -o -H newc --quiet | gzip -1 >"$work/initrd")
timeout $((limit + 240)) qemu-system-x86_64 -M q35 -accel "${ACCEL:-tcg,thread=multi}" -cpu max -smp 2 -m 3072 -nographic -no-reboot -nodefaults \
    -serial stdio -kernel "$kernel/vmlinuz" -initrd "$work/initrd" -append "console=ttyS0 quiet panic=-1 psi=1" \
    -fsdev local,id=h,path=/,security_model=none,readonly=on,multidevs=remap -device virtio-9p-pci,fsdev=h,mount_tag=host </dev/null |
    tee "$work/said"
code=$(tr -d '\r' <"$work/said" | sed -n 's/^other_kernel: exit code //p' | tail -1)
exit "${code:-1}"
