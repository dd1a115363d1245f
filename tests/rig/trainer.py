#!/usr/bin/env python3
"""A small distributed trainer that is real where a watchdog looks, and breaks on demand.

One file, standard library only, Python >= 3.8: it runs in a *training* environment and imports nothing of ours.
What is real: one process a rank, DataLoader worker processes, collectives over TCP without any timeout (so that a
dead or stuck peer leaves the others waiting indefinitely, as NCCL does), Megatron's log lines, sharded checkpoints with a
completeness marker, resume, kill switch. What is not: there is no model; the loss is a curve with noise.

Function names are those of Megatron-DeepSpeed and PyTorch, so that a stack dump reads like one of theirs.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import glob
import json
import math
import mmap
import os
import queue
import random
import re
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import zlib

FOR_EVER = float("inf")
NOMINAL_TFLOPS = 149.02  # what a step of the nominal length reports; a slower step reports proportionally less
RETRY_SECONDS = 0.2
EXIT_USAGE = 2
EXIT_RENDEZVOUS = 3

EXAMPLES = """\
examples
  one process:
    python trainer.py --world-size 1 --steps 20 --step-seconds 0.1
  four ranks on this machine, rank 2 waits for its DataLoader indefinitely at step 12:
    for r in 0 1 2 3; do RANK=$r WORLD_SIZE=4 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 \\
      python trainer.py --steps 1000 --checkpoint-dir /tmp/ckpt --save-interval 10 --log /tmp/train.log \\
      --fault dataloader_hang:rank=2,step=12 & done; wait
  under Slurm (node names need not resolve: rank 0 leaves its address in a file):
    srun --ntasks=8 python trainer.py --rendezvous-dir /shared/rdv --checkpoint-dir /shared/ckpt --save-interval 100
  break a running job: rank 1 dies at its next step
    touch FAULT_DIR/die.rank1          (may hold parameters: signal=9)

faults   --fault KIND:key=value,...    (repeatable)
  dataloader_hang  the workers stop delivering; the rank waits in queue get      [seconds=S] [phase=train|eval]
  lock             the rank waits on a lock indefinitely                         [seconds=S] [phase=train|eval]
  die              the rank ends without a word, code 1, or by a signal (19: is
                   stopped, not ended)                                           [signal=9]  [phase=train|eval]
  exception        the rank raises and prints a traceback                        [error=plain|cuda|oom]
  memory           the rank takes more and more memory, until the kernel kills it
  teardown_hang    the rank hangs after its last step, in destroy_process_group  [seconds=S]
  slow             its steps take longer from that step on                       [factor=2] [seconds=S]
  nan              its loss is NaN from that step on                             [seconds=S]
  spike            its loss jumps and comes back within about 30 steps           [factor=4]
  where: rank=R (or rank=last), or node=NAME (a fault that stays with a machine).  when: step=N (default 1).
  once: only in a first start (restart count 0 and no fault-*.fired marker in the checkpoint directory), the
  default for dataloader_hang, lock, die, exception and teardown_hang; "always" fires after every restart as well.
"""


# ----------------------------------------------------------------------------------------------------
# Output: what is printed, and where
# ----------------------------------------------------------------------------------------------------
class Output:
    """Standard output and, when given, a log file opened once and written with plain write(2), nothing buffered."""

    def __init__(self, log_path, prefix):
        self.prefix = prefix
        self.log_fd = None
        if log_path:
            os.makedirs(os.path.dirname(os.path.abspath(log_path)), exist_ok=True)
            self.log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def line(self, text, prefix=True):
        """Write one line, the log file first: a log that does not answer holds this process in write(2)."""
        data = ((self.prefix if prefix else "") + text + "\n").encode()
        if self.log_fd is not None:
            os.write(self.log_fd, data)
        write_stdout(data)

    def log_iteration(self, text):
        """As line(), for the iteration line. Its own write, so that a stack dump ends in this function's name."""
        data = (self.prefix + text + "\n").encode()
        if self.log_fd is not None:
            os.write(self.log_fd, data)
        write_stdout(data)


def write_stdout(data):
    try:
        os.write(1, data)
    except OSError:
        pass  # the reader of our output is gone; the training continues


def fail(code, what):
    """Leave with one message: what was wrong, where, what to do next."""
    sys.stderr.write(f"trainer: error: {what}\n")
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: no destructor may hang here


# ----------------------------------------------------------------------------------------------------
# Who am I: rank, world, node, job
# ----------------------------------------------------------------------------------------------------
def first_env(*names, default=None):
    for name in names:
        if os.environ.get(name, "") != "":
            return os.environ[name]
    return default


def first_env_int(*names, default=None):
    text = first_env(*names)
    if text is None:
        return default
    if not re.fullmatch(r"-?\d+", text):
        fail(
            EXIT_USAGE,
            f"{names[0]}={text!r} in the environment is not a whole number; set it right or unset it.",
        )
    return int(text)


def restart_count():
    return first_env_int("SLURM_RESTART_COUNT", "WATCHDOG_DEMO_RESTART", default=0)


def job_id():
    return first_env("SLURM_JOB_ID", default="local")


def node_name():
    return first_env("SLURMD_NODENAME", default=socket.gethostname().split(".")[0])


def first_host(node_list):
    """The first name of a Slurm node list: 'n[3-5,9],m1' -> 'n3', 'a,b' -> 'a'."""
    match = re.match(r"([^\[,]+)\[(\d+)[^\]]*\]([^,]*)|([^,\[]+)", node_list)
    if not match:
        return node_list
    return match.group(4) or match.group(1) + match.group(2) + match.group(3)


def kill_switch_path(template):
    """Where this job's kill switch would be, or None. Option, then environment, then the watchdog's default."""
    path = template or os.environ.get("SLURM_WATCHDOG_KILL_SWITCH")
    if not path and os.environ.get("SLURM_JOB_ID"):
        path = "/run/slurm-watchdog/jobs/{job_id}.{restart}/kill"
    if not path:
        return None
    for key, value in (("{job_id}", job_id()), ("{restart}", str(restart_count())), ("{node}", node_name())):
        path = path.replace(key, value)
    return path


# ----------------------------------------------------------------------------------------------------
# Rendezvous: finding rank 0
# ----------------------------------------------------------------------------------------------------
def derived_port():
    """A port that all ranks of this start of this job work out alike, below the kernel's ephemeral range."""
    if job_id() == "local":
        return 29500
    return 20000 + zlib.crc32((f"{job_id()}.{restart_count()}").encode()) % 12000


