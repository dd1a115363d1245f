"""Measures one node, and the way to another one: what `slurm-watchdog test-nodes` runs on each node of a test.

It comes through the standard input of srun: a node needs Python 3.8 or later, and nothing of the watchdog. fio,
nvidia-smi, dcgmi, nccl-tests are used where they are on the PATH. A site may replace this file (`node_tests.program`).

A line of JSON is printed when a part begins, when it ends, and at the end of all; any other line is left out.
`node`, `part`, `about` (a directory, a moment), `state` (begun, ok, late: no end within its deadline, failed) and
`said`; `like`: what nodes have in common that may be compared; `faults`, of `what`, `place` and `sure`: false keeps a
node from being called well, unless others have the same; `figures`, of `name`, `value`, and if need be

  title, unit, column   words for people; with a column it is in the table
  about, place          which disk or GPU; the part of the node that is bad if this is (`disk:/tmp`, a UUID)
  more                  false: less is better
  least, absolute       the least difference that counts, as a share and in its unit
  spread, disturbed     of its repetitions, as a share; true: other programs took part of it, it does not count
  like                  only figures with the same word are compared (the GPU's model)
  against               peers, past, or fewer; a site's floor always counts
  siblings, sole        figures of the same name on the node are peers, too; others as low say that it is built so
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import hmac
import json
import os
import re
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

now = time.monotonic
KINDS = {
    # name: (title, unit, more is better, least share, least difference, column)
    "cpu_core": ("CPU, one core", "MB/s", True, 0.10, 0, "cpu, one core"),
    "cpu_all": ("CPU, all cores", "MB/s", True, 0.10, 0, "cpu, all"),
    "memory_core": ("memory bandwidth, one core", "GB/s", True, 0.20, 0, ""),
    "memory_all": ("memory bandwidth, all cores", "GB/s", True, 0.15, 0, "memory"),
    "disk_write": ("write rate", "MB/s", True, 0.75, 0, "disk write"),
    "mount_write": ("write rate", "MB/s", True, 0.75, 0, "mount write"),
    "read": ("read rate", "MB/s", True, 0.75, 0, ""),
    "fsync": ("fsync time", "ms", False, 4.0, 5.0, ""),
    "metadata": ("metadata rate", "op/s", True, 0.75, 0, ""),
    "fio_write": ("write rate by fio", "MB/s", True, 0.75, 0, ""),
    "fio_read": ("read rate by fio", "MB/s", True, 0.75, 0, ""),
    "fio_random": ("random reads by fio", "op/s", True, 0.75, 0, ""),
    "pair_latency": ("latency", "µs", False, 1.0, 300.0, "latency"),
    "pair_out": ("bandwidth", "Gb/s", True, 0.35, 0, "bandwidth"),
    "pair_in": ("bandwidth back", "Gb/s", True, 0.35, 0, ""),
    "gpu_count": ("number of GPUs", "", True, 0.01, 0, ""),
    "gpu_nvlinks": ("number of NVLinks that are up", "", True, 0.01, 0, ""),
    "gpu_matmul": ("matrix multiplication", "TFLOP/s", True, 0.05, 0, "matmul"),
    "gpu_memory": ("memory bandwidth", "GB/s", True, 0.05, 0, "GPU memory"),
    "gpu_h2d": ("rate from the node's memory", "GB/s", True, 0.35, 0, ""),
    "gpu_d2h": ("rate to the node's memory", "GB/s", True, 0.35, 0, ""),
    "gpu_p2p": ("rate to the next GPU", "GB/s", True, 0.35, 0, ""),
    "gpu_nccl": ("bus bandwidth of an all-reduce over the GPUs", "GB/s", True, 0.10, 0, ""),
}
"""CPU and memory: twice the spread of healthy tests on a local cluster (docs/test-nodes.md). Disks and mounts, whose
rates depend on caches and on who else uses them: four times. Links: the spread there, doubled; latency by more than a
processor takes to wake from its deepest sleep, 290 µs (drivers/idle/intel_idle.c). GPUs: by judgement."""


def figure(name, values, *, upper=False, **more):
    """Of repetitions: their median, or of rates that others only lower the upper quartile."""
    title, unit, better, least, absolute, column = KINDS.get(name) or KINDS[name.partition("_")[2]]
    middle = statistics.median(values)
    spread = statistics.median(abs(each - middle) for each in values) / abs(middle) if middle else 0.0
    value = sorted(values)[(len(values) - 1) * 3 // 4] if upper else middle
    known = {"title": title, "unit": unit, "more": better, "least": least, "absolute": absolute, "column": column}
    return {"name": name, "value": value, "spread": spread, **known, **more}


def skipped(why):
    return {"skipped": str(why)[:300]}


def tool(command, deadline_s, **more):
    """(what a program printed or nothing, why it was of no use or nothing): that says nothing of a node."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, cwd="/", check=False, **more
        )
    except subprocess.TimeoutExpired:
        return None, f"{command[0]} did not end within {deadline_s:g} s"
    except OSError as error:
        return None, f"{command[0]} cannot be started: {error.strerror}"
    lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    why = f"{command[0]} ended with {done.returncode}: {lines[0] if lines else ''}" if done.returncode else ""
    return done.stdout.decode(errors="replace"), why


