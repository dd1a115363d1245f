"""A checkpoint that is kept from its trainer: whole or not at all, once, without following a link."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_watchdog.agent.checkpoints.files import MAX_FILES
from slurm_watchdog.agent.checkpoints.keep import UNFINISHED, keep_checkpoint
from slurm_watchdog.agent.workers.request_types import KeepCheckpoint, ScanCheckpoints
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.knowledge.kept_checkpoints import KEPT_SUFFIX, resume_words
from tests.builders.requests import answer_to

NAME = "iter_0000500"


def checkpoint(save: Path, name: str = NAME, files: tuple[str, ...] = ("a/x.pt", "a/y.pt", "metadata.json")) -> Path:
    for each in files:
        (save / name / each).parent.mkdir(parents=True, exist_ok=True)
        (save / name / each).write_text(each)
    return save / name


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, *path.rglob("*")) if each.is_file())


def keep(path: Path, size_bytes: int | None = None, budget_s: float = 20.0) -> Path:
    size = size_of(path) if size_bytes is None else size_bytes
    return Path(keep_checkpoint(KeepCheckpoint(str(path), size, budget_s), WorkerState()).path)


def texts(path: Path) -> dict[str, str]:
    return {str(each.relative_to(path)): each.read_text() for each in path.rglob("*") if each.is_file()}


def shelf(save: Path) -> Path:
    return Path(f"{save}{KEPT_SUFFIX}")


def kept_in(save: Path) -> list[str]:
    """Without the trainer's tracker."""
    return [each.name for each in shelf(save).iterdir() if each.name != "latest_checkpointed_iteration.txt"]


@pytest.fixture
def save(tmp_path: Path) -> Path:
    found = tmp_path / "run" / "checkpoints"
    found.mkdir(parents=True)
    return found


def test_a_checkpoint_is_kept_under_its_own_name_by_links_and_outlives_its_trainers_limit(save: Path) -> None:
    path = checkpoint(save)
    said = texts(path)
    kept = keep(path)
    assert kept == shelf(save) / NAME and texts(kept) == said
    assert all((kept / each).samefile(path / each) for each in said)
    assert keep(path) == kept, "twice is harmless"
    shutil.rmtree(path)
    assert texts(kept) == said and keep(kept.parent.parent / "checkpoints" / NAME, 1) == kept
    assert kept_in(save) == [NAME] and os.listdir(save) == []


def test_a_checkpoint_that_is_one_file_is_kept_and_nothing_is_written_over(save: Path) -> None:
    path = save / "epoch=3-step=500.ckpt"
    path.write_text("weights")
    kept = keep(path)
    path.unlink()
    path.write_text("other weights")
    assert keep(path) == kept and kept.read_text() == "weights"


def test_one_is_kept_for_a_directory_until_its_owner_deletes_it(save: Path) -> None:
    kept, later = keep(checkpoint(save)), checkpoint(save, "iter_0000600")
    with pytest.raises(OSError, match=f"{NAME} is kept there already: delete it first"):
        keep(later)
    assert kept_in(save) == [NAME]
    shutil.rmtree(kept)
    assert keep(later).name == "iter_0000600"


def test_a_try_that_was_cut_off_leaves_no_half_checkpoint(save: Path) -> None:
    path = checkpoint(save)
    left = shelf(save) / UNFINISHED
    (left / "a").mkdir(parents=True)
    os.link(path / "a" / "x.pt", left / "a" / "x.pt")
    (left / "a").chmod(0)
    kept = keep(path)
    assert texts(kept) == texts(path) and kept_in(save) == [NAME]


def _files_vanish(path: Path) -> None:
    (path / "a" / "x.pt").unlink()


def _link_in_it(path: Path) -> None:
    (path / "a" / "secret").symlink_to("/etc/hostname")


def _fifo_in_it(path: Path) -> None:
    os.mkfifo(path / "a" / "pipe")


def _too_many(path: Path) -> None:
    for number in range(MAX_FILES + 1):
        (path / f"{number}").touch()