def master_port(args):
    port = args.master_port or first_env_int("MASTER_PORT")
    if port is None:
        return derived_port()
    # torchrun's own store already listens on MASTER_PORT
    return port + 1 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else port


def master_address(args):
    """(address, port) by name, or None when the address is to be read from the rendezvous file."""
    address = args.master_address or first_env("MASTER_ADDR")
    if not address and args.rendezvous_dir:
        return None
    nodes = first_env("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if not address and nodes and first_env_int("SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1) > 1:
        address = first_host(nodes)
    return (address or "127.0.0.1", master_port(args))


def rendezvous_file(args):
    return os.path.join(args.rendezvous_dir, f"{job_id()}.{restart_count()}")


def own_address():
    """An address of this machine that others may reach: the one of the default route, else the host name's."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect(("10.255.255.255", 1))  # sends nothing; asks the kernel which source it would use
        return probe.getsockname()[0]
    except OSError:
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError:
            return "127.0.0.1"
    finally:
        probe.close()


def listen(args, deadline):
    """Rank 0: a listening socket; its address is announced in the rendezvous file where one is used."""
    target = master_address(args)
    port = target[1] if target else 0
    host = "127.0.0.1" if target and target[0] in ("127.0.0.1", "localhost") else ""
    if args.world_size == 1:
        host, port = "127.0.0.1", 0
    while True:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(max(16, args.world_size))
            break
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                fail(
                    EXIT_RENDEZVOUS,
                    (
                        f"rank 0 cannot listen on {host or '*'}:{port}: {error.strerror}. "
                        "Is an older run still there? End it, or set MASTER_PORT to a free port."
                    ),
                )
            time.sleep(RETRY_SECONDS)
    if target is None and args.world_size > 1:
        os.makedirs(args.rendezvous_dir, exist_ok=True)
        write_atomically(rendezvous_file(args), f"{own_address()}:{sock.getsockname()[1]}\n")
    return sock


def find_master(args):
    """(address, port) of rank 0, or None while its rendezvous file is not there. Read again at every attempt."""
    target = master_address(args)
    if target is not None:
        return target
    try:
        with open(rendezvous_file(args)) as file:
            host, port = file.read().strip().rsplit(":", 1)
            return host, int(port)
    except (OSError, ValueError):
        return None


# ----------------------------------------------------------------------------------------------------
# Collectives: one server thread in rank 0, blocking clients without timeout
# ----------------------------------------------------------------------------------------------------
class CollectiveServer(threading.Thread):
    """Gathers one message from every rank, answers all. A rank that dies is simply missing: nobody is informed."""

    def __init__(self, listener, world_size, abort_on_peer_death, deadline):
        super().__init__(name="collective_server", daemon=True)
        self.listener, self.world_size, self.abort_on_peer_death = listener, world_size, abort_on_peer_death
        self.deadline = deadline
        self.peers = {}  # rank -> socket
        self.hello = {}  # rank -> {"rank", "node", "pid"}
        self.pending = {}  # rank -> list of messages not answered yet
        self.buffers = {}  # socket -> bytes of a message not complete yet

    def run(self):
        self._wait_for_all()
        ranks = [self.hello[rank] for rank in range(self.world_size)]
        self.listener.close()  # a later run that finds this port must not be answered by us
        self._answer({"ranks": ranks})
        self._serve()

    def _wait_for_all(self):
        self.listener.settimeout(1.0)
        said_at = time.monotonic()
        while len(self.peers) < self.world_size:
            try:
                sock, _ = self.listener.accept()
                self._welcome(sock)
            except OSError:  # nobody came within the second (3.8: socket.timeout, no TimeoutError)
                pass
            missing = [rank for rank in range(self.world_size) if rank not in self.peers]
            if missing and time.monotonic() > self.deadline:
                fail(
                    EXIT_RENDEZVOUS,
                    (
                        f"rendezvous: ranks {missing} of {self.world_size} did not come. "
                        "Look at their logs; if fewer processes were started on purpose, set WORLD_SIZE."
                    ),
                )
            if missing and time.monotonic() - said_at > 30:
                said_at = time.monotonic()
                sys.stderr.write(f"trainer: rendezvous: still waiting for ranks {missing}\n")

    def _welcome(self, sock):
        sock.settimeout(10.0)
        try:
            hello = json.loads(sock.makefile("rb").readline() or b"{}")
        except (OSError, ValueError):
            hello = {}
        rank, refusal = hello.get("rank"), None
        if hello.get("job") != f"{job_id()}.{restart_count()}":
            refusal = f"this is rank 0 of job {job_id()}.{restart_count()}, not of {hello.get('job')}"
        elif hello.get("world_size") != self.world_size:
            refusal = f"rank 0 counts {self.world_size} ranks, this process {hello.get('world_size')}"
        elif rank in self.peers:
            refusal = f"rank {rank} is already here (pid {self.hello[rank]['pid']} on {self.hello[rank]['node']})"
        if refusal:
            send_message(sock, {"refused": refusal})
            sock.close()
            return
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peers[rank], self.hello[rank], self.pending[rank], self.buffers[sock] = sock, hello, [], b""

    def _serve(self):
        selector = selectors.DefaultSelector()
        for rank, sock in self.peers.items():
            selector.register(sock, selectors.EVENT_READ, rank)
        while True:
            for key, _ in selector.select():
                if not self._read(key.fileobj, key.data):
                    selector.unregister(key.fileobj)
                    if self.abort_on_peer_death:
                        self._answer({"abort": f"rank {key.data} left the group"})
            while all(self.pending.values()):
                self._answer(reduce_messages([self.pending[rank].pop(0) for rank in range(self.world_size)]))

    def _read(self, sock, rank):
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            return False
        *lines, self.buffers[sock] = (self.buffers[sock] + data).split(b"\n")
        self.pending[rank].extend(json.loads(line) for line in lines)
        return True

    def _answer(self, message):
        for rank in sorted(self.peers, reverse=True):  # rank 0 last: once it is answered, all are, and it may exit
            try:
                send_message(self.peers[rank], message)
            except OSError:
                pass  # it died; nobody is informed


def send_message(sock, message):
    sock.sendall(json.dumps(message).encode() + b"\n")


def reduce_messages(messages):
    """One answer for one message of each rank, in rank order. Messages: {"op", "value"[, "src"]}."""
    ops = sorted({message["op"] for message in messages})
    if len(ops) > 1:
        return {"error": f"ranks are in different collectives: {', '.join(ops)}"}
    values = [message["value"] for message in messages]
    if ops[0] == "all_reduce":
        return {"value": math.fsum(values) / len(values) if all(map(math.isfinite, values)) else float("nan")}
    if ops[0] == "broadcast":
        return {"value": values[messages[0]["src"]]}
    return {"value": values if ops[0] == "all_gather" else None}


class PeerLeft(RuntimeError):
    """A peer died, and --abort-on-peer-death asked to be told."""


class ProcessGroup:
    """This rank's end of the collectives. Every call blocks, without timeout, until all ranks have made it."""

    def __init__(self, args):
        deadline = time.monotonic() + args.rendezvous_timeout_seconds
        self.rank, self.world_size, self.abort_on_peer_death = (
            args.rank,
            args.world_size,
            args.abort_on_peer_death,
        )
        self.announcement = None
        target = None
        if self.rank == 0:
            listener = listen(args, deadline)
            target = ("127.0.0.1", listener.getsockname()[1])
            if args.rendezvous_dir and master_address(args) is None:
                self.announcement = rendezvous_file(args)
            CollectiveServer(listener, self.world_size, args.abort_on_peer_death, deadline).start()
        self._init_process_group(args, target, deadline)

    def _init_process_group(self, args, target, deadline):
        hello = {
            "rank": self.rank,
            "world_size": self.world_size,
            "node": node_name(),
            "pid": os.getpid(),
            "job": f"{job_id()}.{restart_count()}",
        }
        why = "its address is not known yet"
        while time.monotonic() < deadline:
            where = target or find_master(args)
            try:
                if where is not None:
                    self.sock = socket.create_connection(where, timeout=5.0)
                    self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self.reader = self.sock.makefile("rb")
                    send_message(self.sock, hello)
                    self.sock.settimeout(max(1.0, deadline - time.monotonic()))
                    answer = json.loads(self.reader.readline() or b"{}")
                    if "ranks" in answer:
                        self.sock.settimeout(None)
                        self.ranks = answer["ranks"]
                        return
                    why = answer.get("refused", "it closed the connection")
            except (OSError, ValueError) as error:
                why = str(error)
            time.sleep(RETRY_SECONDS)
        fail(
            EXIT_RENDEZVOUS,
            (
                f"rank {self.rank} did not reach rank 0 at {find_master(args)} "
                f"within {args.rendezvous_timeout_seconds:g} s: {why}. Check that rank 0 runs; where node "
                "names do not resolve, set MASTER_ADDR or give --rendezvous-dir on a shared filesystem."
            ),
        )

    def recv(self, op):
        """The answer to the collective this rank stands in; waits indefinitely if a peer does not come."""
        try:
            line = self.reader.readline()
        except OSError:
            line = b""
        answer = json.loads(line) if line else {"abort": "rank 0 left the group"}
        if "abort" in answer and self.abort_on_peer_death:
            raise PeerLeft(f"{answer['abort']} while rank {self.rank} was in {op}")
        if "error" in answer:
            sys.stderr.write(f"trainer: rank {self.rank}: {answer['error']}\n")
        while "value" not in answer:
            time.sleep(3600)  # like NCCL without a timeout: the peer is gone, nobody says so, we wait
        return answer["value"]

    def exchange(self, op, value=None, src=0):
        try:
            send_message(self.sock, {"op": op, "value": value, "src": src})
        except OSError:
            pass  # rank 0 is gone; recv decides what that means
        return self.recv(op)


