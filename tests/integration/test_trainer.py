"""The demo trainer, run as real processes: worlds of three or four ranks on this machine, no Slurm, no root."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[2] / "tests" / "rig" / "trainer.py"
INHERITED_FROM_A_JOB = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "WATCHDOG_", "TORCHELASTIC_")


class World:
    """The processes of one start of a run, their output in one file a rank."""

    def __init__(self, directory, world_size, arguments, environment):
        self.directory = directory
        self.processes = [self._start(rank, world_size, arguments, environment) for rank in range(world_size)]

    def _start(self, rank, world_size, arguments, environment):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(INHERITED_FROM_A_JOB)}
        mine = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        with (self.directory / f"rank{rank}.out").open("wb") as output:
            command = [sys.executable, str(TRAINER), *arguments]
            return subprocess.Popen(
                command, env={**clean, **mine, **environment}, stdout=output, stderr=subprocess.STDOUT
            )

    def text(self, rank):
        return (self.directory / f"rank{rank}.out").read_text()

    def all_text(self):
        return "".join(self.text(rank) for rank in range(len(self.processes)))

    def wait(self, seconds=15):
        """Exit codes in rank order."""
        deadline = time.monotonic() + seconds
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def wait_for(self, pattern, seconds=10):
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.all_text()):
            assert time.monotonic() < deadline, f"{pattern!r} did not come in:\n{self.all_text()}"
            time.sleep(0.02)

    def alive(self):
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def kill(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    """start(*arguments, ranks=3, **environment) -> World; killed at the end, whatever happened."""
    worlds = []

    def start_world(*arguments, ranks=3, **environment):
        directory = tmp_path / f"start{len(worlds)}"
        directory.mkdir()
        if not any("rendezvous-dir" in a for a in arguments) and "MASTER_PORT" not in environment:
            environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        fast = ["--step-seconds=0.01", "--num-workers=1", "--rendezvous-timeout-seconds=20"]
        worlds.append(World(directory, ranks, [*fast, *map(str, arguments)], environment))
        return worlds[-1]

    yield start_world
    for world in worlds:
        world.kill()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def steps_in(text):
    return [int(step) for step in re.findall(r"iteration +(\d+)/", text)]


def shards_of(directory):
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank_*.json"))]


def test_every_step_is_logged_once_by_the_last_rank(start, tmp_path):
    world = start("--steps=8", f"--log={tmp_path / 'log'}")
    assert world.wait() == [0, 0, 0]
    assert steps_in(world.text(2)) == list(range(1, 9))
    assert steps_in(world.text(0)) == steps_in(world.text(1)) == []
    assert steps_in((tmp_path / "log").read_text()) == list(range(1, 9))
    assert re.search(
        r"^\[default2\]: iteration        8/       8 \| consumed samples:        16384 \|.* lm loss: \d\.\d+E\+00 \|",
        world.text(2),
        re.MULTILINE,
    )


def test_one_process_needs_no_environment_at_all(start):
    world = start("--world-size=1", "--steps=3", ranks=1, RANK="", WORLD_SIZE="", LOCAL_RANK="")
    assert world.wait() == [0]
    assert steps_in(world.text(0)) == [1, 2, 3]


def test_ranks_find_each_other_through_a_file_when_no_address_is_given(start, tmp_path):
    world = start("--steps=2", f"--rendezvous-dir={tmp_path / 'rdv'}", ranks=4, SLURM_JOB_ID="77")
    assert world.wait() == [0, 0, 0, 0]
    assert steps_in(world.text(3)) == [1, 2]
    assert list((tmp_path / "rdv").iterdir()) == []


def test_evaluation_prints_what_megatron_prints(start):
    world = start("--steps=2", "--eval-interval=2", "--eval-seconds=0.05")
    assert world.wait() == [0, 0, 0]
    assert re.search(
        r"-{40,}\n\[default2\]: valid loss at iteration 2 \| lm loss value: \S+ \| lm loss PPL: \S+ \| \n"
        r"\[default2\]:-{40,}\n",
        world.text(2),
    )


def test_a_resumed_run_loses_no_step_and_repeats_none(start, tmp_path):
    saving = (f"--checkpoint-dir={tmp_path / 'ckpt'}", "--save-interval=4")
    first = start("--steps=100000", *saving)
    first.wait_for(r"successfully saved checkpoint at iteration +8 to")
    first.kill()
    saved = int((tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text())
    second = start(f"--steps={saved + 6}", *saving)
    assert second.wait() == [0, 0, 0]
    assert f"loading checkpoint from {tmp_path / 'ckpt'} at iteration {saved}\n" in second.text(0)
    assert steps_in(second.text(2)) == list(range(saved + 1, saved + 7))
    unbroken = start(f"--steps={saved + 6}", f"--checkpoint-dir={tmp_path / 'other'}")
    assert unbroken.wait() == [0, 0, 0]
    last = f"global_step{saved + 6}"
    assert shards_of(tmp_path / "ckpt" / last) == shards_of(tmp_path / "other" / last)


def test_an_incomplete_checkpoint_is_ignored_even_if_the_tracker_points_at_it(start, tmp_path):
    first = start("--steps=4", f"--checkpoint-dir={tmp_path}", "--save-interval=2")
    assert first.wait() == [0, 0, 0]
    (tmp_path / "global_step4" / "complete").unlink()
    second = start("--steps=5", f"--checkpoint-dir={tmp_path}")
    assert second.wait() == [0, 0, 0]
    assert "says iteration 4, the newest complete checkpoint is 2: using that" in second.text(0)
    assert steps_in(second.text(2)) == [3, 4, 5]


def test_a_checkpoint_with_a_lost_step_is_refused(start, tmp_path):
    assert start("--steps=3", f"--checkpoint-dir={tmp_path}").wait() == [0, 0, 0]
    shard = tmp_path / "global_step3" / "rank_001.json"
    shard.write_text(json.dumps({**json.loads(shard.read_text()), "checksum": 1}))
    world = start("--steps=5", f"--checkpoint-dir={tmp_path}")
    world.wait_for("a step was lost or done twice")
    assert world.processes[1].wait(5) == 1


def test_only_the_last_checkpoints_are_kept(start, tmp_path):
    world = start("--steps=8", f"--checkpoint-dir={tmp_path}", "--save-interval=2", "--keep-last=2")
    assert world.wait() == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == ["global_step6", "global_step8"]


def test_the_kill_switch_makes_all_ranks_save_the_same_step_and_exit_0(start, tmp_path):
    switch = tmp_path / "kill-77.0"
    template = f"--kill-switch-path={tmp_path}/kill-{{job_id}}.{{restart}}"
    world = start("--steps=100000", template, f"--checkpoint-dir={tmp_path}", SLURM_JOB_ID="77")
    world.wait_for(r"iteration +5/")
    switch.write_text("{}")
    assert world.wait() == [0, 0, 0]
    step = steps_in(world.text(2))[-1]
    assert f"exiting program at iteration {step}: kill switch {switch} found" in world.text(0)
    assert [shard["step"] for shard in shards_of(tmp_path / f"global_step{step}")] == [step] * 3
    assert (tmp_path / f"global_step{step}" / "complete").exists()
    assert switch.exists()


def test_a_stale_kill_switch_ends_the_run_before_its_first_step(start, tmp_path):
    (tmp_path / "kill").write_text("{}")
    world = start("--steps=5", SLURM_WATCHDOG_KILL_SWITCH=str(tmp_path / "kill"))
    assert world.wait() == [0, 0, 0]
    assert steps_in(world.text(2)) == []
    assert f"kill switch {tmp_path / 'kill'} found at start" in world.text(0)
    assert (tmp_path / "kill").exists()


def test_sigusr1_to_any_rank_saves_and_ends_the_run(start, tmp_path):
    world = start("--steps=100000", f"--checkpoint-dir={tmp_path}")
    world.wait_for(r"iteration +3/")
    world.processes[1].send_signal(signal.SIGUSR1)
    assert world.wait() == [0, 0, 0]
    assert "signal SIGUSR1 received by rank 1" in world.text(0)
    assert (tmp_path / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_leaves_the_others_waiting_without_a_word(start, dead):
    world = start("--steps=1000", f"--fault=die:rank={dead},step=3")
    assert world.processes[dead].wait(10) == 1
    time.sleep(0.7)
    assert world.alive() == [rank for rank in range(3) if rank != dead]
    assert steps_in(world.text(2)) == [1, 2]


def test_asked_to_the_others_stop_when_a_rank_dies(start):
    world = start("--steps=1000", "--abort-on-peer-death", "--fault=die:rank=1,step=3,signal=9")
    assert world.wait() == [1, -9, 1]
    assert "rank 1 left the group while rank 2 was in" in world.text(2)


def test_a_dataloader_hang_stops_the_steps_and_not_the_pulse(start, tmp_path):
    log = tmp_path / "log"
    world = start(
        "--steps=1000", "--fault=dataloader_hang:rank=1,step=4", "--pulse-seconds=0.1", f"--log={log}",
        "--run-name=tr11", SLURM_JOB_ID="1528763", SLURM_JOB_PARTITION="gpu_p5",
    )  # fmt: skip
    world.wait_for("fault injected: dataloader_hang in rank 1")
    pulses_before = log.read_text().count("PULSE")
    time.sleep(0.6)
    assert world.alive() == [0, 1, 2]
    assert steps_in(log.read_text()) == [1, 2, 3]
    assert log.read_text().count("PULSE") >= pulses_before + 3
    assert re.search(
        r"^\[[-0-9]+ [:0-9]+\] PULSE: tr11 is running for 00:00:0\d since [-0-9]+T[:0-9]+"
        r" \(1528763 on 'gpu_p5' partition \(\S+\)$",
        log.read_text(),
        re.MULTILINE,
    )


def test_a_hang_that_ends_loses_no_batch(start):
    world = start("--steps=8", "--fault=dataloader_hang:rank=1,step=4,seconds=0.4")
    assert world.wait() == [0, 0, 0]
    assert steps_in(world.text(2)) == list(range(1, 9))


def test_a_fault_that_fires_once_spares_the_restarted_run(start, tmp_path):
    arguments = (
        "--steps=6",
        f"--checkpoint-dir={tmp_path}",
        "--save-interval=2",
        "--fault=lock:rank=0,step=5",
    )
    first = start(*arguments)
    first.wait_for("fault injected: lock in rank 0")
    first.kill()
    second = start(*arguments)
    assert second.wait() == [0, 0, 0]
    assert steps_in(second.text(2)) == [5, 6]


def test_a_fault_file_is_taken_and_fires_at_the_next_step(start, tmp_path):
    world = start("--steps=100000", f"--fault-dir={tmp_path}")
    world.wait_for(r"iteration +2/")
    (tmp_path / "die.rank1").write_text("")
    assert world.processes[1].wait(10) == 1
    assert (tmp_path / "die.rank1.fired").exists()
    assert not (tmp_path / "die.rank1").exists()


def test_a_slow_rank_slows_the_world_and_a_nan_reaches_the_log(start):
    world = start("--steps=12", "--fault=slow:rank=0,step=7,factor=10", "--fault=nan:rank=1,step=11")
    assert world.wait() == [0, 0, 0]
    seconds = [float(text) for text in re.findall(r"per iteration \(s\): (\S+)", world.text(2))]
    assert min(seconds[6:]) >= 0.08 > max(seconds[2:6])
    losses = re.findall(r"lm loss: (\S+)", world.text(2))
    assert losses[10:] == ["NAN", "NAN"]
    assert "NAN" not in losses[:10]


def test_an_exception_is_printed_by_its_rank_and_the_others_stay(start):
    world = start("--steps=100", "--fault=exception:rank=1,step=2,error=cuda")
    assert world.processes[1].wait(10) == 1
    assert "RuntimeError: CUDA error: unspecified launch failure" in world.text(1)
    time.sleep(0.3)
    assert world.alive() == [0, 2]


def test_a_teardown_hang_comes_after_the_last_step_was_printed(start):
    world = start("--steps=3", "--fault=teardown_hang:rank=2")
    world.wait_for("fault injected: teardown_hang")
    time.sleep(0.3)
    assert world.alive() == [0, 1, 2]
    assert steps_in(world.text(2)) == [1, 2, 3]
    assert "[after training is done]" in world.text(0)


def test_dataloader_workers_die_with_their_rank(start):
    world = start("--steps=1000", "--fault=dataloader_hang:rank=1,step=2")
    world.wait_for("fault injected")
    rank_pid = world.processes[1].pid
    workers = Path(f"/proc/{rank_pid}/task/{rank_pid}/children").read_text().split()
    assert len(workers) == 1
    world.processes[1].kill()
    world.processes[1].wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{workers[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{workers[0]}").exists()


def test_a_killed_dataloader_worker_is_reported_as_torch_reports_it(start):
    world = start("--steps=1000")
    world.wait_for(r"iteration +2/")
    rank_pid = world.processes[1].pid
    os.kill(int(Path(f"/proc/{rank_pid}/task/{rank_pid}/children").read_text()), signal.SIGKILL)
    assert world.processes[1].wait(10) == 1
    assert re.search(r"RuntimeError: DataLoader worker \(pid \d+\) is killed by signal: Killed", world.text(1))


def test_a_wrong_fault_says_what_is_known(start):
    world = start("--world-size=1", "--fault=explode:rank=0", ranks=1)
    assert world.wait() == [2]
    assert "unknown kind 'explode'" in world.text(0)
    assert "dataloader_hang" in world.text(0)


@pytest.mark.parametrize(("nodes", "first"), [("n[1-3]", "n1"), ("gpu-[07,09-12]-ib,x1", "gpu-07-ib"), ("a,b", "a")])
def test_the_first_host_of_a_slurm_node_list_is_the_master(nodes, first):
    program = (
        f"import sys; sys.path.insert(0, {str(TRAINER.parent)!r}); import trainer; print(trainer.first_host({nodes!r}))"
    )
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == first