def _too_deep(path: Path) -> None:
    (path / "a/b/c/d/e").mkdir(parents=True)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_files_vanish, "it is being removed"),
        (_link_in_it, "neither a file nor a directory"),
        (_fifo_in_it, "neither a file nor a directory"),
        (_too_many, f"more than {MAX_FILES} files"),
        (_too_deep, "deep"),
        (shutil.rmtree, "is no checkpoint, or is gone"),
    ],
)
def test_what_is_not_whole_or_more_than_files_is_not_kept_and_nothing_is_left(
    save: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    path = checkpoint(save)
    size_bytes = size_of(path)
    spoil(path)
    with pytest.raises(OSError, match=reason):
        keep(path, size_bytes)
    assert not shelf(save).exists()


def test_what_takes_too_long_is_not_kept(save: Path) -> None:
    path = checkpoint(save)
    with pytest.raises(OSError, match="all the time there was"):
        keep(path, budget_s=0.0)
    assert not shelf(save).exists() and len(texts(path)) == 3


@pytest.mark.parametrize("name", ["last.ckpt", "ckpt.pt"])
def test_a_name_without_a_step_is_written_over_and_its_links_with_it(save: Path, name: str) -> None:
    (save / name).write_text("weights")
    with pytest.raises(OSError, match="says no step"):
        keep(save / name)


def test_a_file_of_several_that_are_one_checkpoint_is_not_kept_alone(save: Path) -> None:
    for rank in range(2):
        (save / f"model_500_rank_{rank}.pt").write_text("weights")
    with pytest.raises(OSError, match="it is 2 files in a directory with others"):
        keep(save / "model_500_rank_0.pt")


def test_no_link_is_followed_to_where_it_is_kept(save: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shelf(save).symlink_to(elsewhere)
    with pytest.raises(OSError):
        keep(checkpoint(save))
    assert os.listdir(elsewhere) == []


def test_what_is_kept_is_no_newest_checkpoint_of_the_directory_above(save: Path) -> None:
    path = checkpoint(save)
    keep(path)
    shutil.rmtree(save)
    (row,) = answer_to(ScanCheckpoints("/", [], 10.0, [("7", str(save.parent), None)], [])).directories
    assert row.path is None and row.error is None


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("megatron", "--load /d/run.kept"),
        ("deepspeed", "load_checkpoint('/d/run.kept', tag='x500')"),
        ("huggingface", "resume_from_checkpoint='/d/run.kept/x500'"),
        ("lightning", "ckpt_path='/d/run.kept/x500'"),
        ("composer", "load_path='/d/run.kept/x500'"),
        (None, "the trainer's option for a checkpoint that is named"),
    ],
)
def test_each_trainer_is_told_in_its_own_words_to_resume_from_it(layout: str | None, words: str) -> None:
    assert resume_words(layout, "/d/run.kept/x500") == words


@pytest.mark.parametrize(
    ("name", "tracker", "words"),
    [
        ("iter_0000500", "latest_checkpointed_iteration.txt", "500"),
        ("global_step500", "latest", "global_step500"),
        ("checkpoint-500", None, None),
    ],
)
def test_a_trainer_that_is_given_the_directory_finds_it_there(
    save: Path, name: str, tracker: str | None, words: str | None
) -> None:
    path = checkpoint(save, name)
    for _ in range(2):
        keep(path)
        beside = {each.name: each.read_text() for each in shelf(save).iterdir() if each.is_file()}
        assert beside == ({} if tracker is None else {tracker: words})
        for each in beside:  # a keeper that was killed before it wrote it
            (shelf(save) / each).unlink()
    shutil.rmtree(shelf(save) / name)
    keep(checkpoint(save, name.replace("5", "9")))
    assert [each.read_text() for each in shelf(save).iterdir() if each.is_file()] == (
        [] if words is None else [words.replace("5", "9")]
    )


def test_a_pipe_in_the_place_of_the_tracker_holds_nobody_up(save: Path) -> None:
    path = checkpoint(save)
    shelf(save).mkdir()
    os.mkfifo(shelf(save) / "latest_checkpointed_iteration.txt")
    with pytest.raises(OSError, match="No such device or address"):
        keep(path)