def lines_of(path):
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read().splitlines()
    return []


def repeat(seconds, work, least=3):
    """What `work(number)` returns, over and over for so long, `least` times at least."""
    found, until = [], now() + seconds
    while len(found) < least or now() < until:
        found.append(work(len(found)))
    return found


def like():
    """What nodes have in common that may be compared."""
    names = [
        line.partition(":")[2] for line in lines_of("/proc/cpuinfo") if line.startswith(("model name", "CPU part"))
    ]
    return f"{''.join(names[:1]).strip()} x{os.cpu_count()}"


def is_guest():
    """Whether a hypervisor has given this machine its processors: then others share its memory bandwidth."""
    flags = next((line for line in lines_of("/proc/cpuinfo") if line.startswith("flags")), "")
    return "hypervisor" in flags.split() or os.path.exists("/sys/hypervisor/type")


SLICE_S, LEAST = 0.2, 5
"""Of a repetition: two periods of the kernel's CPU bandwidth control, so that a quota shows; repetitions, at least."""
OTHERS_BASE, OTHERS_SHARE, LOST = 0.25, 0.02, 0.03
"""A repetition that shares memory with others is disturbed where they use more than 0.25 cores and 2 % of all; one that
needs its CPUs alone where it lost more than 3 % of them, and others took half of that."""
BLOCK, COPY, LEAST_COPY = 65_536, 64 << 20, 8 << 20
"""Bytes hashed at once fit into the second cache of every server CPU; bytes copied at once into none."""


def busy():
    """(seconds that all CPUs together were busy, CPUs), by /proc/stat (proc(5): 100 ticks a second)."""
    lines = lines_of("/proc/stat")
    fields = [float(each) for each in lines[0].split()[1:]]
    return sum(fields[:3]) / 100.0, max(1, sum(line.startswith("cpu") and line[3:4].isdigit() for line in lines))


def throttled_s():
    """Seconds for which a quota held this process's control group, of version 2 or 1, or one above it so far."""
    scales, most = {"throttled_time": 1e9, "throttled_usec": 1e6}, 0.0
    for _, names, path in (line.split(":", 2) for line in lines_of("/proc/self/cgroup")):
        place = f"/sys/fs/cgroup{'/cpu' if names else ''}{path}" if not names or "cpu" in names.split(",") else "/"
        while place.startswith("/sys/fs/cgroup"):
            for name, _, value in (row.partition(" ") for row in lines_of(f"{place}/cpu.stat")):
                most = max(most, float(value) / scales[name]) if name in scales else most
            place = os.path.dirname(place)
    return most


def at_once(make, workers, seconds):
    """(amount a second of so many processes at the same time, their seconds of CPU, the longest of their times)."""
    begin, backs = now() + 0.05 + 0.005 * workers, []
    for _ in range(workers):
        back, there = os.pipe()
        if os.fork() == 0:
            with contextlib.suppress(Exception):
                work, amount = make()
                time.sleep(max(0.0, begin - now()))
                began = now()
                done = len(repeat(seconds, work, 1))
                took = now() - began
                os.write(there, struct.pack("ddd", done * amount / took, sum(os.times()[:2]), took))
            os._exit(0)
        os.close(there)
        backs.append(back)
    found = [os.read(back, 24) for back in backs]
    for back in backs:
        os.close(back)
        os.wait()
    if any(len(each) != 24 for each in found):
        raise OSError("a worker process ended without a result")
    rates, cpu_s, took_s = zip(*(struct.unpack("ddd", each) for each in found))  # noqa: B905 - strict= is of 3.10
    return sum(rates), sum(cpu_s), max(took_s)


