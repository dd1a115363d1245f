"""What a name says: every row of the tables, and names that are no checkpoint."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.knowledge.checkpoint_layouts import (
    DIRECTORIES,
    FILES,
    LAYOUTS_OF,
    MARKERS,
    TRACKED_NAMES,
    TRACKERS,
    Candidate,
    has_zip_end,
    markers_of,
    parse_tracker,
    recognise,
)

DIRECTORY_NAMES = [
    ("iter_0001000", "megatron", 1000),
    ("iter_12345678", "megatron", 12345678),
    ("global_step1000", "deepspeed", 1000),
    ("global_step_100", "deepspeed", 100),
    ("checkpoint-500", "huggingface", 500),
    ("ep1-ba1000", "composer", 1000),
    ("epoch=0-step=1000.ckpt", "lightning", 1000),
    ("megatron_gpt--val_loss=2.87-step=300-consumed_samples=12.0-last", "lightning", 300),
    ("model--global_step=70", "lightning", 70),
    ("step-1000", "numbered", 1000),
    ("step1000-unsharded", "numbered", 1000),
    ("step_7", "numbered", 7),
    ("ckpt-1000", "numbered", 1000),
    ("epoch_0_step_50", "numbered", 50),
    ("1000", "digits", 1000),
    ("0000001000", "digits", 1000),
]
FILE_NAMES = [
    ("ep1-ba1000-rank0.pt", "composer", 1000),
    ("epoch=0-step=1000.ckpt", "lightning", 1000),
    ("epoch=0-step=1000-v1.ckpt", "lightning", 1000),
    ("epoch=3.ckpt", "lightning", None),
    ("checkpoint_2_900.pt", "plain", 900),
    ("checkpoint12.pt", "plain", 12),
    ("epoch_12.pt", "plain", None),
    ("step_1000.pt", "plain", 1000),
    ("model_1000.safetensors", "plain", 1000),
    ("ckpt-1000.pth", "plain", 1000),
    ("model_0004999.pth", "plain", 4999),
    ("iter_20000.pth.tar", "plain", 20000),
    ("llama_step_300_rank_0.pt", "plain", 300),
    ("checkpoint-77.pth", "plain", 77),
    ("ckpt.pt", "plain", None),
    ("last.ckpt", "lightning", None),
    ("checkpoint_last.pt", "plain", None),
]
NO_CHECKPOINTS = [
    "checkpoint-best", "checkpoint--5", "checkpoint-1e5", "iter_1000x", "iter_", "step", "global_step", "runs", "wandb",
    "checkpoint-99999999999999999999", "tensorboard", "logs-1000", "epoch=x-step=y", "", "-", "..",
]  # fmt: skip
NO_CHECKPOINT_FILES = [
    "train.log", "config.json", "trainer_state.json", "events.out.tfevents.1000", "model-00001-of-00002.safetensors",
    "rng_state_0.pth", "optimizer.pt", "step_1000.txt", "step_1000.json", "mp_rank_00_model_states.pt", "best.pt", ".hidden",
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "step"), DIRECTORY_NAMES)
def test_a_directorys_name_says_layout_and_step(name: str, layout: str, step: int) -> None:
    (found,) = recognise([(name, True)])
    assert (found.layout, found.step, found.unfinished, found.is_directory) == (layout, step, False, True)


@pytest.mark.parametrize(("name", "layout", "step"), FILE_NAMES)
def test_a_files_name_says_layout_and_step(name: str, layout: str, step: int | None) -> None:
    (found,) = recognise([(name, False)])
    assert (found.layout, found.step, found.unfinished, found.is_directory) == (layout, step, False, False)


@pytest.mark.parametrize("row", DIRECTORIES)
def test_every_row_of_directories_has_an_example(row: tuple[str, str]) -> None:
    assert any(layout == row[0] and re.fullmatch(row[1], name) for name, layout, _ in DIRECTORY_NAMES)


@pytest.mark.parametrize("row", FILES)
def test_every_row_of_files_has_an_example(row: tuple[str, str]) -> None:
    assert any(layout == row[0] and re.fullmatch(row[1], name) for name, layout, _ in FILE_NAMES)


def test_other_names_are_no_checkpoints() -> None:
    assert recognise([(name, True) for name in NO_CHECKPOINTS]) == []
    assert recognise([(name, False) for name in NO_CHECKPOINT_FILES]) == []


@pytest.mark.parametrize(
    "name",
    [
        "iter_0001000.tmp", "iter_0001000.tmp.4711", "tmp-checkpoint-1000", "checkpoint-1000-tmp", ".step-1000",
        "1000.orbax-checkpoint-tmp-17", "step-1000.incomplete", "step_1000_tmp",
    ],
)  # fmt: skip
def test_a_temporary_name_is_one_that_is_being_written(name: str) -> None:
    (found,) = recognise([(name, True)])
    assert (found.step, found.unfinished) == (1000, True)


def test_a_temporary_orbax_directory_is_told_by_its_name() -> None:
    assert [each.layout for each in recognise([("1000.orbax-checkpoint-tmp-1", True)])] == ["orbax"]


def test_nemos_marker_makes_what_is_beside_it_unfinished() -> None:
    names = [("a-step=10.ckpt", False), ("a-step=20.ckpt", False), ("a-step=20-unfinished", False)]
    names += [("a-step=20-EMA.ckpt", False)]
    assert {(each.step, each.layout, each.unfinished) for each in recognise(names)} == {
        (20, "nemo", True),
        (10, "lightning", False),
    }


def test_the_newest_is_the_one_with_the_largest_number_whatever_its_spelling() -> None:
    names = ["checkpoint-9", "checkpoint-1000", "checkpoint-200"]
    assert [each.step for each in recognise((name, True) for name in names)] == [1000, 200, 9]


def test_files_of_several_ranks_are_one_checkpoint() -> None:
    names = ["ep1-ba5-rank0.pt", "ep1-ba5-rank1.pt", "step_7_rank_0.pt", "step_7_rank_1.pt"]
    found = recognise((name, False) for name in names)
    assert [(each.layout, each.step, len(each.names)) for each in found] == [
        ("plain", 7, 2),
        ("composer", 5, 2),
    ]


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("1200", 1200), (" 1200\n", 1200), ("global_step1200", 1200), ("global_step_1200", 1200), ("iter_0001200", 1200),
        ("checkpoint-1200", 1200), ("step-5", 5), ("release", None), ("", None), ("-5", None), ("12.5", None), ("1e9", None),
        ("garbage 12", None), ("9" * 19, None), ("٣", None), ("\x00\x00", None),
    ],
)  # fmt: skip
def test_forms_of_trackers(text: str, step: int | None) -> None:
    assert parse_tracker(text) == step


def test_the_tables_fit_together() -> None:
    layouts = {layout for layout, _ in (*DIRECTORIES, *FILES)}
    for layout in MARKERS:
        assert layout in layouts or any(layout in others for others in LAYOUTS_OF.values())
    for layout, _ in DIRECTORIES:
        assert markers_of(layout), f"nobody could ever say that a {layout} directory is complete"
    assert {layout for _, layouts_ in TRACKERS for layout in layouts_} == set(TRACKED_NAMES)


def test_the_end_of_a_zip_archive_is_recognised() -> None:
    assert has_zip_end(b"PK\x05\x06" + bytes(18))
    assert not has_zip_end(b"PK\x05\x06" + bytes(10))
    assert not has_zip_end(bytes(22))


@given(st.lists(st.tuples(st.text(max_size=40), st.booleans()), max_size=30))
def test_whatever_the_names_are_the_newest_comes_first(entries: list[tuple[str, bool]]) -> None:
    found: list[Candidate] = recognise(entries)
    assert [each.order for each in found] == sorted((each.order for each in found), reverse=True)
    assert all(each.step is None or 0 <= each.step < 10**18 for each in found)
