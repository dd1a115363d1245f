#!/usr/bin/env python3
"""A launcher and a trainer with the options, log lines and files of Megatron-DeepSpeed, without a model.

    srun --ntasks-per-node=1 python megatron.py --nproc_per_node 2 pretrain_gpt.py --kill-switch-path F --save D …

As there, a trainer that finds its kill switch when it starts exits at once with code 0, which ends an element of an array
without a step; one that finds it after an iteration saves and exits. It never removes the file. Standard library only.
"""

import argparse
import os
import subprocess
import sys
import time

TRACKER = "latest_checkpointed_iteration.txt"


def launch(argv):
    """As `python -m torch.distributed.launch`: the ranks of this node, each with its place in the environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc_per_node", type=int, required=True)
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    node, nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_NNODES"])
    ranks = []
    for local in range(args.nproc_per_node):
        place = {
            "RANK": node * args.nproc_per_node + local, "LOCAL_RANK": local, "WORLD_SIZE": nodes * args.nproc_per_node,
            "LOCAL_WORLD_SIZE": args.nproc_per_node,
        }  # fmt: skip
        argv = [sys.executable, "-u", __file__, args.script, *args.rest]
        ranks.append(subprocess.Popen(argv, env={**os.environ, **{name: str(value) for name, value in place.items()}}))
    return max(rank.wait() for rank in ranks)


def pretrain(argv):
    """One rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-switch-path", required=True)
    parser.add_argument("--save", required=True)
    parser.add_argument("--load", required=True)
    parser.add_argument("--save-interval", type=int, required=True)
    parser.add_argument("--exit-interval", type=int, required=True)
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--iteration-seconds", type=float, default=0.3)
    args = parser.parse_args(argv)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.path.exists(args.kill_switch_path):
        print(f"Detected kill switch at {args.kill_switch_path}. Exiting", flush=True)
        return 0
    iteration = loaded = load(args.load)
    if rank == 0:
        print(f"  successfully loaded checkpoint from {args.load} at iteration {iteration}", flush=True)
    while iteration < args.train_iters:
        time.sleep(args.iteration_seconds)
        iteration += 1
        if rank == world - 1:
            print(
                f" iteration {iteration:8d}/{args.train_iters:8d} | consumed samples: {iteration * 2048:12d} | elapsed time per "
                f"iteration (ms): {args.iteration_seconds * 1000:.1f} | lm loss: {2.0 + 1.0 / iteration:.6E} |",
                flush=True,
            )  # fmt: skip
        asked, over = os.path.exists(args.kill_switch_path), iteration - loaded >= args.exit_interval
        if rank == 0 and (asked or over or iteration % args.save_interval == 0):
            save(args.save, iteration)
        if asked:
            print(f"Detected kill switch at {args.kill_switch_path}. Exiting", flush=True)
        if asked or over:
            return 0
    return 0


def load(directory):
    """The newest iteration that was saved; 0 if there is none."""
    try:
        with open(os.path.join(directory, TRACKER)) as file:
            return int(file.read())
    except OSError:
        return 0


def save(directory, iteration):
    print(f"  saving checkpoint at iteration {iteration:7d} to {directory}", flush=True)
    step = os.path.join(directory, f"iter_{iteration:07d}", "mp_rank_00")
    os.makedirs(step, exist_ok=True)
    with open(os.path.join(step, "model_optim_rng.pt"), "w") as file:
        file.write(str(iteration))
    with open(os.path.join(directory, TRACKER), "w") as file:
        file.write(str(iteration))
    print(f"  successfully saved checkpoint at iteration {iteration:7d} to {directory}", flush=True)


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]) if sys.argv[1].startswith("--nproc") else pretrain(sys.argv[2:]))
