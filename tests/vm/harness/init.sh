#!/bin/sh
# PID 1 of the guest: loads the modules, mounts the host's files, hands over to the test run.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*.ko; do
  insmod "$module" || echo "vm: cannot load $module"
done

options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "$options,ro,cache=loose" host /root || echo "vm: cannot mount the host's files"
mount -t 9p -o "$options,rw,cache=none,access=any" results /root/mnt || echo "vm: no results"
mount -t proc proc /root/proc
mount -t sysfs sys /root/sys
mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/shm /root/dev/pts
mount -t tmpfs tmpfs /root/dev/shm
mount -t devpts devpts /root/dev/pts
mount -t tmpfs tmpfs /root/run
mkdir -p -m 1777 /root/run/tmp
mount -t cgroup2 cgroup2 /root/sys/fs/cgroup
ip link set lo up
# Lists of free pages that each CPU keeps for itself grow to tens of MiB (since Linux 6.7), and
# MemFree does not count them: a node is only full when it says so if they stay short.
echo 1000 > /proc/sys/vm/percpu_pagelist_high_fraction || echo "vm: lists of CPUs stay long"

# The guest ends when its job does; a job that cannot start ends it too.
exec chroot /root /bin/sh /mnt/job.sh