# Functions of the module, as in torch.distributed: a stack dump then shows "all_reduce", with no class before it.
def barrier(group):
    group.exchange("barrier")


def all_reduce(value, group):
    """The mean of a float over all ranks."""
    return group.exchange("all_reduce", value)


def broadcast(value, src, group):
    """The value that rank src gave."""
    return group.exchange("broadcast", value, src)


def all_gather(value, group):
    """A list: every rank's value, in rank order."""
    return group.exchange("all_gather", value)


def destroy_process_group(group, faults, step):
    """The end: all ranks meet once more, then rank 0 takes its address back."""
    faults.teardown(step)
    barrier(group)
    if group.announcement:
        try:
            os.unlink(group.announcement)
        except OSError:
            pass


def local_rank_of(ranks, rank):
    """Position of a rank among the ranks of its node, from the rendezvous table."""
    return sum(1 for other in ranks[:rank] if other["node"] == ranks[rank]["node"])


# ----------------------------------------------------------------------------------------------------
# DataLoader: worker processes, one queue, frames named as in torch.utils.data
# ----------------------------------------------------------------------------------------------------
def die_with_parent():
    try:
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        ctypes.CDLL(None, use_errno=True).prctl(15, b"pt_data_worker\0")  # PR_SET_NAME, torch's own name for it
    except (OSError, AttributeError):
        pass  # not Linux: the closed pipe still ends the worker


