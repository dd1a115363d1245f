"""Device files of GPUs that do not exist, in a node of the local Slurm."""

DEVICES = """
mount -t tmpfs none /dev
for each in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0 nvidia0:1:3 nvidia1:1:3 nvidiactl:1:3; do
    name=${each%%:*}; numbers=${each#*:}; mknod --mode=666 /dev/$name c ${numbers%:*} ${numbers#*:}
done
ln -s /proc/self/fd /dev/fd; mkdir /dev/shm /dev/pts; chmod 1777 /dev/shm
"""
"""A /dev of the node's own, in which files have the names of GPUs."""