def measure_cores(part, make, seconds, *, shares, against=("peers", "past")):
    """One core and all of them; up to three times as many repetitions while other processes disturb it."""
    count, figures = max(LEAST, int(seconds / SLICE_S)), []
    for name, workers in ((f"{part}_core", 1), (f"{part}_all", len(os.sched_getaffinity(0)))):
        good, every, until = [], [], now() + max(8.0, 3 * seconds)
        while len(good) < count and len(every) < 3 * count and (not every or now() < until):
            (before, cpus), held_s, began = busy(), throttled_s(), now()
            value, own_s, took_s = at_once(make, workers, max(SLICE_S, seconds / count))
            others = (busy()[0] - before - own_s) / (now() - began)
            lost = workers - (own_s + throttled_s() - held_s) / took_s
            every.append(value)
            taken = lost > LOST * workers and others >= lost / 2
            if not taken and not (shares and others > OTHERS_BASE + OTHERS_SHARE * cpus):
                good.append(value)
        few = len(good) < 3
        figures.append(figure(name, every if few else good, upper=True, disturbed=few, place=part, against=against))
    return {"figures": figures}


def hashing():
    block, hasher = bytes(BLOCK), hashlib.sha256()
    return lambda _: [hasher.update(block) for _ in range(16)] and None, 16 * BLOCK / 1e6


def measure_cpu(asked):
    """MB/s of SHA-256."""
    return measure_cores("cpu", hashing, asked.seconds, shares=False)


def copying(size):
    source, target = (ctypes.create_string_buffer(bytes([at]) * size) for at in (1, 2))
    return lambda _: ctypes.memmove(target, source, size) and None, size / 1e9