class DataLoader:
    """Worker processes make batches ahead of time; __next__ gives them in order. Create it before any thread."""

    PREFETCH_PER_WORKER = 2

    def __init__(self, num_workers, seed):
        self.num_workers, self.seed, self.index = num_workers, seed, 0
        self._hang = mmap.mmap(-1, 16)  # shared with the workers: hangs until this monotonic time
        self._hang_lock = threading.Lock()
        self._withheld = []
        self._data_queue = queue.Queue()
        self._pids, self._requests, self._results = [], [], []
        for _ in range(num_workers):
            self._start_worker()

    def start(self):
        """Start the thread that moves batches from the workers' pipes into the queue, and ask for the first ones."""
        if self.num_workers:
            threading.Thread(target=self._pin_memory_loop, name="pin_memory_thread", daemon=True).start()
            for index in range(self.num_workers * self.PREFETCH_PER_WORKER):
                self._try_put_index(index)

    def _start_worker(self):
        request_read, request_write = os.pipe()
        result_read, result_write = os.pipe()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent()
                # the job's signals are for the ranks; a batch worker goes when its rank goes
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                for fd in [request_write, result_read] + self._requests + [f.fileno() for f in self._results]:
                    os.close(fd)
                self._worker_loop(parent_pid, request_read, result_write)
            finally:
                os._exit(0)
        os.close(request_read)
        os.close(result_write)
        self._pids.append(pid)
        self._requests.append(request_write)
        self._results.append(os.fdopen(result_read, "rb"))

    def _worker_loop(self, parent_pid, request_fd, result_fd):
        for line in os.fdopen(request_fd, "rb"):
            index = int(line)
            while self._is_hung() and os.getppid() == parent_pid:
                time.sleep(0.05)
            os.write(result_fd, json.dumps([index, self._fetch(index)]).encode() + b"\n")

    def _fetch(self, index):
        noise = random.Random(f"{self.seed}/{index}")
        return [noise.gauss(0.0, 1.0) for _ in range(16)]

    def hang(self, seconds):
        """From now on nothing is delivered, batches already made included."""
        with self._hang_lock:
            self._hang[:8] = struct.pack("d", time.monotonic() + seconds)
            while not self._data_queue.empty():
                self._withheld.append(self._data_queue.get())
        if seconds != FOR_EVER:
            threading.Timer(seconds, self._release).start()

    def _release(self):
        while not self._deliver():
            time.sleep(0.05)

    def _is_hung(self):
        return time.monotonic() < struct.unpack("d", self._hang[:8])[0]

    def _pin_memory_loop(self):
        index = 0
        while True:
            worker = index % self.num_workers
            line = self._results[worker].readline()
            item = json.loads(line) if line else self._last_words(worker)
            while not self._deliver(item):
                time.sleep(0.05)
            if not line:
                return
            index += 1

    def _deliver(self, *items):
        """Queue what was withheld, then these; False while nothing may be delivered."""
        with self._hang_lock:
            if self._is_hung():
                return False
            for item in (*self._withheld, *items):
                self._data_queue.put(item)
            self._withheld = []
            return True

    def _last_words(self, worker):
        pid = self._pids[worker]
        try:
            status = os.waitpid(pid, 0)[1]
        except ChildProcessError:
            status = 0
        if os.WIFSIGNALED(status):
            return RuntimeError(
                f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(os.WTERMSIG(status))}. "
            )
        return RuntimeError(f"DataLoader worker (pid(s) {pid}) exited unexpectedly")

    def _try_put_index(self, index):
        try:
            os.write(self._requests[index % self.num_workers], b"%d\n" % index)
        except OSError:
            pass  # that worker is dead: its closed result pipe says so, with the reason

    def __iter__(self):
        return self

    def __next__(self):
        return self._next_data()

    def _next_data(self):
        if not self.num_workers:
            while self._is_hung():
                time.sleep(0.05)
            self.index += 1
            return self._fetch(self.index - 1)
        item = self._get_data()
        if isinstance(item, Exception):
            raise item
        self._try_put_index(self.index + self.num_workers * self.PREFETCH_PER_WORKER)
        self.index += 1
        return item[1]

    def _get_data(self):
        while True:
            success, item = self._try_get_data()
            if success:
                return item

    def _try_get_data(self, timeout=5.0):
        try:
            return True, self._data_queue.get(timeout=timeout)
        except queue.Empty:
            return False, None

    def shutdown_workers(self):
        for fd in self._requests:
            os.close(fd)
        for pid in self._pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


# ----------------------------------------------------------------------------------------------------
# Faults on demand
# ----------------------------------------------------------------------------------------------------
ONCE_BY_DEFAULT = {
    "dataloader_hang": True,
    "lock": True,
    "die": True,
    "exception": True,
    "memory": True,
    "teardown_hang": True,
    "slow": False,
    "nan": False,
    "spike": False,
}
LASTING = ("slow", "nan", "spike")
ERRORS = {
    "plain": "fault injected by --fault exception",
    "cuda": "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported at some other "
    "API call,so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.",
    "oom": "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity; 76.59 GiB already "
    "allocated; 1.14 GiB free; 76.70 GiB reserved in total by PyTorch)",
}


class Fault:
    """One fault: what, where, from which step on, for how long."""

    def __init__(self, text):
        kind, _, rest = text.partition(":")
        if kind not in ONCE_BY_DEFAULT:
            raise ValueError(f"unknown kind {kind!r} in fault {text!r}; known: {', '.join(ONCE_BY_DEFAULT)}")
        self.kind, self.once = kind, ONCE_BY_DEFAULT[kind]
        values = {
            "rank": None,
            "node": None,
            "step": "1",
            "seconds": "inf",
            "factor": "4" if kind == "spike" else "2",
            "signal": "0",
            "phase": "train",
            "error": "plain",
        }
        for word in filter(None, (part.strip() for part in rest.split(","))):
            key, equals, value = word.partition("=")
            if word in ("once", "always"):
                self.once = word == "once"
            elif equals and key in values:
                values[key] = value
            else:
                raise ValueError(f"{word!r} in fault {text!r} is none of once, always, {'=, '.join(values)}=VALUE")
        try:
            self.rank = values["rank"] if values["rank"] in (None, "last") else int(values["rank"])
            self.node, self.step, self.seconds = (
                values["node"],
                int(str(values["step"])),
                float(str(values["seconds"])),
            )
            self.factor, self.signal = float(str(values["factor"])), int(str(values["signal"]))
        except ValueError as error:
            raise ValueError(f"fault {text!r}: {error}") from error
        self.phase, self.error = values["phase"], values["error"]
        if self.phase not in ("train", "eval") or self.error not in ERRORS:
            raise ValueError(f"fault {text!r}: phase is train or eval, error is one of {', '.join(ERRORS)}")
        if self.rank is None and self.node is None:
            raise ValueError(f"fault {text!r} names neither rank=R nor node=NAME; say where it is to happen")
        self.is_spent, self.fired_at, self.fired_step = False, None, None

    def is_mine(self, rank, world_size, node):
        wanted = world_size - 1 if self.rank == "last" else self.rank
        return wanted in (None, rank) and self.node in (None, node)


