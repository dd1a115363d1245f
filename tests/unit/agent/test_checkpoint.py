"""Checkpoints as they lie on disk: every layout in a real directory, whole, half written, left over,
replaced, in masses."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.checkpoints import files
from slurm_watchdog.agent.checkpoints.files import SETTLES_S, resolve
from slurm_watchdog.agent.children.answers import Footprints, ScannedPlace
from slurm_watchdog.agent.children.children import Answer, Children
from slurm_watchdog.agent.children.requests import ScanCheckpoints
from slurm_watchdog.agent.collectors.checkpoint import CACHED_S, MAX_MOVES, SOON_S, CheckpointSchedule
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.base import loop
from slurm_watchdog.base.mounts import Mount
from slurm_watchdog.model.observations import Checkpoint, Event
from slurm_watchdog.model.protocol import JobWatch
from tests.builders.fake_children import looks
from tests.builders.requests import answer_to


def put(path: Path, data: bytes | str = b"x" * 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def put_zip(path: Path, size: int = 1000, cut: int = 0) -> Path:
    """A file as torch.save writes it; `cut` bytes of its end are still missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\0" * size)
    os.truncate(path, path.stat().st_size - cut)
    return path


def put_safetensors(path: Path, missing: int = 0) -> Path:
    header = json.dumps({"a": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]}}).encode()
    return put(path, struct.pack("<Q", len(header)) + header + bytes(100 - missing))


def age(path: Path, seconds: float) -> None:
    """Makes a file or directory look as if nobody had written to it for so long."""
    for each in (path, *path.rglob("*")) if path.is_dir() else (path,):
        then = each.stat().st_mtime - seconds
        os.utime(each, (then, then))


@dataclass
class Place:
    """One directory, looked at again and again."""

    path: Path
    before: Footprints | None = None
    pause_s: float = 0.0
    """So much time has passed between two looks, by what they remember."""

    def look(self, budget_s: float = 10.0, others: tuple[Path, ...] = ()) -> ScannedPlace:
        if self.before is not None:
            rows = self.before.items()
            self.before = {path: replace(row, since=row.since - self.pause_s) for path, row in rows}
        places = [("directory", "7", str(self.path), self.before)]
        (row,) = answer_to(ScanCheckpoints("/", [str(each) for each in others], budget_s, places))
        assert isinstance(row, ScannedPlace)
        self.before = row.memory
        return row

    def steps(self) -> tuple[int | None, int | None, bool]:
        """The newest complete one, the one that is being written, and whether it grows."""
        row = self.look()
        return row.step, row.writing_step, row.writing


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_checkpoint_that_is_not_the_job_owners_is_told_apart(place: Place) -> None:
    megatron_begin(place.path, 100)
    megatron_end(place.path, 100)
    assert not place.look().foreign
    os.chown(place.path / "iter_0000100", 12345, -1)
    row = place.look()
    assert (row.step, row.foreign) == (100, True)


# ------------------------------------------------------------------------------------------ layouts, step by step

Maker = Callable[[Path, int], None]


def megatron_begin(path: Path, step: int) -> None:
    put(path / f"iter_{step:07d}" / "mp_rank_00" / "model_optim_rng.pt")


def megatron_end(path: Path, step: int) -> None:
    put(path / "latest_checkpointed_iteration.txt", f"{step}")


def megatron_dist_begin(path: Path, step: int) -> None:
    put(path / f"iter_{step:07d}" / "__0_0.distcp")


def megatron_dist_end(path: Path, step: int) -> None:
    put(path / f"iter_{step:07d}" / "metadata.json", "{}")


def deepspeed_begin(path: Path, step: int) -> None:
    put(path / f"global_step{step}" / "mp_rank_00_model_states.pt")


def deepspeed_end(path: Path, step: int) -> None:
    put(path / "latest", f"global_step{step}")


def dcp_begin(path: Path, step: int) -> None:
    put(path / f"step-{step}" / "__0_0.distcp")
    put(path / f"step-{step}" / ".metadata.tmp")


def dcp_end(path: Path, step: int) -> None:
    os.rename(path / f"step-{step}" / ".metadata.tmp", path / f"step-{step}" / ".metadata")


