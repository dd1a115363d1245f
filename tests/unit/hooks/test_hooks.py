"""slurm_watchdog_hooks without a framework: the switch is seen, all ranks agree, each callback ends its
framework's own way, and what the heartbeat says is read by the agent."""

from __future__ import annotations

import ast
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOOKS = Path(__file__).parents[3] / "hooks"
sys.path.insert(0, str(HOOKS))

from slurm_watchdog_hooks import Heartbeat, KillSwitch, Watchdog, agreement  # noqa: E402

from slurm_watchdog.agent.children.children import Children  # noqa: E402
from slurm_watchdog.agent.children.requests import ListMounts, WorkerState  # noqa: E402
from slurm_watchdog.agent.logs.follow import FollowLimits, FollowMemory  # noqa: E402
from slurm_watchdog.agent.logs.job_logs import JobLogs  # noqa: E402
from slurm_watchdog.base import clock  # noqa: E402
from slurm_watchdog.base.mounts import Mount  # noqa: E402
from slurm_watchdog.controller.state.progress_clock import LEFT_AFTER_S, apply_step, main_clock  # noqa: E402
from slurm_watchdog.model.observations import Event, EventKind, LogFile  # noqa: E402
from slurm_watchdog.model.protocol import JobWatch  # noqa: E402
from tests.builders.fake_children import looks  # noqa: E402
from tests.builders.requests import BY_NAME, tasks  # noqa: E402
from tools.packaging.build import make  # noqa: E402


