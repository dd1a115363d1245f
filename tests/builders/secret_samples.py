"""Every kind of secret as users meet it (secret_samples.txt), with random characters."""

from __future__ import annotations

import random
import re
import string
from pathlib import Path

ALPHABETS = {
    "hex": "0123456789abcdef",
    "dec": "123456789",
    "upper": string.ascii_uppercase + string.digits,
    "b62": string.ascii_letters + string.digits,
    "b64": string.ascii_letters + string.digits + "+/",
    "b64u": string.ascii_letters + string.digits + "-_",
    "pw": string.ascii_letters + string.digits + "!%^.",
}
ROWS = Path(__file__).with_name("secret_samples.txt").read_text(encoding="utf-8").splitlines()
SAMPLES: list[tuple[str, str]] = [(kind, sample) for kind, _, sample in (row.partition(": ") for row in ROWS)]
LEAST = 6
"""Shorter pieces stand in other text by chance."""


def fill(sample: str, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """`sample` with its places filled, and what was filled in and must not be seen again."""
    secrets: list[str] = []

    def one(match: re.Match[str]) -> str:
        alphabet, length = ALPHABETS[match[1]], int(match[2])
        text = "".join(rng.choice(alphabet) for _ in range(length))
        if match[1] == "pw":  # a password of three letters and no digit is a word
            text = text[:-2] + "7" + rng.choice(string.ascii_letters)
        if length >= LEAST:
            secrets.append(text)
        return text

    text = re.sub(r"\{(\w+):(\d+)\}", one, sample)
    return text.replace("{{", "{").replace("}}", "}"), tuple(secrets)


def planted(seed: int = 1) -> list[tuple[str, str, tuple[str, ...]]]:
    """(kind, text with a secret, the secrets in it): one for each sample of each kind."""
    rng = random.Random(seed)
    return [(kind, *fill(sample, rng)) for kind, sample in SAMPLES]