class Faults:
    """The faults of this rank: given at the start, or appearing in the fault directory while it runs."""

    def __init__(self, args, loader):
        self.rank, self.loader = args.rank, loader
        self.fault_dir, self.checkpoint_dir = args.fault_dir, args.checkpoint_dir
        self.mine = [fault for fault in args.fault if fault.is_mine(args.rank, args.world_size, node_name())]
        self._lock = threading.Lock()

    def fire(self, step, phase="train"):
        """Make happen what is due at this step."""
        if phase == "train":
            self._read_fault_dir(step)
        for fault in self.mine:
            exactly = fault.kind not in LASTING and phase == "train"
            due = step == fault.step if exactly else step >= fault.step
            wanted = fault.kind != "teardown_hang" and phase == fault.phase and not fault.is_spent
            if wanted and due and self._consume(fault, step):
                self._happen(fault, step)

    def teardown(self, step):
        for fault in self.mine:
            if fault.kind == "teardown_hang" and step >= fault.step and self._consume(fault, step):
                self._say(fault, step)
                self._wait_on_lock(fault.seconds)

    def step_factor(self):
        """How many times longer a step of this rank takes now."""
        return math.prod([fault.factor for fault in self._lasting("slow")])

    def bend_loss(self, loss, step):
        for fault in self._lasting("spike"):
            loss += loss * (fault.factor - 1) * math.exp(-(step - fault.fired_step) / 6.0)
        return float("nan") if self._lasting("nan") else loss

    def _lasting(self, kind):
        return [
            fault
            for fault in self.mine
            if fault.kind == kind and fault.fired_at is not None and time.monotonic() < fault.fired_at + fault.seconds
        ]

    def _consume(self, fault, step):
        """True if the fault may fire. One that fires once leaves its marker first: a restart is spared."""
        fault.is_spent = True
        if fault.once and not self._may_fire_once(fault, step):
            return False
        fault.fired_at, fault.fired_step = time.monotonic(), step
        return True

    def _may_fire_once(self, fault, step):
        if restart_count() > 0:
            return False
        if self.checkpoint_dir:
            name = f"fault-{fault.kind}-rank{self.rank}-step{fault.step}.fired"
            marker = os.path.join(self.checkpoint_dir, name)
            if os.path.exists(marker):
                return False
            write_atomically(marker, f"step {step}, pid {os.getpid()}\n")
        return True

    def _say(self, fault, step):
        sys.stderr.write(
            f"trainer: fault injected: {fault.kind} in rank {self.rank} "
            f"(pid {os.getpid()}, node {node_name()}) at step {step}\n"
        )
        sys.stderr.flush()

    def _happen(self, fault, step):
        self._say(fault, step)
        if fault.kind == "dataloader_hang":
            self.loader.hang(fault.seconds)
        elif fault.kind == "lock":
            self._wait_on_lock(fault.seconds)
        elif fault.kind == "die" and fault.signal:
            os.kill(os.getpid(), fault.signal)
        elif fault.kind == "die":
            os._exit(1)
        elif fault.kind == "exception":
            raise RuntimeError(ERRORS[fault.error])
        elif fault.kind == "memory":
            kept = []
            while True:
                kept.append(b"x" * (1 << 20))

    def _wait_on_lock(self, seconds):
        self._lock.acquire()
        if not self._lock.acquire(timeout=-1 if seconds == FOR_EVER else seconds):  # our own: it never comes
            self._lock.release()

    def _read_fault_dir(self, step):
        """Take the files KIND.rankR of this rank; each is renamed before its fault fires, so it fires once."""
        if not self.fault_dir:
            return
        for path in sorted(glob.glob(os.path.join(glob.escape(self.fault_dir), f"*.rank{self.rank}"))):
            try:
                with open(path) as file:
                    parameters = file.read().strip().replace("\n", ",")
                os.rename(path, path + ".fired")
                kind = os.path.basename(path).rsplit(".", 1)[0]
                fault = Fault(f"{kind}:rank={self.rank},always,{parameters},step={step}")
            except (OSError, ValueError) as error:
                sys.stderr.write(f"trainer: fault file {path} ignored: {error}\n")
                continue
            self.mine.append(fault)


# ----------------------------------------------------------------------------------------------------
# Checkpoints
# ----------------------------------------------------------------------------------------------------
TRACKER = "latest_checkpointed_iteration.txt"


def fsync_directory(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path, text, padding_seconds=0.0):
    """tmp + fsync + rename. With padding_seconds it grows slowly, blank by blank, as a large file would."""
    temporary = f"{path}.tmp.{os.getpid()}"
    with open(temporary, "w") as file:
        file.write(text)
        for _ in range(20 if padding_seconds > 0 else 0):
            file.write(" " * 4095 + "\n")
            file.flush()
            time.sleep(padding_seconds / 20)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    fsync_directory(os.path.dirname(path))


def chain_checksum(checksum, step):
    """The running checksum: one link a step, so that a step lost or done twice shows."""
    return zlib.crc32(b"%d;" % step, checksum)


def checksum_at(step):
    checksum = 0
    for done in range(1, step + 1):
        checksum = chain_checksum(checksum, done)
    return checksum


def step_directories(checkpoint_dir):
    """{step: directory}, complete or not."""
    found = {}
    for path in glob.glob(os.path.join(glob.escape(checkpoint_dir), "global_step*")):
        match = re.fullmatch(r"global_step(\d+)", os.path.basename(path))
        if match:
            found[int(match.group(1))] = path
    return found


def shard_path(directory, rank):
    return os.path.join(directory, f"rank_{rank:03d}.json")


def complete_marker(directory):
    """The marker's content, or None unless the marker and all the shards it speaks of are there."""
    try:
        with open(os.path.join(directory, "complete")) as file:
            marker = json.load(file)
        shards = [shard_path(directory, rank) for rank in range(marker["world_size"])]
        return marker if all(os.path.exists(shard) for shard in shards) else None
    except (OSError, ValueError, KeyError):
        return None


def newest_complete_step(checkpoint_dir):
    """The step of the newest complete checkpoint, or None. The tracker file is not asked: it may be wrong."""
    for step, directory in sorted(step_directories(checkpoint_dir).items(), reverse=True):
        if complete_marker(directory):
            return step
    return None


