"""Which directories a trainer's command line names: every row of the table, every way to write an option."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.knowledge.trainer_options import MAX_DIRECTORIES, OPTIONS, directories_in, kill_switch_in

CASES = [
    ("python pretrain_gpt.py --bf16 --save /ckpt/gpt --save-interval 500 --load /other", ["/ckpt/gpt"]),
    ("torchrun --nproc_per_node 8 train.py --output_dir out/llama", ["/data/out/llama"]),
    ("python run.py --output-dir=/a", ["/a"]),
    ("python -m torchtitan.train --job.dump_folder /d --checkpoint.folder ck", ["/d/ck"]),
    ("python -m torchtitan.train --job.dump_folder /d", ["/d/checkpoint"]),
    ("python -m torchtitan.train --dump_folder /d", ["/d/checkpoint"]),
    ("python -m torchtitan.train --checkpoint.folder ck", ["/data/outputs/ck"]),
    ("python -m torchtitan.train --checkpoint.folder /abs", ["/abs"]),
    ("python nemo.py exp_manager.explicit_log_dir=/r", ["/r/checkpoints"]),
    ("python nemo.py exp_manager.exp_dir=/r ++exp_manager.name=gpt", ["/r/gpt"]),
    ("python nemo.py +exp_manager.checkpoint_callback_params.dirpath='/c'", ["/c"]),
    ("nemo llm pretrain log.log_dir=/l log.name=n", ["/l/n"]),
    ("python cli.py fit --trainer.default_root_dir /p", ["/p/checkpoints", "/p/lightning_logs"]),
    ("python old.py --default_root_dir=/p", ["/p/checkpoints", "/p/lightning_logs"]),
    ("python h.py callbacks.model_checkpoint.dirpath=/p", ["/p"]),
    ("composer train.py c.yaml save_folder=/m/{run_name}/checkpoints", ["/m"]),
    ("python olmo.py --trainer.save_folder=/o", ["/o"]),
    ("fairseq-train /data --save-dir checkpoints", ["/data/checkpoints"]),
    ("fairseq-hydra-train checkpoint.save_dir=/f", ["/f"]),
    ("python -m MaxText.train base.yml base_output_directory=/g run_name=r1", ["/g/r1/checkpoints"]),
    ("python t5x/train.py --gin.MODEL_DIR='/t'", ["/t"]),
    ("python -m verl.trainer.main_ppo trainer.default_local_dir=/v", ["/v"]),
    ("deepspeed --module openrlhf.cli.train_sft --ckpt_path ./ck", ["/data/ck"]),
    ("python lev.py --trainer.checkpointer.base_path /l", ["/l"]),
    ("python -m lingua.train config=x.yaml dump_dir=/l", ["/l/checkpoints"]),
    ("python train.py --out_dir=out", ["/data/out"]),
    ("tune run full checkpointer.output_dir=/u", ["/u"]),
    ("python tools/train.py c.py --work-dir w", ["/data/w"]),
    ("python zipformer/train.py --exp-dir e", ["/data/e"]),
    ("python ds.py --checkpoint_dir /d", ["/d"]),
    ("python trainer.py --checkpoint-dir /d", ["/d"]),
    ("python x.py --checkpoints-dir a --ckpt-dir b", ["/data/a", "/data/b"]),
    ("python x.py --save_path a --checkpoint_folder b", ["/data/a", "/data/b"]),
]


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_a_command_line_names_its_directories(line: str, expected: list[str]) -> None:
    assert sorted(directories_in(line.split(), "/data")) == expected


@pytest.mark.parametrize("option", sorted({option for _, option, _ in OPTIONS}))
def test_every_row_has_a_case(option: str) -> None:
    words = {word.split("=")[0].lstrip("+-").replace("-", "_") for line, _ in CASES for word in line.split()}
    assert option in words


@pytest.mark.parametrize(
    "line",
    [
        "python x.py --output_dir s3://bucket/run",
        "python x.py --output_dir gs://bucket/run",
        "python x.py --output_dir ~/run",
        "python x.py --output_dir $HOME/run",
        "python x.py --output_dir",
        "python x.py --output_dir --overwrite",
        "python x.py --output_dir=",
        "python x.py --save /",
        "python x.py --save //",
        "python x.py --ckpt_path model/last.ckpt",
        "python x.py save_folder=null",
        "python x.py output_dir /x",
        "python x.py --save-interval 500",
        "python x.py --output_dirs /x",
        "python maxtext.py base_output_directory=/g",
        "",
    ],
)
def test_checkpoint_options_without_a_directory_are_left_out(line: str) -> None:
    assert directories_in(line.split(" "), "/data") == ()


def test_the_last_one_counts_and_detours_are_taken_out() -> None:
    assert directories_in(["--save", "/a", "--save=../b//c/./d/.."], "/data/x") == ("/data/b/c",)
    assert directories_in(["--save", "//a"], "/data") == ("/a",)


def test_relative_directories_are_left_out_where_the_working_directory_is_not_known() -> None:
    assert directories_in(["--save", "a", "--output_dir", "/b"], "") == ("/b",)


@given(st.lists(st.text() | st.sampled_from([f"--{option}" for _, option, _ in OPTIONS]), max_size=60))
def test_whatever_the_words_are_the_paths_are_absolute_plain_and_few(words: list[str]) -> None:
    found = directories_in(words, "/data")
    assert len(found) <= MAX_DIRECTORIES
    assert all(path.startswith("/") and path == os.path.normpath(path) for path in found)


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("train.py --kill-switch-path /scratch/stop --save x", "/scratch/stop"),
        ("train.py --kill_switch_path=/scratch/a/../stop", "/scratch/stop"),
        ("train.py --kill-switch-path stop", "/data/stop"),
        ("train.py --kill-switch-path", ""),
        ("train.py --kill-switch-path ~/stop", ""),
        ("train.py kill-switch-path /x", ""),
    ],
)
def test_the_kill_switch_of_a_command_line_is_found(words: str, path: str) -> None:
    assert kill_switch_in(words.split(), "/data") == path