def lingua_begin(path: Path, step: int) -> None:
    put(path / f"{step:010d}" / "__0_0.distcp")


def lingua_end(path: Path, step: int) -> None:
    put(path / f"{step:010d}" / ".metadata")


def huggingface_begin(path: Path, step: int) -> None:
    put_safetensors(path / f"checkpoint-{step}" / "model.safetensors")
    put(path / f"checkpoint-{step}" / "optimizer.pt")
    put(path / f"checkpoint-{step}" / "trainer_state.json", '{"global_st')


def huggingface_end(path: Path, step: int) -> None:
    put(path / f"checkpoint-{step}" / "trainer_state.json", json.dumps({"global_step": step}) + "\n")


def lightning_begin(path: Path, step: int) -> None:
    put_zip(path / f"epoch=0-step={step}.ckpt", cut=30)


def lightning_end(path: Path, step: int) -> None:
    put_zip(path / f"epoch=0-step={step}.ckpt")


def fsdp_begin(path: Path, step: int) -> None:
    put(path / f"epoch=0-step={step}.ckpt" / "__0_0.distcp")


def fsdp_end(path: Path, step: int) -> None:
    put(path / f"epoch=0-step={step}.ckpt" / "meta.pt")


def nemo_begin(path: Path, step: int) -> None:
    put(path / f"gpt--step={step}-unfinished", "")
    put(path / f"gpt--step={step}" / "weights" / "__0_0.distcp")
    put(path / f"gpt--step={step}" / "weights" / "metadata.json", "{}")


def nemo_end(path: Path, step: int) -> None:
    (path / f"gpt--step={step}-unfinished").unlink()


def composer_begin(path: Path, step: int) -> None:
    put_zip(path / f"ep1-ba{step}-rank0.pt")
    put_zip(path / f"ep1-ba{step}-rank1.pt", cut=1)


def composer_end(path: Path, step: int) -> None:
    put_zip(path / f"ep1-ba{step}-rank1.pt")
    (path / "latest-rank0.pt").unlink(missing_ok=True)
    (path / "latest-rank0.pt").symlink_to(f"ep1-ba{step}-rank0.pt")


def composer_shards_begin(path: Path, step: int) -> None:
    put(path / f"ep1-ba{step}" / "__0_0.distcp")


def composer_shards_end(path: Path, step: int) -> None:
    put(path / f"ep1-ba{step}" / ".metadata")


def orbax_begin(path: Path, step: int) -> None:
    put(path / f"{step}.orbax-checkpoint-tmp-17" / "default" / "_METADATA")
    put(path / f"{step}.orbax-checkpoint-tmp-17" / "_CHECKPOINT_METADATA")


def orbax_end(path: Path, step: int) -> None:
    os.rename(path / f"{step}.orbax-checkpoint-tmp-17", path / f"{step}")


def plain_begin(path: Path, step: int) -> None:
    put_zip(path / f"step_{step}.pt", cut=500)


def plain_end(path: Path, step: int) -> None:
    put_zip(path / f"step_{step}.pt")


def safetensors_begin(path: Path, step: int) -> None:
    put_safetensors(path / f"model_{step}.safetensors", missing=1)


def safetensors_end(path: Path, step: int) -> None:
    put_safetensors(path / f"model_{step}.safetensors")


LAYOUTS: list[tuple[str, Maker, Maker]] = [
    ("megatron", megatron_begin, megatron_end),
    ("megatron", megatron_dist_begin, megatron_dist_end),
    ("deepspeed", deepspeed_begin, deepspeed_end),
    ("dcp", dcp_begin, dcp_end),
    ("dcp", lingua_begin, lingua_end),
    ("huggingface", huggingface_begin, huggingface_end),
    ("lightning", lightning_begin, lightning_end),
    ("lightning", fsdp_begin, fsdp_end),
    ("nemo", nemo_begin, nemo_end),
    ("composer", composer_begin, composer_end),
    ("composer", composer_shards_begin, composer_shards_end),
    ("orbax", orbax_begin, orbax_end),
    ("plain", plain_begin, plain_end),
    ("plain", safetensors_begin, safetensors_end),
]
NAMES = [begin.__name__.removesuffix("_begin") for _, begin, _ in LAYOUTS]