@pytest.fixture(autouse=True)
def inside_of_job_77(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------- what it is made of


def test_every_module_runs_with_python_3_8_and_depends_on_nothing(checkout: Path) -> None:
    project = (checkout / "hooks/pyproject.toml").read_text()
    assert "dependencies = []" in project
    for path in sorted((HOOKS / "slurm_watchdog_hooks").glob("*.py")):
        ast.parse(path.read_text(), str(path), feature_version=(3, 8))
    assert not [name for name in sys.modules if name.startswith("watchdog") and "hooks" in name]


def test_wheel_and_source_archive_are_built_without_a_network(tmp_path: Path) -> None:
    files = make(["hooks"], tmp_path)
    assert [file.name.split("-")[0] for file in files] == ["slurm_watchdog_hooks", "slurm_watchdog_hooks"]
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    packed = zipfile.ZipFile(wheel)
    assert {name.split("/")[0].split("-")[0] for name in packed.namelist()} == {"slurm_watchdog_hooks"}
    about = packed.read(next(name for name in packed.namelist() if name.endswith("METADATA"))).decode()
    assert "Requires-Python: >=3.8" in about
    assert "Requires-Dist" not in about


# ---------------------------------------------------------------------------------------- the switch


def test_a_file_that_appears_is_seen_and_tells_why(tmp_path: Path) -> None:
    switch = KillSwitch(str(tmp_path / "kill"), poll_seconds=0.01)
    assert not switch.agreed()
    (tmp_path / "being-written").write_text('{"why": "n3 is slow"}\n')
    (tmp_path / "being-written").rename(tmp_path / "kill")  # as the watchdog writes it: never half a file
    until(switch.agreed)
    assert "n3 is slow" in switch.reason
    switch.clear()
    switch.clear()
    assert not (tmp_path / "kill").exists()


def test_a_file_counts_once_it_says_why_or_is_found_empty_twice(tmp_path: Path) -> None:
    def switch(name: str) -> KillSwitch:
        made = KillSwitch("")  # without a path it has no thread: the polls are those below
        made.path = str(tmp_path / name)
        return made

    written_late, empty = switch("written late"), switch("empty")
    for found in (written_late, empty):
        Path(found.path).touch()
        found._poll()
        assert not found.reason
    Path(written_late.path).write_text("n3 is slow\n")
    written_late._poll()
    empty._poll()
    assert (written_late.reason, empty.reason) == ("n3 is slow", empty.path)


def test_a_file_left_over_from_an_earlier_run_is_ignored_until_it_is_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kill").write_text("of last week\n")
    switch = KillSwitch(str(tmp_path / "kill"), poll_seconds=0.01)
    time.sleep(0.1)
    assert not switch.agreed()
    assert "is ignored" in capsys.readouterr().err
    (tmp_path / "new").write_text("now\n")
    (tmp_path / "new").rename(tmp_path / "kill")
    until(switch.agreed)


def test_a_file_whose_path_names_this_very_run_counts_although_it_was_there_first(tmp_path: Path) -> None:
    place = tmp_path / "77.0"
    place.mkdir()
    (place / "kill").write_text("raised while the trainer was still importing\n")
    until(KillSwitch(str(place / "kill"), poll_seconds=0.01).agreed)


def test_a_signal_counts_like_the_file_and_a_handler_that_was_there_is_still_called() -> None:
    called = []
    signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    switch = KillSwitch("", poll_seconds=0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
    until(switch.agreed)
    assert called == [signal.SIGUSR1]
    assert "signal" in switch.reason


# ---------------------------------------------------------------------------------------- all ranks together


class Tensor:
    def __init__(self, values: list[int]):
        self.value = values[0]

    def item(self) -> int:
        return self.value


class Group:
    """torch.distributed of some ranks, each a thread: the n-th all_reduce of one is the n-th of all."""

    def __init__(self, ranks: int):
        self._here = [queue.SimpleQueue[int]() for _ in range(ranks)]
        self.calls = [0] * ranks

    def of(self, rank: int) -> types.ModuleType:
        distributed: Any = types.ModuleType("torch.distributed")
        distributed.get_backend = lambda: "gloo"
        distributed.group = types.SimpleNamespace(WORLD="world")
        distributed.ReduceOp = types.SimpleNamespace(MAX="max")

        def all_reduce(tensor: Tensor, **_: Any) -> Any:
            self.calls[rank] += 1
            for place in self._here:
                place.put(tensor.value)
            mine = self._here[rank]

            def wait() -> None:
                tensor.value = max(mine.get(timeout=10) for _ in self._here)

            return types.SimpleNamespace(wait=wait)

        distributed.all_reduce = all_reduce
        return distributed  # type: ignore[no-any-return]


class InStep(agreement.Torch):  # type: ignore[misc, unused-ignore]
    """The real agreement with a `torch.distributed` of its own: the ranks are threads here."""

    def __init__(self, distributed: Any):
        super().__init__("world")
        self._distributed = distributed

    def _ask(self, seen: bool) -> None:
        flag = Tensor([int(seen)])
        self._asked = (self._distributed.all_reduce(flag), flag)


@pytest.mark.parametrize("seen_by", [0, 1])
@pytest.mark.parametrize("every", [1, 3])
def test_ranks_leave_after_the_same_step_whoever_saw_the_switch(seen_by: int, every: int) -> None:
    group, lock = Group(2), threading.Barrier(2)
    left: dict[int, int] = {}

    def rank(number: int) -> None:
        switch = KillSwitch("", signals=(), every=every, agreement=InStep(group.of(number)))
        for step in range(100):
            lock.wait(10)  # a step of the training ends on all ranks
            if step == 7 and number == seen_by:
                switch.reason = "the file"
            if switch.agreed():
                left[number] = step
                return

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert left.keys() == {0, 1}
    assert left[0] == left[1]
    assert 7 < left[0] <= 7 + 2 * every
    assert group.calls[0] == group.calls[1], "nothing is asked any more once all have agreed"


def test_the_real_torch_call_is_asked_for_at_one_step_and_read_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distributed: Any = Group(1).of(0)
    distributed.is_available = distributed.is_initialized = lambda: True
    distributed.get_world_size = lambda: 2
    torch: Any = types.ModuleType("torch")
    torch.tensor, torch.int32 = lambda values, dtype: Tensor(values), None
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    switch = KillSwitch("", signals=())
    assert not switch.agreed()
    switch.reason = "signal 10"
    assert [switch.agreed() for _ in range(2)] == [False, True]


def test_jax_processes_gather_their_flags_every_twentieth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def process_allgather(flags: list[int]) -> list[int]:
        asked.append(flags[0])
        return [flags[0], int(len(asked) == 2)]

    for name in ("torch.distributed", "jax", "jax.experimental", "numpy"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.delitem(sys.modules, "torch.distributed")
    jax: Any = sys.modules["jax"]
    jax.process_count = lambda: 2
    experimental: Any = sys.modules["jax.experimental"]
    experimental.multihost_utils = types.SimpleNamespace(process_allgather=process_allgather)
    numpy: Any = sys.modules["numpy"]
    numpy.array, numpy.max = list, max
    switch = KillSwitch("", signals=())
    assert [step for step in range(1, 41) if switch.agreed()] == [40]
    assert asked == [0, 0]


# ---------------------------------------------------------------------------------------- the heartbeat


def test_a_heartbeat_holds_the_newest_step_as_one_line_of_json(tmp_path: Path) -> None:
    place = tmp_path / "77.0" / "heartbeat"
    beat = Heartbeat(str(place))
    beat.report(step=3, total=90, loss=2.5)  # nobody has made the directory yet
    time.sleep(0.05)
    place.parent.mkdir()
    until(lambda: (beat.report(step=4, loss=float("nan")), place.exists())[1])
    line = json.loads(place.read_text())
    assert (line["step"], line["total_steps"], line["phase"], line["loss"], line["pid"]) == (
        4, 90, "training", "nan", os.getpid(),
    )  # fmt: skip
    assert [path.name for path in place.parent.iterdir()] == ["heartbeat"], "and nothing beside it"


@pytest.mark.parametrize("rank", ["1", "17"])
def test_only_the_first_rank_writes_and_without_a_path_nobody_does(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "SLURM_PROCID"):
        monkeypatch.setenv(variable, rank)
        beat = Heartbeat(str(tmp_path / "heartbeat"))
        beat.report(step=1)
        assert beat._thread is None
        monkeypatch.delenv(variable)
    monkeypatch.setenv("RANK", "0")
    beat = Heartbeat()
    beat.report(step=1)
    assert beat._thread is None


class Raises:
    def __float__(self) -> float:
        raise RuntimeError("a tensor of a device that is lost")


def test_nothing_that_is_reported_raises_and_a_loss_on_a_device_is_not_waited_for(tmp_path: Path) -> None:
    beat = Heartbeat(str(tmp_path / "no" / "such" / "heartbeat"), writes=True)
    beat.report(step="x", loss=Raises())
    on_gpu = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))
    beat.report(step=2, loss=on_gpu)
    assert (beat._now["step"], beat._now["loss"]) == (2, None)


# ---------------------------------------------------------------------------------------- callbacks


class Base:
    """What each framework's callback class is to its subclasses."""


def framework(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    setattr(sys.modules[module], name, Base)


def load(name: str) -> Any:
    sys.modules.pop(f"slurm_watchdog_hooks.{name}", None)
    return importlib.import_module(f"slurm_watchdog_hooks.{name}")


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the places that the agent names."""
    monkeypatch.setenv("SLURM_WATCHDOG_KILL_SWITCH", str(tmp_path / "kill"))
    monkeypatch.setenv("SLURM_WATCHDOG_HEARTBEAT", str(tmp_path / "heartbeat"))
    return tmp_path


def test_a_loop_of_ones_own_ends_after_the_step_and_reports_its_phases(given: Path) -> None:
    watchdog = Watchdog(total=1000, poll_seconds=0.01)
    made = []
    for step in watchdog.steps(5, 1000):
        made.append(step)
        watchdog.report(step, loss=1.0)
        if step == 8:
            with watchdog.phase("evaluating"):
                assert watchdog.heartbeat._now["phase"] == "evaluating"
        if step == 10:
            (given / "kill").write_text("now\n")
            until(lambda: watchdog.switch.reason)
    assert (made[0], made[-1], watchdog.leaving) == (5, 10, True)
    until((given / "heartbeat").exists)


def test_hugging_face_saves_and_stops_at_the_step(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    framework(monkeypatch, "transformers", "TrainerCallback")
    callback = load("huggingface").WatchdogCallback(poll_seconds=0.01)
    state = types.SimpleNamespace(global_step=0, max_steps=100, is_world_process_zero=True)
    control = types.SimpleNamespace(should_save=False, should_training_stop=False)
    callback.on_train_begin(None, state, control)
    state.global_step = 1
    callback.on_step_end(None, state, control)
    callback.on_log(None, state, control, logs={"loss": 2.0})
    callback.on_prediction_step(None, state, control)
    assert callback._watchdog.heartbeat._now == {
        "step": 1, "total_steps": 100, "phase": "evaluating", "loss": 2.0,
    }  # fmt: skip
    assert (control.should_save, control.should_training_stop) == (False, False)
    callback._watchdog.switch.reason = "now"
    callback.on_step_end(None, state, control)
    callback.on_save(None, state, control)
    assert (control.should_save, control.should_training_stop) == (True, True)


def test_lightning_saves_a_whole_checkpoint_and_stops(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework(monkeypatch, "lightning.pytorch.callbacks", "Callback")
    hooks = load("lightning")
    callback = hooks.WatchdogCallback(str(tmp_path), poll_seconds=0.01)
    saved: list[str] = []

    def save_checkpoint(path: str) -> None:
        saved.append(Path(path).name)
        Path(path).touch()

    trainer = types.SimpleNamespace(
        max_steps=-1, global_step=7, is_global_zero=True, should_stop=False, save_checkpoint=save_checkpoint
    )
    callback.on_train_start(trainer, None)
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert saved == []
    callback._watchdog.switch.reason = "now"
    for _ in range(2):
        callback.on_train_batch_end(trainer, None, None, None, 0)
    assert (saved, trainer.should_stop) == (["kill-switch-step=7.ckpt.partial"], True)
    assert hooks.last_checkpoint(str(tmp_path)) == str(tmp_path / "kill-switch-step=7.ckpt")


def test_deepspeed_saves_on_an_optimizer_step_and_never_between(given: Path) -> None:
    class Engine:
        global_steps = 4
        micro = 0
        saved: list[Any] = []  # noqa: RUF012

        def step(self) -> str:
            self.micro += 1
            self.global_steps += self.micro % 2 == 0
            return "made"

        def save_checkpoint(self, directory: str, tag: str, client_state: dict[str, Any]) -> None:
            self.saved.append((directory, tag, client_state))

    engine = load("deepspeed").watch(Engine(), "ckpt", client_state=lambda: {"seed": 3}, poll_seconds=0.01)
    (given / "kill").write_text("now\n")
    until(lambda: [each for each in threading.enumerate() if each.name == "kill-switch"] and time.sleep(0.1) is None)
    assert engine.step() == "made"
    with pytest.raises(SystemExit) as ended:
        engine.step()
    assert (ended.value.code, engine.saved) == (0, [("ckpt", "step5", {"seed": 3, "step": 5})])


def test_composer_is_stopped_after_the_batch(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    framework(monkeypatch, "composer.core", "Callback")
    callback = load("composer").WatchdogCallback(poll_seconds=0.01)
    stopped: list[int] = []
    state = types.SimpleNamespace(timestamp=types.SimpleNamespace(batch=9), stop_training=lambda: stopped.append(9))
    callback.fit_start(state, None)
    callback.batch_end(state, None)
    callback.eval_start(state, None)
    assert callback._watchdog.heartbeat._now["phase"] == "evaluating"
    callback.eval_end(state, None)
    assert stopped == []
    callback._watchdog.switch.reason = "now"
    callback.batch_end(state, None)
    assert stopped == [9]


def test_keras_saves_the_model_and_stops_and_counts_steps_over_epochs(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework(monkeypatch, "keras.callbacks", "Callback")
    callback = load("keras").WatchdogCallback("model.keras", poll_seconds=0.01)
    saved: list[str] = []
    callback.params = {"steps": 10, "epochs": 3}
    callback.model = types.SimpleNamespace(save=saved.append, stop_training=False)
    callback.on_train_begin()
    callback.on_epoch_begin(2)
    callback.on_train_batch_end(4, {"loss": 0.5})
    assert callback._watchdog.heartbeat._now == {
        "step": 25, "total_steps": 30, "phase": "training", "loss": 0.5,
    }  # fmt: skip
    callback._watchdog.switch.reason = "now"
    for batch in (5, 6):
        callback.on_train_batch_end(batch, {})
    assert (saved, callback.model.stop_training) == (["model.keras"], True)


def test_jax_has_the_loop_s_watchdog(given: Path) -> None:
    watchdog = load("jax").Watchdog(total=10, poll_seconds=0.01)
    assert not watchdog.step(1)
    watchdog.switch.reason = "now"
    assert watchdog.step(2) and watchdog.step(3)


# ---------------------------------------------------------------------------------------- what the agent makes of it


def follow_impatiently(fields: Any, worker: WorkerState) -> Any:
    """The real one; a file that is new is found at once."""
    worker.memory(FollowMemory).limits = FollowLimits(expand_every_s=0.0)
    return BY_NAME["follow"].do(fields, worker)


def test_the_agent_reads_the_heartbeat_of_this_run_step_by_step_and_its_phases(tmp_path: Path) -> None:
    """Real lines of the hook, read by the agent's collector of logs through its own child."""
    run = tmp_path / "4.0 [of mine]"
    run.mkdir()
    probes = Children(tasks(follow=follow_impatiently, list_mounts=nothing, list_open_files=nothing))
    logs = JobLogs(looks(probes), (Mount("/", "ext4", "/dev/sda1"),), "n1", (), become_owner=False)
    logs.here.hear([JobWatch(job_id="4", restarts=0, uid=os.getuid())])
    environs = {"4": {"SLURM_WATCHDOG_HEARTBEAT": str(run / "heartbeat")}}
    beat = Heartbeat(str(run / "heartbeat"), writes=True)
    events: list[Event] = []

    def look(condition: Any = lambda: True) -> tuple[LogFile, ...]:
        for _ in range(300):
            probes.poll(clock.monotonic())  # as each tick does: an answer that came late
            rows, new, _ = logs.collect(clock.monotonic(), (), environs, 10.0)
            # A phase is in every report while it lasts.
            events.extend(
                each for each in new if (each.line, each.step) not in [(before.line, before.step) for before in events]
            )
            if condition():
                return rows
            time.sleep(0.02)
        raise AssertionError(events)

    def say(**values: Any) -> None:
        beat._now.update(values)
        beat.write()

    try:
        assert look() == (), "a training without hooks has no row, and no error"
        say(step=3, total_steps=90, phase="training", loss=2.5)
        look(lambda: events)
        say(step=4, loss="nan")
        look(lambda: len(events) == 2)
        say(phase="checkpointing")
        look(lambda: len(events) == 3)
        (run / "new").write_text("{\x00 no heartbeat \n")
        (run / "new").rename(run / "heartbeat")
        look()
        say(step=5, phase="training", loss=1.0)
        look(lambda: len(events) == 4)
    finally:
        probes.close()
    assert [(each.kind, each.pattern, each.step, each.total_steps, each.loss, each.phase) for each in events] == [
        (EventKind.PROGRESS, "heartbeat", 3, 90, 2.5, None),
        (EventKind.PROGRESS, "heartbeat", 4, 90, None, None),
        (EventKind.PHASE, "heartbeat_checkpointing", None, None, None, "checkpointing"),
        (EventKind.PROGRESS, "heartbeat", 5, 90, 1.0, None),
    ]  # fmt: skip
    assert events[1].loss_is_no_number


def nothing(fields: Any, worker: Any) -> Any:
    return [] if isinstance(fields, ListMounts) else {}


def test_the_heartbeat_is_believed_before_every_other_count_until_it_is_left() -> None:
    clocks: dict[Any, Any] = {}

    def count(step: int, at: float, pattern: str = "heartbeat") -> None:
        event = Event(kind=EventKind.PROGRESS, job_id="7", source=pattern, age_s=0.0, pattern=pattern, step=step)
        apply_step(clocks, event, at)

    for at in range(40):
        count(1000 + at, float(at), "megatron")
    count(7, 40.0)
    main = main_clock(clocks)
    assert main is not None and main.step == 1039, "one line alone may be of a run that is over"
    count(8, 41.0)
    main = main_clock(clocks)
    assert main is not None and main.step == 8
    count(1040, 41.0 + LEFT_AFTER_S + 1, "megatron")
    main = main_clock(clocks)
    assert main is not None and main.step == 1040
