#!/usr/bin/env python3
"""A real DistributedDataParallel training on gloo that breaks on request. Runs where torch is, and
imports nothing of ours.

    srun --ntasks-per-node=2 python ddp.py --place DIR --faults DIR     (a task a rank)
    torchrun --nproc-per-node=2 ... ddp.py --place DIR --faults DIR     (a launcher a node)

A file KIND.rankR in the directory of faults makes rank R do it at its next step; what it did, and when, is
then in KIND.rankR.done. Kinds: slower (it works longer in every step from now on), turns (in every fourth one
of four ranks), loader (its DataLoader's workers stop), lock (waits for a lock that nobody
gives back), mismatch (calls another collective than the others), sleep (a retry that never ends), file (reads
a named pipe that nobody writes), file_lock (waits for a lock on a file that a process of its own keeps),
leave (ends at once, with code 0 and without a word), request (asks a server that never answers), interpreter
(a C call that keeps the interpreter's lock), loop (Python code that never ends). What is healthy and looks ill is chosen on the command
line.
"""

import argparse
import atexit
import ctypes
import datetime
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.request

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.utils.store import barrier
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FOR_EVER_S = 1e6
WIDTH = 64


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", required=True, help="checkpoints, and a file a rank with its node and pid")
    parser.add_argument("--faults", required=True)
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--step-seconds", type=float, default=0.3)
    parser.add_argument("--work", type=float, default=0.0, help="seconds of the processor that a rank uses in a step")
    parser.add_argument(
        "--slower", type=float, default=1.0, help="factor on it where `slower` is on (`turns`: by turns)"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--save-interval", type=int, default=20)
    parser.add_argument("--announced-saves", type=int, default=0, help="so many take --announced-seconds")
    parser.add_argument("--announced-seconds", type=float, default=120.0)
    parser.add_argument("--save-seconds", type=float, default=0.0, help="of the slow checkpoint at --slow-at")
    parser.add_argument("--evaluate-seconds", type=float, default=0.0, help="of the evaluation at --slow-at")
    parser.add_argument(
        "--evaluate-every", type=int, default=0, help="steps; a word in the log, and four seconds of it"
    )
    parser.add_argument("--evaluate-by", choices=("all", "rank0"), default="all")
    parser.add_argument("--compile-seconds", type=float, default=0.0, help="of the compilation at --slow-at (0: none)")
    parser.add_argument("--compile-first", action="store_true", help="compile before the first step as well")
    parser.add_argument("--slow-at", type=int, default=30, help="step of what takes long")
    parser.add_argument("--side-log", default="", help="a file that --side-rank writes at every step")
    parser.add_argument("--side-rank", type=int, default=2)
    parser.add_argument("--side-node", default="", help="the rank on this node writes it, not --side-rank")
    parser.add_argument("--worker-log", default="", help="a file that every DataLoader worker writes for every sample")
    parser.add_argument("--on-error", choices=("raise", "stay"), default="raise")
    parser.add_argument(
        "--teardown",
        choices=("", "thread", "atexit", "barrier"),
        default="",
        help="--teardown-rank never ends",
    )
    parser.add_argument("--teardown-rank", type=int, default=1)
    parser.add_argument(
        "--group-timeout", type=float, default=36000.0, help="seconds of a collective; 0: PyTorch's own default"
    )
    parser.add_argument("--kill-switch", action="store_true", help="look for the watchdog's kill switch at every step")
    parser.add_argument("--no-total", action="store_true", help="the log does not say how many steps there will be")
    return parser.parse_args()


class Faults:
    """What rank `rank` has to do, once."""

    def __init__(self, directory, rank):
        self.directory, self.rank = directory, rank

    def take(self, kind):
        path = os.path.join(self.directory, f"{kind}.rank{self.rank}")
        if not os.path.exists(path) or os.path.exists(path + ".done"):
            return False
        note(path + ".done", self.rank)
        return True

    def happen(self):
        if self.take("lock"):
            wait_for_the_cache()
        if self.take("mismatch"):
            dist.broadcast(torch.zeros(3), src=self.rank)
        if self.take("sleep"):
            while True:
                time.sleep(5)
        if self.take("file"):
            pipe = os.path.join(self.directory, "pipe")
            os.mkfifo(pipe)
            with open(pipe) as answers:
                answers.read()
        if self.take("file_lock"):
            wait_for_the_file(os.path.join(self.directory, "cache.lock"))
        if self.take("leave"):
            os._exit(0)
        if self.take("request"):
            ask_a_silent_server()
        if self.take("interpreter"):
            ctypes.PyDLL(None).pause()
        if self.take("loop"):
            retries = 0
            while True:
                retries += 1
        if self.take("raise"):
            raise ValueError("sample 7 has no label")


def note(path, rank):
    row = {"at": time.time(), "rank": rank, "node": socket.gethostname(), "pid": os.getpid()}
    with open(path + ".part", "w") as file:
        json.dump(row, file)
    os.replace(path + ".part", path)


def wait_for_the_file(path):
    keeper = f"import fcntl, time; file = open({path!r}, 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); time.sleep({FOR_EVER_S})"
    with subprocess.Popen([sys.executable, "-c", keeper], stdout=subprocess.PIPE) as keeps:
        keeps.stdout.readline()
        with open(path, "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)


def ask_a_silent_server():
    keeper = f"import socket, time; server = socket.create_server(('127.0.0.1', 0)); print(server.getsockname()[1], flush=True); time.sleep({FOR_EVER_S})"
    with subprocess.Popen([sys.executable, "-c", keeper], stdout=subprocess.PIPE) as keeps:
        urllib.request.urlopen(f"http://127.0.0.1:{int(keeps.stdout.readline())}/experiment")


def wait_for_the_cache():
    guard = threading.Lock()
    guard.acquire()
    with guard:
        pass


class Samples(Dataset):
    """A sample is made by the process that asks: with workers, by one of them."""

    def __init__(self, faults, worker_log):
        self.faults, self.worker_log = faults, worker_log

    def __len__(self):
        return 10**7

    def __getitem__(self, index):
        if self.faults.take("loader"):
            time.sleep(FOR_EVER_S)
        if self.worker_log:
            with open(self.worker_log, "a") as log:
                log.write(f"{index}\n")
        return torch.full((WIDTH,), (index % 97) / 97.0), torch.full((1,), (index % 7) / 7.0)


class SlowFile:
    """A filesystem that takes a few kilobytes a second."""

    def __init__(self, path, seconds, size):
        self.file = open(path, "wb")  # noqa: SIM115 - closed by close()
        self.pause_s, self.size = seconds / 200, max(1, size // 200)

    def write(self, data):
        view = memoryview(data).cast("B")
        for at in range(0, len(view), self.size):
            self.file.write(view[at : at + self.size])
            time.sleep(self.pause_s)
        return len(view)

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()


class Training:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.faults = Faults(args.faults, self.rank)
        self.path = os.path.join(args.place, "checkpoint.pt")
        net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
        self.step = 0
        if os.path.exists(self.path):
            saved = torch.load(self.path)
            net.load_state_dict(saved["model"])
            self.step = saved["step"]
            self.say(f"resumed from {self.path} at step {self.step}")
        self.net = net
        self.model = DistributedDataParallel(net)
        self.late, self.matrix = "", torch.ones(128, 128)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        samples = Samples(self.faults, args.worker_log)
        self.loader = DataLoader(
            samples,
            batch_size=8,
            num_workers=args.workers,
            sampler=DistributedSampler(samples, shuffle=False),
        )

    def writes_aside(self):
        if not self.args.side_log:
            return False
        return socket.gethostname() == self.args.side_node if self.args.side_node else self.rank == self.args.side_rank

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def train(self):
        if self.args.compile_first:
            self.compile(1.0)
        batches = iter(self.loader)
        while self.step < self.args.steps:
            began = time.monotonic()
            inputs, targets = next(batches)
            self.step += 1
            self.faults.happen()
            if self.writes_aside():
                with open(self.args.side_log, "a") as log:
                    log.write(f"step {self.step}\n")
            time.sleep(self.args.step_seconds)
            self.work()
            loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            total = "" if self.args.no_total else f"/{self.args.steps}"
            took = time.monotonic() - began
            self.say(f"step {self.step}{total} | loss {mean.item() / self.world:.4f} | step_time: {took:.3f} s")
            if self.step % self.args.save_interval == 0:
                self.upload()
                self.save_checkpoint(0.0)
            if self.step == self.args.slow_at:
                self.what_takes_long()
            if self.args.evaluate_every and self.step % self.args.evaluate_every == 0:
                self.say("***** Running Evaluation *****")
                self.evaluate(4.0)
                dist.barrier()
            if self.args.kill_switch and self.is_asked_to_end():
                self.save_checkpoint(0.0)
                return

    def upload(self):
        """Rank 0 is in code of its own, which no stack shows to be a save: the log says so alone."""
        if self.step > self.args.save_interval and self.args.announced_saves > 0:
            self.args.announced_saves -= 1
            self.say(f"saving checkpoint at step {self.step}")
            if self.rank == 0:
                time.sleep(self.args.announced_seconds)
            dist.barrier()

    def is_asked_to_end(self):
        """Whether any rank sees the kill switch of this run where the watchdog writes it."""
        run = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        asked = torch.tensor([float(os.path.exists(f"/run/slurm-watchdog/jobs/{run}/kill"))])
        dist.all_reduce(asked)
        return bool(asked.item())

    def work(self):
        for kind in ("slower", "turns"):
            if self.faults.take(kind):
                self.late = kind
        late = self.late == "slower" or (self.late == "turns" and self.step % self.world == self.rank)
        end = time.thread_time() + self.args.work * (self.args.slower if late else 1.0)
        while time.thread_time() < end:
            torch.mm(self.matrix, self.matrix)

    def what_takes_long(self):
        """What healthy jobs do now and then, without a word in the log."""
        if self.args.save_seconds:
            self.save_checkpoint(self.args.save_seconds)
        if self.args.evaluate_seconds:
            if self.rank == 0 or self.args.evaluate_by == "all":
                self.evaluate(self.args.evaluate_seconds)
            dist.barrier()
        if self.args.compile_seconds:
            self.compile(self.args.compile_seconds)

    def save_checkpoint(self, seconds):
        if self.rank == 0:
            state = {"model": self.net.state_dict(), "step": self.step}
            if seconds:
                file = SlowFile(self.path + ".part", seconds, 4 * sum(p.numel() for p in self.net.parameters()))
                torch.save(state, file)
                file.close()
            else:
                torch.save(state, self.path + ".part")
            os.replace(self.path + ".part", self.path)
            print(f"saved checkpoint at step {self.step} to {self.path}", flush=True)
        dist.barrier()

    def evaluate(self, seconds):
        self.net.eval()
        end = time.monotonic() + seconds
        with torch.no_grad():
            for number, (inputs, _) in enumerate(DataLoader(Samples(self.faults, ""), batch_size=64)):
                self.net(inputs)
                if self.faults.take("evaluation"):
                    wait_for_the_cache()
                time.sleep(0.05 + 0.01 * (number % 3))
                if time.monotonic() > end:
                    break
        self.net.train()

    def compile(self, seconds):
        end = time.monotonic() + seconds
        while True:
            torch._dynamo.reset()
            layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(24)]
            torch.compile(torch.nn.Sequential(*layers), backend="aot_eager")(torch.zeros(8, WIDTH))
            if time.monotonic() > end:
                return


def stay(store):
    """As error handlers do that wait until everybody is back."""
    barrier(store, int(os.environ["WORLD_SIZE"]), "everybody is back", barrier_timeout=72000)


def never_end(how):
    if how == "thread":
        threading.Thread(target=time.sleep, args=(FOR_EVER_S,), name="uploader").start()
    elif how == "atexit":
        atexit.register(wait_for_the_cache)


def answer_dumps(rank):
    """Writes a Flight Recorder dump whenever something comes through the pipe: NCCL's monitor does so, gloo has none."""
    pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{rank}.pipe"
    if os.path.exists(pipe):
        os.unlink(pipe)
    os.mkfifo(pipe)

    def write_dumps():
        while True:
            with open(pipe, "rb") as asked:
                asked.read(1)
            with open(f"{os.environ['TORCH_NCCL_DEBUG_INFO_TEMP_FILE']}{rank}", "wb") as file:
                file.write(torch._C._distributed_c10d._dump_fr_trace())

    threading.Thread(target=write_dumps, name="dumps", daemon=True).start()


@record
def main():
    args = options()
    for ours, slurms in (
        ("RANK", "SLURM_PROCID"),
        ("WORLD_SIZE", "SLURM_NTASKS"),
        ("LOCAL_RANK", "SLURM_LOCALID"),
    ):
        os.environ.setdefault(ours, os.environ.get(slurms, "0"))
    torch.set_num_threads(1)
    os.makedirs(args.place, exist_ok=True)
    patience = datetime.timedelta(seconds=args.group_timeout) if args.group_timeout else None
    dist.init_process_group("gloo", timeout=patience)
    rank = dist.get_rank()
    note(os.path.join(args.place, f"rank{rank}.json"), rank)
    if "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in os.environ:
        answer_dumps(rank)
    store = dist.distributed_c10d._get_default_store()
    try:
        Training(args).train()
    except RuntimeError:
        if args.on_error == "raise":
            raise
        traceback.print_exc()
        stay(store)
    mine = rank == args.teardown_rank
    if args.teardown:
        note(os.path.join(args.faults, f"teardown.rank{rank}.done"), rank) if mine else None
        if args.teardown == "barrier" and mine:
            wait_for_the_cache()
        if args.teardown == "barrier":
            dist.barrier()
        if mine:
            never_end(args.teardown)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