@pytest.mark.parametrize(("layout", "begin", "end"), LAYOUTS, ids=NAMES)
def test_a_checkpoint_counts_when_it_is_complete_and_not_before(
    place: Place, layout: str, begin: Maker, end: Maker
) -> None:
    place.look()
    begin(place.path, 1000)
    assert place.steps()[0] is None
    end(place.path, 1000)
    row = place.look()
    assert (row.layout, row.step, row.writing, row.writing_step) == (layout, 1000, False, None)
    assert row.error is None
    assert str(place.path) in str(row.path)
    assert (row.size_bytes or 0) > 0
    assert row.age_s is not None
    assert 0 <= row.age_s < 60
    begin(place.path, 2000)
    assert place.steps() == (1000, 2000, True)
    end(place.path, 2000)
    assert place.steps() == (2000, None, False)


@pytest.mark.parametrize(("layout", "begin", "end"), LAYOUTS, ids=NAMES)
def test_a_leftover_of_a_crash_is_neither_complete_nor_being_written(
    place: Place, layout: str, begin: Maker, end: Maker
) -> None:
    begin(place.path, 1000)
    end(place.path, 1000)
    begin(place.path, 2000)
    assert place.steps() == (1000, 2000, False), "at the first look nobody knows whether it grows"
    age(place.path, 86400)
    place.before = None
    assert [place.steps() for _ in range(3)] == [(1000, 2000, False)] * 3


@pytest.mark.parametrize(("layout", "begin", "end"), LAYOUTS, ids=NAMES)
def test_a_run_below_the_directory_is_found(place: Place, layout: str, begin: Maker, end: Maker) -> None:
    for run, step in (("old", 5000000), ("new", 1000000)):
        begin(place.path / run, step)
        end(place.path / run, step)
        put(place.path / run / "tensorboard" / "events")
    age(place.path / "old", 3600)
    row = place.look()
    assert (row.layout, row.step) == (layout, 1000000)
    assert str(place.path / "new") in str(row.path)