def prune_checkpoints(checkpoint_dir, keep_last):
    directories = step_directories(checkpoint_dir)
    complete = sorted(step for step in directories if complete_marker(directories[step]))
    if keep_last and len(complete) > keep_last:
        for step, directory in directories.items():
            if step < complete[-keep_last]:
                shutil.rmtree(directory, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------------
class Trainer:
    """One rank: its state, its collectives, its data, and the loop."""

    def __init__(self, args, group, loader, out):
        self.args, self.group, self.loader, self.out = args, group, loader, out
        self.rank, self.is_last = args.rank, args.rank == args.world_size - 1
        self.step, self.checksum, self.saved_step, self.nan_iterations = 0, 0, None, 0
        self.is_damaged = False  # with NaN in its weights it was saved
        self.loss = 0.0
        self.faults = Faults(args, loader)
        self.kill_switch = kill_switch_path(args.kill_switch_path) if args.local_rank == 0 else None
        self.signalled = None
        signal.signal(signal.SIGUSR1, self._on_signal)
        self.noise = random.Random(f"{args.seed}/{args.rank}")

    def _on_signal(self, number, frame):
        self.signalled = signal.Signals(number).name

    def print_rank_0(self, text):
        if self.rank == 0:
            self.out.line(text)

    def print_rank_last(self, text):
        if self.is_last:
            self.out.line(text)

    # -- leaving -----------------------------------------------------------------------------------
    def reason_to_stop(self):
        """What this rank knows: the kill switch's path, a signal, or ''."""
        if self.kill_switch and os.path.exists(self.kill_switch):
            return f"kill switch {self.kill_switch} found"
        return f"signal {self.signalled} received by rank {self.rank}" if self.signalled else ""

    def agreed_reason_to_stop(self):
        """The first rank's reason, the same on every rank, so that all stop after the same step."""
        return next(filter(None, all_gather(self.reason_to_stop(), self.group)), "")

    # -- checkpoints -------------------------------------------------------------------------------
    def load_checkpoint(self):
        directory, named = self.args.checkpoint_dir, os.environ.get("SLURM_WATCHDOG_RESUME_FROM")
        step = None
        if named:
            directory = os.path.dirname(named)
            step = int(os.path.basename(named).removeprefix("global_step"))
        elif directory:
            step = newest_complete_step(directory) if self.rank == 0 else None
            if self.rank == 0:
                self._compare_tracker(step)
        else:
            return
        step = broadcast(step, 0, self.group)
        if step is None:
            self.print_rank_0(f" WARNING: no complete checkpoint in {directory}, will start from random")
            return
        self.print_rank_0(f" loading checkpoint from {directory} at iteration {step}")
        source = step_directories(directory)[step]
        world_size = complete_marker(source)["world_size"]  # may differ from ours: the topology may change
        path = shard_path(source, self.rank % world_size)
        with open(path) as file:
            state = json.load(file)
        if state["step"] != step or state["checksum"] != checksum_at(step):
            fail(
                1,
                (
                    f"checkpoint {path} says step {state['step']} with checksum {state['checksum']}, "
                    f"but step {step} has {checksum_at(step)}: a step was lost or done twice. "
                    "Move this directory away; the run then resumes from the one before."
                ),
            )
        self.step, self.checksum, self.saved_step = step, state["checksum"], step
        self.nan_iterations, self.is_damaged = state["nan_iterations"], state.get("is_damaged", False)
        barrier(self.group)
        self.print_rank_0(f"  successfully loaded checkpoint from {directory} at iteration {step}")

    def _compare_tracker(self, step):
        try:
            with open(os.path.join(self.args.checkpoint_dir, TRACKER)) as file:
                tracked = file.read().strip()
        except OSError:
            return
        if tracked != str(step):
            self.out.line(
                f" WARNING: {TRACKER} says iteration {tracked}, the newest complete checkpoint is {step}: using that"
            )

    def save_checkpoint(self):
        args, step = self.args, self.step
        if not args.checkpoint_dir or self.saved_step == step:
            return
        directory = os.path.join(args.checkpoint_dir, f"global_step{step}")
        self.print_rank_0(f" saving checkpoint at iteration {step:7d} to {args.checkpoint_dir}")
        os.makedirs(directory, exist_ok=True)
        if self.rank == 0 and os.path.exists(os.path.join(directory, "complete")):
            os.unlink(os.path.join(directory, "complete"))  # being written again: no longer complete
        barrier(self.group)
        state = {
            "step": step,
            "checksum": self.checksum,
            "rank": self.rank,
            "world_size": args.world_size,
            "consumed_samples": step * args.global_batch_size,
            "nan_iterations": self.nan_iterations,
            "is_damaged": not math.isfinite(self.loss),
        }
        takes_long = self.rank == 0 or args.checkpoint_writers == "all"
        write_atomically(
            shard_path(directory, self.rank),
            json.dumps(state) + "\n",
            args.checkpoint_seconds if takes_long else 0.0,
        )
        barrier(self.group)
        if self.rank == 0:
            marker = {"step": step, "world_size": args.world_size, "checksum": self.checksum}
            write_atomically(os.path.join(directory, "complete"), json.dumps(marker) + "\n")
            write_atomically(os.path.join(args.checkpoint_dir, TRACKER), f"{step}")
            prune_checkpoints(args.checkpoint_dir, args.keep_last)
        barrier(self.group)
        self.saved_step = step
        self.print_rank_0(f"  successfully saved checkpoint at iteration {step:7d} to {args.checkpoint_dir}")

    # -- evaluation --------------------------------------------------------------------------------
    def evaluate_and_print_results(self):
        loss = self.evaluate()
        perplexity = math.exp(min(20.0, loss)) if math.isfinite(loss) else float("nan")
        text = f" valid loss at iteration {self.step} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | "
        self.print_rank_last("-" * len(text))
        self.print_rank_last(text)
        self.print_rank_last("-" * len(text))

    def evaluate(self):
        self.faults.fire(self.step, phase="eval")
        total = 0.0
        for _ in range(self.args.eval_iters):
            total += self.eval_batch()
        return total / self.args.eval_iters

    def eval_batch(self):
        batch = self._exec_schedule(self.args.eval_seconds / self.args.eval_iters)
        loss = self._reduce_outputs(self.loss_of(batch) + 0.05)
        return self._bcast_pipe_scalar(loss)

    def _bcast_pipe_scalar(self, loss):
        return broadcast(loss, self.args.world_size - 1, self.group)

    # -- one step ----------------------------------------------------------------------------------
    def _exec_schedule(self, seconds):
        batch = self._exec_load_micro_batch()
        self._exec_forward_pass(seconds)
        return batch

    def _exec_load_micro_batch(self):
        return self._next_batch()

    def _next_batch(self):
        return next(self.loader)

    def _exec_forward_pass(self, seconds):
        seconds *= max(0.0, 1.0 + self.noise.gauss(0.0, self.args.jitter)) * self.faults.step_factor()
        if self.args.compute == "sleep":
            time.sleep(seconds)
            return
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            math.fsum(range(1000))

    def _reduce_outputs(self, loss):
        return all_reduce(loss, self.group)

    def loss_of(self, batch):
        loss = 1.9 + 9.0 * (self.step + 1) ** -0.35 + 0.02 * math.fsum(batch) / len(batch)
        return float("nan") if self.is_damaged else self.faults.bend_loss(loss, self.step)

    def train_step(self):
        """One step; returns (loss, seconds)."""
        started = time.monotonic()
        self.faults.fire(self.step)
        batch = self._exec_schedule(self.args.step_seconds)
        loss = self._reduce_outputs(self.loss_of(batch))
        barrier(self.group)
        self.checksum = chain_checksum(self.checksum, self.step)
        self.nan_iterations += 0 if math.isfinite(loss) else 1
        self.loss = loss
        return loss, time.monotonic() - started

    def training_log(self, loss, seconds):
        args, step = self.args, self.step
        samples = step * args.global_batch_size
        rate = 6e-5 * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / args.steps))))
        seconds = max(seconds, 1e-6)
        tflops = NOMINAL_TFLOPS * args.step_seconds / seconds
        self.out.log_iteration(
            f" iteration {step:8d}/{args.steps:8d} |"
            f" consumed samples: {samples:12d} |"
            f" consumed tokens: {samples * 2048:12d} |"
            f" elapsed time per iteration (s): {seconds:.2f} |"
            f" learning rate: {rate:.3E} |"
            f" global batch size: {args.global_batch_size:5d} |"
            f" lm loss: {loss:.6E} |"
            f" grad norm: {abs(self.noise.gauss(0.17, 0.03)):.3f} |"
            " num zeros: 0.0 |"
            " number of skipped iterations:   0 |"
            f" number of nan iterations: {self.nan_iterations:3d} |"
            f" samples per second: {args.global_batch_size / seconds:.3f} |"
            f" TFLOPs: {tflops:.2f} |"
        )

    # -- the loop ----------------------------------------------------------------------------------
    def train(self):
        """Train to the last step or until asked to stop. Returns the reason to stop, '' when all steps are done."""
        args, interval_seconds = self.args, 0.0
        while self.step < args.steps:
            self.step += 1
            loss, seconds = self.train_step()
            interval_seconds += seconds
            if self.step % args.log_interval == 0:
                if self.is_last:
                    self.training_log(loss, interval_seconds / args.log_interval)
                interval_seconds = 0.0
            if args.eval_interval and self.step % args.eval_interval == 0:
                self.evaluate_and_print_results()
            if args.save_interval and self.step % args.save_interval == 0:
                self.save_checkpoint()
            reason = self.agreed_reason_to_stop()
            if reason:
                return reason
        return ""

    def pretrain(self):
        reason = self.agreed_reason_to_stop()
        if reason:
            self.print_rank_0(
                f" exiting program at iteration 0: {reason} at start, before any step. If it is left over from "
                "an earlier run, whoever wrote it has to remove it; then start again."
            )
            return
        self.load_checkpoint()
        if self.step >= self.args.steps:
            self.print_rank_0(f" nothing to do: iteration {self.step} of {self.args.steps} is already done")
            return
        self.print_rank_0(f"[before the start of training step] datetime: {time.strftime('%Y-%m-%d %H:%M:%S')} ")
        reason = self.train()
        if not reason:
            self.print_rank_0(f"[after training is done] datetime: {time.strftime('%Y-%m-%d %H:%M:%S')} ")
        self.save_checkpoint()
        if reason:
            self.print_rank_0(f" exiting program at iteration {self.step}: {reason}")