def measure_memory(asked):
    """GB/s of copies; an eighth of what is available at most."""
    workers = len(os.sched_getaffinity(0))
    free = int(dict(line.split(":") for line in lines_of("/proc/meminfo"))["MemAvailable"].split()[0]) << 10
    if 2 * LEAST_COPY * workers > free // 2:
        return skipped(f"{free >> 20} MiB of memory are available, too little for {workers} CPUs")
    size = max(LEAST_COPY, min(COPY, free // (16 * workers)))
    against = () if is_guest() else ("peers", "past")
    return measure_cores("memory", lambda: copying(size), asked.seconds, shares=True, against=against)


CHUNK, MOST_CHUNKS = 4, 64
"""Blocks between two fsyncs, and such chunks of the file: 256 MiB at most."""
REPETITION_S = 3.0
"""At most: where one would take longer it has smaller blocks or fewer files, so that a slow disk has figures."""
OTHERS_BYTES_S, RANDOM = 20e6, os.urandom(1 << 20)  # where others move more on the disk, its figures do not count


def moved(fd):
    """Bytes that the whole disk below a file has read and written so far; 0 where that is not known."""
    number = os.fstat(fd).st_dev
    place = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    place = os.path.dirname(place) if os.path.exists(f"{place}/partition") else place
    fields = " ".join(lines_of(f"{place}/stat")).split()
    return 512 * (int(fields[2]) + int(fields[6])) if len(fields) > 6 else 0


def file_in(directory):
    """(a file that is gone as soon as it is closed, a quarter of the free bytes); room for 200 KiB at least."""
    free = os.statvfs(directory)
    fd, path = tempfile.mkstemp(prefix=".slurm-watchdog-test-", dir=directory)
    os.unlink(path)
    share = free.f_bavail * free.f_frsize // 4
    if share < 3 * CHUNK << 16:
        raise OSError("too little space is free")
    return fd, share


def measure_disk(asked, name, about):
    """Writes with fsync, reads back, small fsyncs, and of a shared directory metadata."""
    (fd, share), size = file_in(about["about"]), 1 << 20

    def chunk(number):
        """Blocks that no compression makes small, and no two of them the same."""
        return b"".join(RANDOM[: size - 8] + (CHUNK * number + at).to_bytes(8, "big") for at in range(CHUNK))

    def write(number):
        data, began = chunk(number % most), now()
        os.pwrite(fd, data, number % most * len(data))
        os.fsync(fd)
        return len(data) / (now() - began) / 1e6

    def read(number):
        number %= min(most, len(writes))
        place = number * CHUNK * size
        with contextlib.suppress(OSError):  # from the filesystem and not from memory, where it lets us say so
            os.posix_fadvise(fd, place, CHUNK * size, os.POSIX_FADV_DONTNEED)
        began = now()
        data = os.pread(fd, CHUNK * size, place)
        rate = len(data) / (now() - began) / 1e6
        if data != chunk(number):
            raise OSError("it returns other bytes than were written")
        return rate

    def small(number):
        began = now()
        os.pwrite(fd, RANDOM[:4096], number % 16 * 4096)
        os.fsync(fd)
        return (now() - began) * 1e3

    def metadata(_):
        path, began = os.path.join(about["about"], f".slurm-watchdog-test-{os.urandom(8).hex()}"), now()
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.stat(path)
        os.rename(path, f"{path}b")
        os.unlink(f"{path}b")
        return 4 / (now() - began)

    most, began = 1, now()
    write(0)
    slow = (now() - began) / REPETITION_S
    while size > 1 << 16 and (slow > 1 or 3 * CHUNK * size > share):
        size, slow = size // 2, slow / 2
    most = int(min(share // (CHUNK * size), MOST_CHUNKS))
    before, began = moved(fd), now()
    writes = repeat(asked.seconds, write)
    reads, smalls = repeat(asked.seconds, read), repeat(asked.seconds / 2, small)
    own = CHUNK * size * (2 * len(writes) + len(reads)) + 32_768 * len(smalls)  # a journal may write data twice
    disturbed = moved(fd) - before - own > OTHERS_BYTES_S * (now() - began)
    found = {"write": writes, "read": reads, "fsync": smalls}
    figures = [
        figure(f"{name}_{of}", each, upper=of != "fsync", disturbed=disturbed, **about) for of, each in found.items()
    ]
    if name == "mount":
        figures.append(figure("mount_metadata", repeat(asked.seconds / 2, metadata), upper=True, **about))
    return {"figures": figures}


def measure_fio(asked, name, about):
    """Four requests at once without the page cache, one pattern after the other, a GiB written at most."""
    if shutil.which("fio") is None:
        return skipped("fio is not installed")
    fd, share = file_in(about["about"])
    size = min(64 << 20, share >> 20 << 20)
    os.posix_fallocate(fd, 0, size)
    command = (
        f"fio --output-format=json --filename=/proc/self/fd/{fd} --size={size} --io_size={256 << 20} --direct=1 "
        f"--ioengine=psync --thread --numjobs=4 --group_reporting --runtime={int(asked.seconds * 500)}ms "
        "--fallocate=none --overwrite=1 --allow_file_create=0 --name=write --rw=write --bs=1M --stonewall "
        "--name=read --rw=read --bs=1M --stonewall --name=random --rw=randread --bs=4k --stonewall"
    )
    text, why = tool(command.split(), 1.5 * asked.seconds + 15.0, pass_fds=[fd])
    try:
        jobs = {each["jobname"]: each for each in json.loads(text[text.index("{") :])["jobs"]}
        wrong = [f"{name}: error {each['error']}" for name, each in jobs.items() if each["error"]]
        values = {"write": jobs["write"]["write"]["bw_bytes"] / 1e6, "read": jobs["read"]["read"]["bw_bytes"] / 1e6}
        values["random"] = float(jobs["random"]["read"]["iops"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return skipped(why or f"fio's answer is not understood: {error!r}")
    if why or wrong:
        return skipped(why or f"fio's {wrong[0]}")
    return {"figures": [figure(f"{name}_fio_{key}", [value], **about) for key, value in values.items() if value > 0]}


LANES, MOST_LANES = "pcie.link.width.current", "pcie.link.width.max"
ERRORS, SLOWED = "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown"
QUERY = ("index", "uuid", "name", ERRORS, LANES, MOST_LANES, SLOWED)
LOAD = """# run by the interpreter that has torch: what each GPU does under load
import json, sys, time
seconds, kind, now = float(sys.argv[1]), sys.argv[2], time.monotonic
def end(found): print(json.dumps(found)); sys.exit()
try: import torch
except (ImportError, OSError) as error: end({"skipped": "torch cannot be imported: %s" % error})
cuda = kind == "cuda"
if cuda and torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
    end({"skipped": "this torch is built for the CPU alone"})
rows, block, piece = (8192, 1 << 30, 1 << 28) if cuda else (512, 1 << 24, 1 << 22)
devices = [torch.device(kind, at) for at in range(torch.cuda.device_count())] if cuda else [torch.device("cpu")]
empty = lambda size, device, **more: torch.empty(size, dtype=torch.uint8, device=device, **more)
def rates(amount, seconds, used, work):
    def some():
        for _ in range(4): work()
        for each in used if cuda else (): torch.cuda.synchronize(each)
    some(); found, until = [], now() + seconds
    while len(found) < 5 or now() < until:
        done, began = 0, now()
        while now() - began < 0.2: some(); done += 4
        found.append(amount * done / (now() - began))
    return found
cards = []
for at, device in enumerate(devices):
    a, b = (torch.randn(rows, rows, device=device, dtype=torch.bfloat16 if cuda else torch.float32) for _ in range(2))
    source, target, found = empty(block, device), empty(block, device), {}
    found["gpu_matmul"] = rates(2e-12 * rows ** 3, seconds, [device], lambda: torch.matmul(a, b))
    found["gpu_memory"] = rates(2e-9 * block, seconds, [device], lambda: target.copy_(source))
    near, next_one, pairs = empty(piece, device), devices[(at + 1) % len(devices)], {}
    try:
        host = empty(piece, "cpu", pin_memory=cuda)
        pairs = {"gpu_h2d": (near, host), "gpu_d2h": (host, near)}
    except RuntimeError: pass
    if next_one != device: pairs["gpu_p2p"] = (empty(piece, next_one), near)
    for name, (to, of) in pairs.items():
        found[name] = rates(1e-9 * piece, seconds / 2, [device, next_one], lambda: to.copy_(of, non_blocking=True))
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "") or "") if cuda else ""
    cards.append({"rates": found, "uuid": uuid.replace("GPU-", "")})
end({"cards": cards})
"""


def whole(text):
    return int(text) if str(text).isdecimal() else 0


def measure_gpu_health(asked, before):
    """GPUs as nvidia-smi shows them; after the load also what has changed."""
    text, why = tool(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"], 20.0)
    expected = whole(os.environ.get("SLURM_GPUS_ON_NODE", ""))
    if why and expected and text is not None:
        raise OSError(why)
    if why:
        return skipped(why)
    rows = [[each.strip() for each in line.split(",")] for line in text.splitlines()]
    cards = {row[1]: dict(zip(QUERY, row)) for row in rows if len(row) == len(QUERY)}  # noqa: B905
    faults = []
    if len(cards) < expected:
        what = f"nvidia-smi sees {len(cards)} GPUs, and Slurm gave the job {expected}"
        faults.append({"what": what, "place": "gpu", "sure": True})
    figures = [] if expected else [figure("gpu_count", [len(cards)], place="gpu", sole=True)]
    rows = "nvidia-smi --query-remapped-rows=gpu_uuid,remapped_rows.failure --format=csv,noheader"
    broken = tool(rows.split(), 20.0)[0]
    links = re.split(r"^GPU \d+:", tool(["nvidia-smi", "nvlink", "--status"], 20.0)[0] or "", flags=re.MULTILINE)
    for uuid, card in cards.items():
        where = f"GPU {card['index']}"
        rise = whole(card[ERRORS]) - whole(before[uuid][ERRORS]) if uuid in before else 0
        lanes, most = whole(card[LANES]), whole(card[MOST_LANES])
        wrong = {
            f"{rise} memory errors that ECC could not correct during the test": rise > 0,
            "a row of its memory could not be remapped": re.search(rf"{uuid}, *(1|Yes)", broken or ""),
            "the hardware slows its clocks down": before and card[SLOWED] == "Active",
            f"PCIe has {lanes} of {most} lanes": 0 < lanes < most,
        }
        faults += [{"what": f"{where}: {what}", "place": uuid, "sure": True} for what, is_so in wrong.items() if is_so]
        for each in links:
            if uuid in each:
                about = {"about": where, "place": uuid, "like": card["name"], "siblings": True}
                figures.append(figure("gpu_nvlinks", [len(re.findall(r"Link \d+: [\d.]+ GB/s", each))], **about))
    return {"figures": figures if before else [], "faults": faults, "kept": cards}


def measure_gpu_load(asked, cards):
    """Matrices, memory, PCIe and copies to the neighbour, by torch."""
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    command = [asked.torch, "-c", LOAD, str(asked.seconds), "cuda"]
    text, why = tool(command, 16 * (4 * asked.seconds + 8.0) + 50.0, env=environment)
    if text is None:
        return skipped(why)
    if why:
        raise OSError(why)
    found, figures = json.loads(text.strip().splitlines()[-1]), []
    for at, each in enumerate(found.get("cards", ())):
        card = cards.get(f"GPU-{each['uuid']}", {})
        where = f"GPU {card.get('index', f'cuda:{at}')}"
        about = {"about": where, "place": card.get("uuid", "gpu"), "like": card.get("name", "")}
        for name, values in each["rates"].items():
            figures.append(figure(name, values, siblings=name in ("gpu_matmul", "gpu_memory"), **about))
    return {**found, "figures": figures, "cards": len(found.get("cards", ()))}


def measure_dcgm(asked, cards):
    """dcgmi diag -r 1: sure is what DCGM calls isolate or reset (2, 6 of dcgmErrorSeverity_t) in a hardware category
    (9 to 15 of dcgmErrorCategory_t; dcgm_errors.h)."""
    text, why = tool(["dcgmi", "diag", "-r", "1", "-j"], 60.0)
    faults = []
    try:
        found = json.loads((text or "")[(text or "").index("{") :])
        root = next(found[name] for name in ("DCGM Diagnostic", "DCGM GPU Diagnostic") if name in found)
        for test in (test for category in root["test_categories"] for test in category.get("tests") or []):
            for each in test.get("results") or []:
                words = [word for word in each.get("warnings") or [] if isinstance(word, dict)]
                grave = [word for word in words if word.get("error_severity") in (2, 6)]
                sure = any(word.get("error_category") in range(9, 16) for word in grave)
                said = (grave or words or [{}])[0].get("warning", "")
                number = each.get("entity_id", each.get("gpu_ids", each.get("gpu_id", "")))
                what = f"DCGM's GPU {number}: dcgmi's test {test['name']} fails: {said}"[:300]
                if str(each.get("status")).upper() == "FAIL":
                    faults.append({"what": what, "place": "gpu", "sure": sure, "same": f"dcgmi {test['name']}"})
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return skipped(why or "dcgmi's answer is not understood")
    return {"faults": faults[:20]}


def measure_nccl(asked, cards):
    """An all-reduce over the GPUs of the node by nccl-tests or rccl-tests."""
    gpus = whole(os.environ.get("SLURM_GPUS_ON_NODE", "")) or len(cards)
    if gpus < 2:
        return skipped("fewer than two GPUs are known")
    text, why = tool(f"all_reduce_perf -b 256M -e 256M -w 5 -n 50 -g {gpus}".split(), 60.0)
    rate = re.search(r"^# Avg bus bandwidth\s*:\s*([0-9.]+)", text or "", re.MULTILINE)
    wrong = re.search(r"^# Out of bounds values\s*:\s*(\d+)", text or "", re.MULTILINE)
    if rate is None or wrong is None:
        return skipped(why or "the answer of all_reduce_perf is not understood")
    names = {card["name"] for card in cards.values()}
    what = f"nccl-tests got {wrong[1]} values of an all-reduce over its GPUs wrong"
    faults = [{"what": what, "place": "gpu", "sure": False}] if int(wrong[1]) else []
    like = f"{gpus} {min(names, default='')}"
    return {"figures": [figure("gpu_nccl", [float(rate[1])], place="gpu", like=like)], "faults": faults}


MEET_S, QUIET_S, STREAMS, SLICES = 20.0, 10.0, 4, 4
"""For the other node to begin; without a byte from it; connections at once (they fill 100 Gb/s); repetitions."""


def receive(connection, size):
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise OSError("the other node closed the connection")
        parts += part
    return parts


def port(token):
    """Below those that Linux hands out by itself: the token, which the two nodes alone have, chooses it."""
    return 20_000 + int(hmac.new(token, b"port", "sha256").hexdigest()[:8], 16) % 8_000


def accept(endpoint, token, wait_s=QUIET_S):
    """The first connection that begins with the token."""
    until = now() + wait_s
    while (left := until - now()) > 0:
        endpoint.settimeout(left)
        connection, _ = endpoint.accept()
        connection.settimeout(QUIET_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            if hmac.compare_digest(receive(connection, len(token)), token):
                connection.sendall(b"+")
                return connection
        connection.close()
    raise OSError("the other node did not connect")


def connect(address, token, wait_s=QUIET_S):
    """To who answers that he has the token, too; the other node may not listen yet."""
    until, why = now() + wait_s, "it does not answer"
    while now() < until:
        try:
            connection = socket.create_connection((address, port(token)), timeout=3.0)
            connection.settimeout(QUIET_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token)
            if receive(connection, 1) == b"+":
                return connection
        except OSError as error:
            why = error
        time.sleep(0.1)
    raise OSError(f"no connection to {address}: {why}")


def one_way(control, streams, seconds, *, sends):
    """Gb/s by all streams together, of each slice of the time, as who receives counts it. Then they are cut: what is
    still under way is dropped."""
    got, rates = [0] * STREAMS, []

    def work(at):
        piece, size = bytearray(1 << 20), 1
        with contextlib.suppress(OSError):
            while size:
                size = 1 if sends and streams[at].sendall(piece) is None else streams[at].recv_into(piece)
                got[at] += size

    for at, stream in enumerate(streams):
        stream.settimeout(seconds + QUIET_S)
        threading.Thread(target=work, args=(at,), daemon=True).start()
    if sends:
        control.settimeout(seconds + QUIET_S)
        rates = struct.unpack(f"!{SLICES}d", receive(control, 8 * SLICES))
    else:
        began, before = now(), 0
        for _ in range(SLICES):
            time.sleep(max(0.1, seconds / SLICES))
            at, arrived = now(), sum(got)
            rates.append(max(1, arrived - before) * 8 / (at - began) / 1e9)
            began, before = at, arrived
        control.sendall(struct.pack(f"!{SLICES}d", *rates))
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.shutdown(socket.SHUT_RDWR)
        stream.close()
    return rates


def answer(endpoint, seconds, token):
    """The node that listens."""
    control = accept(endpoint, token, MEET_S)
    while receive(control, 1) == b"p":
        control.sendall(b"p")
    for sends in (False, True):
        one_way(control, [accept(endpoint, token) for _ in range(STREAMS)], seconds, sends=sends)


def ask(control, seconds, token):
    """The node that connects: it has the figures."""

    def ping(_):
        began = now()
        control.sendall(b"p")
        receive(control, 1)
        return (now() - began) * 1e6

    # What a link adds every exchange has, and a wait for the CPU some: of each hundred or so the tenth percentile.
    times = [sorted(each)[len(each) // 10] for each in repeat(seconds / 2, lambda _: repeat(seconds / 20, ping, 10))]
    found, address = [figure("pair_latency", times)], control.getpeername()[0]
    control.sendall(b"s")
    for name, sends in (("pair_out", True), ("pair_in", False)):
        streams = [connect(address, token) for _ in range(STREAMS)]
        found.append(figure(name, one_way(control, streams, seconds, sends=sends), upper=True))
    return found


def measure_pair(asked, node):
    """Latency and bandwidth over TCP."""
    listener, address, token = asked.pair[0], asked.pair[1], asked.pair[2].encode()
    if node == listener:
        with socket.create_server(("", port(token)), backlog=STREAMS + 1) as endpoint:
            answer(endpoint, asked.seconds, token)
        return {}
    with connect(address, token, MEET_S) as control:
        used, found = control.getsockname()[0], ask(control, asked.seconds, token)
    rows = (tool(["ip", "-4", "-o", "addr"], 5.0)[0] or "").splitlines()
    name = next((row.split()[1] for row in rows if f" {used}/" in row), "")
    return {"figures": [{**each, "place": f"link:{name}" if name else "link"} for each in found]}


def measured(work, limit_s):
    """What a part has found, from a child in a process group of its own. One that does not end in time is `late`: it is
    killed and left behind, and the next part begins."""
    back, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            found = {"state": "ok", **work()}
        except Exception as error:  # whatever a node does wrong is its result
            found = {"state": "failed", "said": f"{type(error).__name__}: {error}"[:500]}
        os.write(there, json.dumps(found).encode() + b"\n")
        os._exit(0)
    os.close(there)
    text, until = b"", now() + limit_s
    while not text.endswith(b"\n") and select.select([back], [], [], max(0.0, until - now()))[0]:
        text += os.read(back, 1 << 20) or b"\n"  # nothing: it has died
    os.close(back)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)
    if not text.endswith(b"\n"):
        return {"state": "late", "said": f"no end within {limit_s:g} s"}
    return json.loads(text.strip() or '{"state": "failed", "said": "the measurement died"}')


def main(words):
    """One part after the other, as far as the time for all suffices."""
    parser = argparse.ArgumentParser(description="Measures this node.")
    parser.add_argument("--only", default="cpu,memory,disk,mount,gpu", help="parts (default: all)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each figure")
    parser.add_argument("--within", type=float, default=720.0, help="seconds for all")
    parser.add_argument("--local", action="append", help="a local disk (default /tmp)")
    parser.add_argument("--shared", action="append", default=[], help="a shared filesystem")
    parser.add_argument("--torch", default="", help="a Python that has torch")
    parser.add_argument("--pair", nargs=3, metavar=("LISTENER", "ADDRESS", "TOKEN"), help="only the way to a node")
    asked = parser.parse_args(words)
    wanted, seconds = [] if asked.pair else asked.only.split(","), asked.seconds
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    with contextlib.suppress(OSError):  # Slurm binds a task that asks for nothing to one core; its cpuset stays
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    until, hung, cards = now() + asked.within, set(), {}

    def do(part, about, limit_s, work, *more):
        line = {"node": node, "part": part, "about": about, "like": like()}
        say({**line, "state": "begun"})
        if until - now() < limit_s or (part, about) in hung:
            found = {"state": "ok", **skipped("no time is left for it, or the part before it hangs there")}
        else:
            found = measured(lambda: work(asked, *more), limit_s)
        hung.update({("fio", about)} if found["state"] == "late" else ())
        cards.update(found.pop("kept", {}))
        say({**line, **found})

    if asked.pair:
        do("network", "", 4 * seconds + 30.0, measure_pair, node)
    if "gpu" in wanted:
        do("gpu", "before", 80.0, measure_gpu_health, {})
        do("gpu", "dcgmi", 75.0, measure_dcgm, cards)
    if "cpu" in wanted:
        do("cpu", "", 6 * seconds + 30.0, measure_cpu)
    if "memory" in wanted:
        do("memory", "", 6 * seconds + 40.0, measure_memory)
    for part, places in (("disk", asked.local or ["/tmp"]), ("mount", asked.shared)):
        for place in places if part in wanted else ():
            against = ("peers",) if part == "mount" else ("peers", "past")  # what nodes share has no past of its own
            about = {"about": place, "place": f"{part}:{place}", "against": against}
            do(part, place, 4 * seconds + 30.0, measure_disk, part, about)
            do("fio", place, 2 * seconds + 30.0, measure_fio, part, about)
    if "gpu" in wanted:
        if asked.torch:
            do("gpu", "load", 16 * (4 * seconds + 8.0) + 60.0, measure_gpu_load, cards)
        do("gpu", "nccl-tests", 90.0, measure_nccl, cards)
        do("gpu", "after", 80.0, measure_gpu_health, cards or {"": {}})
    say({"node": node, "part": "end", "state": "ok"})
    os._exit(0)


def say(line):
    """One line, in one write."""
    os.write(1, f"{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
