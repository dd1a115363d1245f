"""Secrets in text: every kind is masked, what is no secret stays, and masking twice changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.base.redact import KINDS, MASK, PEM_LINES, SecretKind, mask_cut, mask_line, mask_lines, masked_value
from slurm_watchdog.base.regex_cost import op as constants
from slurm_watchdog.base.regex_cost import parser as _parser
from tests.builders.secret_samples import SAMPLES, planted

CAPTURES = Path(__file__).parents[2] / "captures"
CAPTURES = [
    *sorted((CAPTURES / "logs").glob("*.txt")),
    *sorted((CAPTURES / "kernel").glob("*.txt")),
    *sorted((CAPTURES / "stacks").glob("*.json")),
]
FRAMES = (
    "{}",
    "RuntimeError: request failed: {} (attempt 3)",
    '[rank3]: requests.exceptions.HTTPError: 401 for "{}", giving up',
    "2026-03-01 10:00:00,123 ERROR trainer: {}",
    "/scratch/team/{}/checkpoints",
)
"""What stands around a secret."""


@pytest.mark.parametrize("name", [kind.name for kind in KINDS])
def test_a_secret_of_each_kind_is_masked_wherever_it_stands(name: str) -> None:
    for seed in range(6):
        for kind, text, secrets in planted(seed):
            if kind == name:
                for frame in FRAMES:
                    masked = mask_line(frame.format(text))
                    assert MASK in masked
                    assert not [secret for secret in secrets if secret in masked], masked
                    assert mask_line(masked) == masked


def test_there_are_kinds_enough_and_each_has_a_sample() -> None:
    assert len(KINDS) >= 40
    assert {kind.name for kind in KINDS} == {kind for kind, _ in SAMPLES}
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_captured_lines_of_training_and_of_kernels_stay_as_they_are(path: Path) -> None:
    lines = path.read_text(errors="replace").splitlines()
    assert lines
    assert [line for line in lines if mask_line(line) != line] == []


@pytest.mark.parametrize(
    "line",
    [
        "step 100 | tokens 1234567 | tokens/s: 12345.6 | num_tokens=4096 | consumed tokens: 123456789 |",
        'special tokens: eos_token="<|endoftext|>" bos_token="<s>" pad_token_id=0 tokenizer_type=GPT2BPETokenizer',
        "git commit 3f786850e387550fdab836ed7e6dc881de23001b (dirty)",
        "snapshots/3f786850e387550fdab836ed7e6dc881de23001b/model-00001-of-00030.safetensors",
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "KeyError: 'model.layers.0.self_attn.q_proj.weight'",
        "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn took 12.5 ms",
        "_ZN5torch8autograd6Engine17evaluate_functionERSt10shared_ptrINS0_9GraphTaskEEPNS0_4NodeERNS0_11InputBufferE",
        "GPU-8a3f1c22-77aa-4b1e-9c1d-0123456789ab: Xid 79",
        "Lustre: capstor-OST003a-osc-ffff3000ef06c000: Connection restored",
        'File "/opt/conda/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2829, in all_reduce',
        "PWD=/scratch/me/run17 OLDPWD=/home/me",
        "tcp://10.0.0.1:29500 grpc://node17:8476 file:///scratch/me/store",
        "python train.py --tokenizer gpt2 --max-tokens 4096 --key-dim 64 --author me",
        "loss_scale: 65536 grad_norm: 1.23 lr: 1.0e-4 mem: 63.2GiB",
        "Auth: none, signature: (Tensor self, int dim) -> Tensor",
        "basic block 12 of resnet50, login node login1, 8 keys loaded",
        "wandb: Run data is saved locally in /scratch/me/wandb/run-20260301_100000-a1b2c3d4",
        "torch.Size([8, 2048]) dtype=torch.bfloat16 device=cuda:3 requires_grad=True",
        "password: required, token: expired, secret not found",
    ],
)
def test_line_without_a_secret_is_unchanged(line: str) -> None:
    assert mask_line(line) == line


def test_text_around_a_masked_secret_is_unchanged() -> None:
    line = "loading https://me:hunter22@host/x with api_key=abcd1234 at step 7"
    assert mask_line(line) == f"loading https://{MASK}@host/x with api_key={MASK} at step 7"
    sha = "3f786850e387550fdab836ed7e6dc881de23001b"
    assert mask_line(f"commit {sha}") == f"commit {sha}"
    assert mask_line(f"wandb login {sha}") == f"wandb login {MASK}"


def test_a_key_of_several_lines_is_masked_from_its_first_line_to_its_last() -> None:
    body = [f"{'Ab3' * 20}{number:04}" for number in range(20)]
    key = ["-----BEGIN OPENSSH PRIVATE KEY-----", *body, "-----END OPENSSH PRIVATE KEY-----"]
    assert mask_lines(["before", *key, "after"]) == ["before", *[MASK] * len(key), "after"]
    assert mask_lines([*key[7:], "after"]) == [*[MASK] * len(key[7:]), "after"], "its beginning was cut off"
    assert mask_lines([*key[:7]]) == [MASK] * 7, "its end is not written yet"
    assert mask_lines([key[0], *["x"] * PEM_LINES, "after"])[-1] == "after", "one that never ends hides no log"
    assert mask_lines(["one", "two"]) == ["one", "two"]


def test_half_a_secret_is_not_left_at_the_place_of_a_cut() -> None:
    for _, text, secrets in planted(7):
        for limit in range(max(1, len(text) - 60), len(text)):
            kept = mask_cut(text, limit)
            assert len(kept) <= limit
            assert not [secret for secret in secrets if secret[:8] in kept], (text, kept)


def test_a_variable_is_masked_for_its_name_or_for_its_value() -> None:
    assert masked_value("TORCH_HUB_TOKEN", "abc") == MASK
    assert masked_value("TORCH_EXTRA", "postgres://u:pw@db/x") == MASK
    assert masked_value("TOKENIZERS_PARALLELISM", "false") == "false"
    assert masked_value("NCCL_TOPO_FILE", "/etc/nccl/topo.xml") == "/etc/nccl/topo.xml"


PIECES = [
    "eyJ", "://", "a:b@", "token=", "password: ", "-----BEGIN PRIVATE KEY-----", "mysql -p", "curl -u ", "--token ", "cookie=", "_KEY=",
    "login ", "secret ", "?key=", "Ab1", "AKIA", "authorization: bearer ", "'", '"', "9:AA", "username=a,", "api_key", " ", "=", "\n", "/", "(masked)",
    "hf_", "Zk3vQ9xB7LmP2sT8wR4yN6uH1jD5gF0a", "0123456789abcdef0123456789abcdef", "é", "İ",
]  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=24))
def test_masking_twice_changes_nothing(pieces: list[str]) -> None:
    once = mask_line("".join(pieces))
    assert mask_line(once) == once


def _repeats(parsed: Any) -> Iterator[int]:
    """The upper bound of every repetition in a parsed expression."""
    for op, argument in parsed:
        if op in (constants.MAX_REPEAT, constants.MIN_REPEAT):
            yield int(argument[1])
        for each in argument if isinstance(argument, tuple | list) else ():
            for part in each if isinstance(each, list) else (each,):
                if isinstance(part, _parser.SubPattern):
                    yield from _repeats(part)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_repetition_of_an_expression_has_an_upper_bound(kind: SecretKind) -> None:
    bounds = list(_repeats(_parser.parse(kind.regex.pattern, kind.regex.flags)))
    assert max(bounds, default=0) <= 16_384


def test_a_text_of_any_pieces_repeated_is_masked_in_time() -> None:
    """Each of these is 20,000 characters: an expression that tried again at each of them would not come back
    from this suite."""
    rng = random.Random(5)
    for _ in range(20):
        unit = "".join(rng.choice(PIECES[:-2]) for _ in range(rng.randint(1, 3)))
        mask_line((unit * 20_000)[:20_000])