@pytest.mark.parametrize(("layout", "begin", "end"), LAYOUTS, ids=NAMES)
def test_rotation_leaves_the_newest(place: Place, layout: str, begin: Maker, end: Maker) -> None:
    for step in range(300, 1000, 100):
        begin(place.path, step)
        end(place.path, step)
        for old in place.path.glob(f"*{step - 200}*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        assert place.steps()[0] == step


# ------------------------------------------------------------------------------------------------- what goes wrong


def test_an_empty_and_a_missing_directory(place: Place) -> None:
    row = place.look()
    assert (row.layout, row.step, row.error) == (None, None, None)
    row = Place(place.path / "none").look()
    assert str(row.error).startswith("ENOENT")
    row = Place(put(place.path / "file")).look()
    assert str(row.error).startswith("ENOTDIR")


def test_a_tracker_that_names_a_step_that_is_not_there_is_told_and_the_rest_counts(place: Place) -> None:
    megatron_begin(place.path, 1000)
    megatron_end(place.path, 2000)
    row = place.look()
    assert row.step == 1000
    assert row.error == f"{place.path}/latest_checkpointed_iteration.txt says 2000, which is not there"


@pytest.mark.parametrize("text", ["garbage", "", "-5", "1e9", "9" * 30, "\0\0\0", "12\n13"])
def test_garbage_in_a_tracker_proves_nothing(place: Place, text: str) -> None:
    megatron_begin(place.path, 1000)
    put(place.path / "latest_checkpointed_iteration.txt", text)
    row = place.look()
    assert row.step is None
    assert "says no step" in str(row.error)


def test_a_release_is_no_step(place: Place) -> None:
    put(place.path / "release" / "mp_rank_00" / "model_optim_rng.pt")
    put(place.path / "latest_checkpointed_iteration.txt", "release")
    row = place.look()
    assert (row.step, row.error) == (None, None)


def test_a_name_of_the_trainers_own_that_deepspeed_tracks_is_a_checkpoint_without_a_step(
    place: Place,
) -> None:
    put(place.path / "after-warmup" / "mp_rank_00_model_states.pt")
    put(place.path / "logs" / "x")
    assert place.look().path is None
    put(place.path / "latest", "after-warmup")
    row = place.look()
    assert (row.layout, row.step, row.path) == ("deepspeed", None, f"{place.path}/after-warmup")
    put(place.path / "latest", "../after-warmup")
    assert place.look().path is None


def test_a_tracker_that_was_set_back_is_what_the_trainer_resumes_from(place: Place) -> None:
    for step in range(1000, 30000, 1000):
        megatron_begin(place.path, step)
    megatron_end(place.path, 29000)
    assert place.steps()[0] == 29000
    megatron_end(place.path, 3000)
    row = place.look()
    assert (row.step, row.writing, row.error) == (3000, False, None)


def test_names_that_only_look_like_checkpoints(place: Place) -> None:
    huggingface_begin(place.path, 500)
    huggingface_end(place.path, 500)
    for name in ("checkpoint-best", "checkpoint--900", "checkpoint-1e9", "checkpoint-" + "9" * 40):
        put(place.path / name / "trainer_state.json", "{}")
    megatron_begin(place.path, 1000)
    os.rename(place.path / "iter_0001000", place.path / "iter_0001000.tmp")
    assert place.look().step == 500


def test_a_date_is_no_step_and_a_run_in_it_is_found(place: Place) -> None:
    put(place.path / "20240101" / "config.yaml")
    assert place.steps() == (None, None, False)
    dcp_begin(place.path / "20240101", 70)
    dcp_end(place.path / "20240101", 70)
    assert place.steps() == (70, None, False)


def test_two_layouts_in_one_directory_the_one_completed_last_counts(place: Place) -> None:
    megatron_begin(place.path, 9000)
    megatron_end(place.path, 9000)
    age(place.path, 3600)
    huggingface_begin(place.path, 100)
    huggingface_end(place.path, 100)
    row = place.look()
    assert (row.layout, row.step) == ("huggingface", 100)
    megatron_begin(place.path, 9100)
    age(place.path / "checkpoint-100", 5)
    megatron_end(place.path, 9100)
    assert place.look().layout == "megatron"


def test_a_directory_that_was_replaced_is_looked_at_anew(place: Place) -> None:
    inner = Place(place.path / "ckpt")
    dcp_begin(inner.path, 500)
    dcp_end(inner.path, 500)
    assert inner.steps()[0] == 500
    shutil.rmtree(inner.path)
    assert str(inner.look().error).startswith("ENOENT")
    dcp_begin(inner.path, 7)
    dcp_end(inner.path, 7)
    assert inner.steps()[0] == 7


def test_one_file_written_over_and_over_is_a_checkpoint_without_a_step(place: Place) -> None:
    file = put_zip(place.path / "ckpt.pt")
    age(file, 100)
    first = place.look()
    assert (first.layout, first.step, first.path) == ("plain", None, str(file))
    put_zip(file, size=5000, cut=3000)
    row = place.look()
    assert (row.path, row.writing, row.writing_step) == (None, True, None)
    put_zip(file, size=5000)
    row = place.look()
    assert (row.path, row.writing) == (str(file), False)
    assert row.at_ns > first.at_ns


def test_a_file_of_an_unknown_format_is_complete_when_it_does_not_change_any_more(place: Place) -> None:
    place.pause_s = SETTLES_S
    place.look()
    file = put(place.path / "step_5.pkl")
    assert place.steps() == (None, 5, True)
    put(file, b"y" * 500)
    assert place.steps() == (None, 5, True)
    assert place.steps() == (5, None, False)
    assert place.steps() == (5, None, False)
    place.before = None
    assert place.steps() == (None, 5, False), "fresh, and never seen before"
    age(file, 86400)
    place.before = None
    assert place.steps() == (5, None, False)


def test_a_directory_of_an_unknown_layout_settles_but_not_with_a_file_that_is_cut_short(place: Place) -> None:
    place.pause_s = SETTLES_S
    put_zip(place.path / "step_5" / "model.pt", cut=10)
    assert [place.steps()[0] for _ in range(3)] == [None, None, None]
    put_zip(place.path / "step_5" / "model.pt")
    assert [place.steps() for _ in range(2)] == [(None, 5, True), (5, None, False)]
    assert place.look().layout == "plain"


def test_what_does_not_change_between_two_quick_looks_has_not_settled(place: Place) -> None:
    put(place.path / "step_5.pkl")
    assert [place.steps()[0] for _ in range(5)] == [None] * 5
    place.pause_s = SETTLES_S
    assert place.steps()[0] == 5


def test_what_had_settled_before_the_first_look_stays_so(place: Place) -> None:
    age(put(place.path / "step_5.pkl"), 86400)
    assert [place.steps() for _ in range(3)] == [(5, None, False)] * 3


def test_of_two_files_without_a_number_the_one_written_last_counts(place: Place) -> None:
    age(put_zip(place.path / "last.pt"), 100)
    put_zip(place.path / "ckpt.pt")
    assert place.look().path == str(place.path / "ckpt.pt")
    age(place.path / "ckpt.pt", 200)
    assert place.look().path == str(place.path / "last.pt")


def test_a_date_beside_checkpoints_is_no_checkpoint_that_is_being_written(place: Place) -> None:
    dcp_begin(place.path, 5)
    dcp_end(place.path, 5)
    place.look()
    put(place.path / "20240101" / "train.log")
    assert place.steps() == (5, None, False)


def test_nothing_is_followed_through_links(place: Place, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    dcp_begin(elsewhere, 900)
    dcp_end(elsewhere, 900)
    (place.path / "step-900").symlink_to(elsewhere / "step-900")
    (place.path / "step-901").symlink_to("nowhere")
    (place.path / "latest").symlink_to("/dev/zero")
    (place.path / "latest_checkpointed_iteration.txt").symlink_to("/proc/self/status")
    (place.path / "run").symlink_to(elsewhere)
    put(place.path / "step-5" / "__0_0.distcp")
    (place.path / "step-5" / ".metadata").symlink_to(elsewhere / "step-900" / ".metadata")
    os.mkfifo(place.path / "step_6.pt")
    os.mkfifo(place.path / "ckpt.pt")
    assert place.steps() == (None, 5, False)


def test_another_mount_below_is_not_touched(place: Place) -> None:
    dcp_begin(place.path, 1)
    dcp_end(place.path, 1)
    dcp_begin(place.path, 2)
    dcp_end(place.path, 2)
    assert place.look(others=(place.path / "step-2",)).step == 1
    row = Place(place.path / "step-2").look(others=(place.path / "step-2",))
    assert row.moved == str(place.path / "step-2")


def test_a_name_that_leads_to_another_mount_is_told_and_not_followed(tmp_path: Path) -> None:
    mount, away = f"{tmp_path}/mine", f"{tmp_path}/away"
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "to_away").symlink_to(away)
    (tmp_path / "mine" / "to_deep").symlink_to(f"{mount}/deep")
    (tmp_path / "mine" / "up").symlink_to("../away")
    (tmp_path / "mine" / "round").symlink_to("round")
    assert resolve(f"{mount}/deep/.", mount) == (f"{mount}/deep", True)
    assert resolve(f"{mount}/to_deep", mount) == (f"{mount}/deep", True)
    assert resolve(mount, mount) == (mount, True)
    assert resolve(f"{mount}/to_away/x/y", mount) == (f"{away}/x/y", False)
    assert resolve(f"{mount}/up/x", mount) == (f"{tmp_path}/away/x", False)
    assert resolve(f"{mount}/deep", mount, frozenset({f"{mount}/deep"})) == (f"{mount}/deep", False)
    assert resolve(f"{mount}/to_deep/x", mount, frozenset({f"{mount}/deep"})) == (f"{mount}/deep/x", False)
    assert resolve("/elsewhere", mount) == ("/elsewhere", False)
    with pytest.raises(OSError, match="Too many levels"):
        resolve(f"{mount}/round", mount)
    with pytest.raises(FileNotFoundError):
        resolve(f"{mount}/none/x", mount)


def test_the_directory_itself_may_be_named_by_a_link(tmp_path: Path) -> None:
    dcp_begin(tmp_path / "real", 3)
    dcp_end(tmp_path / "real", 3)
    (tmp_path / "link").symlink_to("real")
    row = Place(tmp_path / "link").look()
    assert (row.step, row.path) == (3, f"{tmp_path}/real/step-3")


def test_a_hundred_thousand_files_cost_no_more_than_ten_thousand(place: Place) -> None:
    for number in range(100_000):
        os.close(os.open(place.path / f"sample_{number}.json", os.O_CREAT | os.O_WRONLY))
    megatron_begin(place.path, 1000)
    megatron_end(place.path, 1000)
    row = place.look()
    assert row.step == 1000, "the tracker names it, wherever it stands in the directory"
    assert "more than 10000 names" in str(row.error)


def test_a_checkpoint_of_very_many_files_has_no_size(place: Place) -> None:
    dcp_begin(place.path, 1)
    dcp_end(place.path, 1)
    assert place.look().size_bytes == 200
    for number in range(files.MAX_FILES):
        put(place.path / "step-2" / f"__{number}_0.distcp")
    put(place.path / "step-2" / ".metadata")
    row = place.look()
    assert (row.step, row.size_bytes) == (2, None)


def test_the_size_is_that_of_all_files_at_any_depth_that_is_reached(place: Place) -> None:
    for depth in ("a", "a/b"):
        put(place.path / "checkpoint-1" / depth / "x", b"x" * 1000)
    huggingface_end(place.path, 1)
    state = len((place.path / "checkpoint-1" / "trainer_state.json").read_bytes())
    assert place.look().size_bytes == 2000 + state


def test_the_time_for_a_look_is_bounded(place: Place) -> None:
    dcp_begin(place.path, 1)
    dcp_end(place.path, 1)
    row = place.look(budget_s=0.0)
    assert "more to look at" in str(row.error)


def test_what_vanishes_while_it_is_looked_at_is_passed_over(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        dcp_begin(place.path, step)
        dcp_end(place.path, step)
    real = files.stat_of

    def stat_of(name: str, where: int) -> os.stat_result | None:
        if name == "step-3":
            shutil.rmtree(place.path / "step-3", ignore_errors=True)
        return real(name, where)

    monkeypatch.setattr(files, "stat_of", stat_of)
    assert place.steps() == (2, None, False)


def test_the_demo_trainers_checkpoints_are_read_rightly(tmp_path: Path, checkout: Path) -> None:
    directory = tmp_path / "ckpt"
    trainer = subprocess.Popen(
        [
            sys.executable, str(checkout / "tests" / "rig" / "trainer.py"), "--world-size", "1", "--steps", "6",
            "--step-seconds", "0.01", "--checkpoint-dir", str(directory), "--save-interval", "2", "--keep-last", "2",
            "--checkpoint-seconds", "0.8", "--num-workers", "0",
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    place, seen = Place(directory), []
    while trainer.poll() is None:
        row = place.look()
        seen.append((row.step, row.writing_step))
        loop.sleep(0.02)
    row = place.look()
    assert (row.step, row.layout, row.writing_step, row.error) == (6, "deepspeed", None, None)
    assert {(None, 2), (2, 4), (4, 6)} <= set(seen)


# ------------------------------------------------------------------------------------------------- the collector


@dataclass
class FakeChildren:
    """Stands for Probes: what is asked is answered by the real function when the test says so."""

    asked: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    waiting: dict[str, tuple[ScanCheckpoints, Callable[[Answer[list[ScannedPlace]]], None]]] = field(
        default_factory=dict
    )
    hung: dict[str, float] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)

    def ask(
        self, key: str, request: ScanCheckpoints, deadline_s: float, now: float,
        then: Callable[[Answer[list[ScannedPlace]]], None], uid: int,
    ) -> int | None:  # fmt: skip
        if key in self.waiting:
            return None
        self.asked.append((key, uid, msgspec.to_builtins(request)))
        self.waiting[key] = (request, then)
        return len(self.asked)

    def answer(self) -> None:
        for key, (request, then) in list(self.waiting.items()):
            del self.waiting[key]
            then(Answer(1, key, [replace(row, **self.changes) for row in answer_to(request)]))

    def time_out(self, now: float) -> None:
        for key, (_, then) in self.waiting.items():
            self.hung[key] = now
            then(Answer(1, key, None, "no answer", True, 10.0))

    def hung_since(self, key: str, now: float) -> float | None:
        return now - self.hung[key] if key in self.hung else None


@dataclass
class Node:
    """A collector with its children and a clock."""

    children: FakeChildren
    logs: JobLogs
    collector: CheckpointSchedule
    directories: Mapping[str, tuple[str, ...]]
    now: float = 1000.0

    def look(self, after_s: float = 30.0) -> tuple[tuple[Checkpoint, ...], tuple[Event, ...]]:
        """What is known `after_s` later, and a second after it was asked for."""
        self.now += after_s - 1
        _, events = self.collector.collect(self.now, 10.0, self.directories)
        self.children.answer()
        self.now += 1
        rows, later = self.collector.collect(self.now, 10.0, self.directories)
        return rows, events + later

    def events(self, after_s: float = 30.0) -> list[tuple[int | None, str | None]]:
        return [(event.step, event.pattern) for event in self.look(after_s)[1]]


def node_for(*directories: Path, mounts: tuple[Mount, ...] = (Mount("/", "ext4", "/dev/vda"),)) -> Node:
    children = FakeChildren()
    logs = JobLogs(looks(children), mounts, "n1", (), become_owner=False)
    collector = CheckpointSchedule(cast("Children", children), logs, 30.0)
    return Node(children, logs, collector, {"7": tuple(map(str, directories))})


def test_each_new_checkpoint_is_told_once_with_its_age(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    dcp_begin(tmp_path, 100)
    dcp_end(tmp_path, 100)
    age(tmp_path, 5000)
    rows, events = node.look()
    assert [(event.step, event.pattern, event.job_id, event.source) for event in events] == [
        (100, "directory", "7", f"{tmp_path}/step-100")
    ]
    assert 5000 < events[0].age_s < 5100
    assert [(row.job_id, row.directory, row.layout, row.step) for row in rows] == [("7", str(tmp_path), "dcp", 100)]
    assert node.events() == []
    dcp_begin(tmp_path, 200)
    assert node.events() == []
    dcp_end(tmp_path, 200)
    assert node.events() == [(200, "directory")]
    shutil.rmtree(tmp_path / "step-200")
    _, events = node.look()
    assert [event.step for event in events] == [100]
    assert events[0].age_s > 5000, "an old one that is the newest again is not a new one"


def test_between_looks_the_rows_stay_and_their_ages_grow(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    dcp_begin(tmp_path, 100)
    dcp_end(tmp_path, 100)
    (first,), _ = node.look()
    asked = len(node.children.asked)
    (later,), _ = node.look(6.0)
    assert len(node.children.asked) == asked
    assert first.age_s is not None
    assert later.age_s == pytest.approx(first.age_s + 6)


def test_while_one_is_being_written_it_is_looked_at_often(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    node.look()
    dcp_begin(tmp_path, 100)
    (row,), _ = node.look()
    assert (row.writing, row.writing_step) == (True, 100)
    dcp_end(tmp_path, 100)
    assert node.events(SOON_S) == [(100, "directory")]


def test_while_somebody_waits_for_a_job_to_save_it_is_looked_at_often(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    node.look()
    dcp_begin(tmp_path, 100)
    dcp_end(tmp_path, 100)
    told: list[int | None] = []
    for _ in range(2 * int(SOON_S)):
        node.now += 1
        _, events = node.collector.collect(node.now, 10.0, node.directories, hurry={"7"})
        told += [event.step for event in events]
        node.children.answer()
    assert told == [100]
    assert len(node.children.asked) == 1 + 2


def test_a_file_server_whose_clock_is_slow_does_not_make_a_new_checkpoint_an_old_one(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    node.look()
    dcp_begin(tmp_path, 100)
    dcp_end(tmp_path, 100)
    age(tmp_path, 3600)
    _, (event,) = node.look()
    assert event.age_s <= 30 + CACHED_S + 2


def test_a_saved_over_file_is_a_new_checkpoint_without_a_step(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    age(put_zip(tmp_path / "ckpt.pt"), 60)
    assert node.events() == [(None, "directory")]
    assert node.events() == []
    put_zip(tmp_path / "ckpt.pt")
    assert node.events() == [(None, "directory")]


def test_a_controller_that_was_started_anew_is_told_the_newest_again(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    for step in (100, 200):
        dcp_begin(tmp_path, step)
        dcp_end(tmp_path, step)
        node.look()
    node.collector.retell()
    _, events = node.look(6.0)
    assert [event.step for event in events] == [200]
    assert events[0].age_s >= 6
    dcp_begin(tmp_path, 300)
    dcp_end(tmp_path, 300)
    node.now += 30
    node.collector.collect(node.now, 10.0, node.directories)
    node.children.answer()
    node.collector.retell()
    assert node.events(2.0) == [(300, "directory")], "what is new anyway is not told twice"


def test_the_trackers_of_the_configuration_are_read_as_before(tmp_path: Path) -> None:
    node = node_for()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    node.logs.here.hear([JobWatch(job_id="7", restarts=0, uid=0, checkpoint_trackers=(str(tracker),))])
    assert node.look() == ((), ())
    tracker.write_text("400\n")
    rows, events = node.look()
    assert rows == ()
    assert [(event.step, event.pattern, event.source) for event in events] == [(400, "tracker", str(tracker))]
    assert node.events() == []
    tracker.write_text("garbage")
    assert node.events() == []
    tracker.write_text("iter_0000500")
    assert node.events() == [(500, "tracker")]
    node.collector.retell()
    assert node.events(6.0) == [(500, "tracker")]


def test_a_filesystem_that_hangs_keeps_what_is_known_and_says_so(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    dcp_begin(tmp_path, 100)
    dcp_end(tmp_path, 100)
    node.look()
    node.now += 30
    node.collector.collect(node.now, 10.0, node.directories)
    node.children.time_out(node.now)
    node.now += 70
    (row,), events = node.collector.collect(node.now, 10.0, node.directories)
    assert (row.step, row.writing, row.error) == (100, False, "its filesystem has not answered for 70 s")
    assert events == ()
    assert len(node.children.asked) == 2, "the child that hangs is asked nothing more"


def test_a_name_that_leads_to_another_mount_is_asked_of_that_mounts_child(tmp_path: Path) -> None:
    dcp_begin(tmp_path / "other" / "run", 100)
    dcp_end(tmp_path / "other" / "run", 100)
    (tmp_path / "link").symlink_to(tmp_path / "other")
    mounts = (Mount("/", "ext4", "/dev/vda"), Mount(f"{tmp_path}/other", "nfs4", "srv:/o"))
    node = node_for(tmp_path / "link" / "run", mounts=mounts)
    assert node.events() == []
    (row,), events = node.look(6.0)
    assert [event.step for event in events] == [100]
    assert (row.directory, row.step, row.error) == (f"{tmp_path}/link/run", 100, None)
    assert [key for key, _, _ in node.children.asked] == ["files:/:self", f"files:{tmp_path}/other:self"]
    (tmp_path / "link").unlink()
    dcp_begin(tmp_path / "mine" / "run", 200)
    dcp_end(tmp_path / "mine" / "run", 200)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert node.events() == [(200, "directory")]


def test_a_name_that_is_sent_from_mount_to_mount_for_ever_is_given_up(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    node.children.changes = {"moved": str(tmp_path)}
    for _ in range(MAX_MOVES):
        node.look(2.0)
    (row,), _ = node.look(2.0)
    assert "too many links" in str(row.error)


def test_a_directory_that_cannot_be_read_says_why_and_keeps_what_was_known(tmp_path: Path) -> None:
    inner = tmp_path / "ckpt"
    node = node_for(inner)
    (row,), _ = node.look()
    assert str(row.error).startswith("ENOENT")
    dcp_begin(inner, 100)
    dcp_end(inner, 100)
    assert node.events() == [(100, "directory")]
    os.rename(inner, tmp_path / "gone")
    (row,), events = node.look()
    assert (row.step, str(row.error)[:6], events) == (100, "ENOENT", ())


def test_what_is_not_wanted_any_more_is_forgotten(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    dcp_begin(tmp_path, 100)
    dcp_end(tmp_path, 100)
    node.look()
    node.directories = {}
    assert node.look() == ((), ())
    node.collector.retell()
    assert node.look() == ((), ())
    assert len(node.children.asked) == 1


def test_as_root_nothing_is_read_for_a_job_whose_owner_is_not_known(tmp_path: Path) -> None:
    node = node_for(tmp_path)
    node.logs.become_owner = True
    (row,), _ = node.look()
    assert row.error == "not read yet"
    assert node.children.asked == []