# ----------------------------------------------------------------------------------------------------
# PULSE: the status reporter that moves the log while nothing moves
# ----------------------------------------------------------------------------------------------------
def slurm_duration(seconds):
    """93453 -> '1-01:57:33', as Slurm prints it."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes:02d}:{rest:02d}"


def pulse(out, name, every_seconds):
    """A line every so often, whatever the training does."""
    since = time.time()
    partition = first_env("SLURM_JOB_PARTITION", default="local")
    nodes = first_env("SLURM_JOB_NODELIST", default=node_name())
    started = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    while True:
        time.sleep(every_seconds)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        running_for = slurm_duration(time.time() - since)
        out.line(  # the parenthesis stays open, as in the reports this line is modelled on
            f"[{now}] PULSE: {name} is running for {running_for} since {started}"
            f" ({job_id()} on '{partition}' partition ({nodes})",
            prefix=False,
        )


# ----------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------
def at_least(minimum, kind):
    def parse(text):
        value = kind(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text} is below {minimum}")
        return value

    parse.__name__ = kind.__name__
    return parse


def fault_argument(text):
    try:
        return Fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def build_parser():
    parser = argparse.ArgumentParser(
        prog="trainer.py",
        description=__doc__.split("\n\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    count, seconds = at_least(0, int), at_least(0.0, float)
    world = parser.add_argument_group(
        "world (default: from RANK, WORLD_SIZE, LOCAL_RANK or SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID)"
    )
    world.add_argument("--rank", type=count)
    world.add_argument("--world-size", type=at_least(1, int))
    world.add_argument("--local-rank", type=count, help="default: its place among the ranks of its node")
    world.add_argument(
        "--master-address",
        metavar="HOST",
        help="default: MASTER_ADDR, else --rendezvous-dir, else the "
        "first host of SLURM_STEP_NODELIST (one node: 127.0.0.1)",
    )
    world.add_argument(
        "--master-port",
        type=at_least(1, int),
        metavar="PORT",
        help="default: MASTER_PORT, else derived from job id and restart count",
    )
    world.add_argument(
        "--rendezvous-dir",
        metavar="DIR",
        help="shared directory where rank 0 writes its address as {job_id}.{restart}; unused when an address is given",
    )
    world.add_argument("--rendezvous-timeout-seconds", type=seconds, default=600.0, metavar="S")
    world.add_argument(
        "--abort-on-peer-death",
        action="store_true",
        help="when a rank dies the others exit with an error (default: they wait indefinitely)",
    )
    loop = parser.add_argument_group("training")
    loop.add_argument("--steps", type=at_least(1, int), default=100, help="total, default %(default)s")
    loop.add_argument("--step-seconds", type=seconds, default=0.5, metavar="S", help="default %(default)s")
    loop.add_argument(
        "--jitter",
        type=seconds,
        default=0.02,
        metavar="R",
        help="standard deviation of a step's time as a share of it, default %(default)s",
    )
    loop.add_argument("--compute", choices=("sleep", "busy"), default="sleep", help="how a rank spends a step")
    loop.add_argument("--global-batch-size", type=at_least(1, int), default=2048)
    loop.add_argument("--num-workers", type=count, default=2, help="DataLoader processes a rank, default %(default)s")
    loop.add_argument("--seed", type=int, default=42)
    loop.add_argument("--eval-interval", type=count, default=0, metavar="STEPS", help="0: never")
    loop.add_argument("--eval-seconds", type=seconds, default=2.0, metavar="S", help="how long one evaluation takes")
    loop.add_argument("--eval-iters", type=at_least(1, int), default=4)
    save = parser.add_argument_group("checkpoints")
    save.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="saved to, and resumed from its newest complete checkpoint, or from SLURM_WATCHDOG_RESUME_FROM",
    )
    save.add_argument("--save-interval", type=count, default=0, metavar="STEPS", help="0: only at the end")
    save.add_argument("--checkpoint-seconds", type=seconds, default=0.0, metavar="S", help="how long one save takes")
    save.add_argument(
        "--checkpoint-writers",
        choices=("all", "rank0"),
        default="all",
        help="who takes --checkpoint-seconds; with rank0 the others wait in barrier",
    )
    save.add_argument("--keep-last", type=count, default=0, metavar="K", help="complete checkpoints kept; 0: all")
    logs = parser.add_argument_group("log")
    logs.add_argument("--log", metavar="FILE", help="appended to, besides standard output; unbuffered")
    logs.add_argument("--log-interval", type=at_least(1, int), default=1, metavar="STEPS")
    logs.add_argument(
        "--line-prefix",
        default="[default{local_rank}]:",
        metavar="TEXT",
        help="{local_rank}, {rank}, {node} are replaced; default %(default)s",
    )
    logs.add_argument(
        "--pulse-seconds",
        type=seconds,
        default=0.0,
        metavar="S",
        help="rank 0 writes a PULSE line this often, hung or not; 0: never",
    )
    logs.add_argument("--run-name", metavar="NAME", help="in PULSE lines; default: SLURM_JOB_NAME")
    stop = parser.add_argument_group("stopping and breaking")
    stop.add_argument(
        "--kill-switch-path",
        metavar="PATH",
        help="{job_id}, {restart}, {node} are replaced; default: "
        "SLURM_WATCHDOG_KILL_SWITCH, else /run/slurm-watchdog/jobs/{job_id}.{restart}/kill in a Slurm job."
        " Looked for after every step by local rank 0 of every node; never removed. SIGUSR1 does the same",
    )
    stop.add_argument("--fault", action="append", type=fault_argument, default=[], metavar="KIND:rank=R,step=N,...")
    stop.add_argument("--fault-dir", metavar="DIR", help="files KIND.rankR that appear here fire at the next step")
    return parser


def parse_arguments(argv):
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.world_size is None:
        args.world_size = first_env_int("WORLD_SIZE", "SLURM_NTASKS", default=1)
    if args.rank is None:
        args.rank = first_env_int("RANK", "SLURM_PROCID", default=0)
    if args.local_rank is None:
        args.local_rank = first_env_int("LOCAL_RANK", "SLURM_LOCALID")
    if not 0 <= args.rank < args.world_size:
        parser.error(
            f"rank {args.rank} is not below the world size {args.world_size}: "
            "set RANK and WORLD_SIZE (or SLURM_PROCID and "
            "SLURM_NTASKS), or give --rank and --world-size"
        )
    for fault in args.fault:
        if isinstance(fault.rank, int) and fault.rank >= args.world_size:
            parser.error(
                f"--fault {fault.kind}: rank {fault.rank} does not exist, ranks are 0 to {args.world_size - 1}"
            )
    return args


def start_message(args, group):
    nodes = len({rank["node"] for rank in group.ranks})
    lines = [
        f"> initialized process group: world size {args.world_size} on {nodes} node(s),"
        f" job {job_id()} restart {restart_count()}"
    ]
    for rank in group.ranks:
        local_rank = local_rank_of(group.ranks, rank["rank"])
        lines.append(f"> rank {rank['rank']}: node {rank['node']}, local rank {local_rank}, pid {rank['pid']}")
    return lines


def main(argv=None):
    args = parse_arguments(argv)
    early = []
    signal.signal(signal.SIGUSR1, lambda number, frame: early.append(number))  # before there is a loop to stop
    loader = DataLoader(args.num_workers, f"{args.seed}/{args.rank}")  # forks: before any thread or socket
    try:
        if args.checkpoint_dir:
            args.checkpoint_dir = os.path.abspath(args.checkpoint_dir)
            os.makedirs(args.checkpoint_dir, exist_ok=True)
        group = ProcessGroup(args)
        if args.local_rank is None:
            args.local_rank = local_rank_of(group.ranks, args.rank)
        prefix = args.line_prefix.replace("{local_rank}", str(args.local_rank)).replace("{rank}", str(args.rank))
        out = Output(args.log, prefix.replace("{node}", node_name()))
    except OSError as error:
        fail(EXIT_USAGE, f"{error.filename}: {error.strerror}. Give a path this user may write.")
    trainer = Trainer(args, group, loader, out)
    if early:
        trainer.signalled = "SIGUSR1"
    loader.start()
    if args.rank == 0:
        for text in start_message(args, group):
            out.line(text)
        if args.pulse_seconds:
            name = args.run_name or first_env("SLURM_JOB_NAME", default="trainer")
            threading.Thread(target=pulse, name="pulse", daemon=True, args=(out, name, args.pulse_seconds)).start()
    try:
        trainer.pretrain()
        destroy_process_group(group, trainer.faults, trainer.step)
    except PeerLeft as error:
        loader.shutdown_workers()
        fail(1, f"{error}. The others stop too (--abort-on-peer-death); see that rank's log.")
    loader.shutdown_workers()
    return 0


if __name__ == "__main__":
    sys.exit(main())
