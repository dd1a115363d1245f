"""The trainer's option for a named checkpoint: its words, and what is refused before anything starts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from slurm_watchdog.cli.run import run
from slurm_watchdog.supervisor.resume_option import parse_option, words_for


@pytest.mark.parametrize(
    ("option", "checkpoint", "words"),
    [
        ("--resume_from_checkpoint {checkpoint}", "/d/kept/checkpoint-500",
         ("--resume_from_checkpoint", "/d/kept/checkpoint-500")),
        ("--resume_from_checkpoint={checkpoint}", "/d/kept/checkpoint-500",
         ("--resume_from_checkpoint=/d/kept/checkpoint-500",)),
        ("--load {directory} --ckpt-step {step}", "/d/kept/iter_0000500",
         ("--load", "/d/kept", "--ckpt-step", "500")),
        ("trainer.load='{directory}' tag={name}", "/d/kept/global_step20", ("trainer.load=/d/kept", "tag=global_step20")),
        ("--ckpt_path {checkpoint}", "/d/kept/epoch=1-step=40.ckpt", ("--ckpt_path", "/d/kept/epoch=1-step=40.ckpt")),
        ("--step {step}", "/d/kept/epoch=1-step=40.ckpt", ("--step", "40")),
    ],
)  # fmt: skip
def test_the_words_name_the_checkpoint_where_the_option_says_so(
    option: str, checkpoint: str, words: tuple[str, ...]
) -> None:
    assert words_for(parse_option(option), checkpoint) == words


def test_no_option_is_no_words_and_a_name_without_a_step_gives_none() -> None:
    assert parse_option("") == ()
    with pytest.raises(ValueError, match=r"last\.ckpt says no step"):
        words_for(parse_option("--ckpt-step {step}"), "/d/kept/last.ckpt")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--resume", "does not say where the checkpoint goes"),
        ("--resume {path}", "knows no {path}: there are {checkpoint}, {directory}, {name}, {step}"),
        ("--resume '{checkpoint}", "cannot be split into words"),
    ],
)
def test_an_option_that_cannot_work_is_refused_before_the_command_starts(option: str, said: str) -> None:
    result = CliRunner().invoke(run, ["--resume-option", option, "--", "true"], env={"SLURM_JOB_ID": None})
    assert (result.exit_code, said in result.output) == (2, True), result.output
