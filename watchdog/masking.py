"""What looks like a secret, in the value of a variable or in a line of a log. Pure.

Nobody can know every secret; these are those that say what they are (tokens with a prefix, an address with a password) and long
words without any order. A masked run id costs less than a key that was sent to a colleague.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

MASK: Final = "(masked)"

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKENS?|SECRETS?|PASS(?:WORD|WD|PHRASE)?|KEYS?|CREDENTIALS?|AUTH|COOKIES?|SESSION|DSN|WEBHOOK|APIKEY)(?:_|$)"
)
_SECRET = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"  # user:password in an address
    r"|(?i:bearer|basic)\s+[\w.~+/-]{8,}=*"
    r"|-----BEGIN[^-]*PRIVATE KEY.*"
    r"|\beyJ[\w-]{8,}\.[\w.-]+"  # a JSON web token
    r"|\b(?:hf_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA)[\w-]{8,}"  # tokens that say what they are
    r"|(?i:\b\w*(?:token|secret|password|passwd|api_?key|signature))['\"]?\s*[=:]\s*['\"]?[^\s&'\",]{4,}"
)
_RANDOM = re.compile(r"[A-Za-z0-9+_=-]{32,}")
_UUID = re.compile(r"(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
"""Names GPUs and runs, and opens nothing."""


def masked_value(name: str, value: str) -> str:
    """The value of variable `name`, or the mask if its name or the value itself looks like a secret."""
    if _SECRET_NAME.search(name.upper()) and not value.isdecimal() and value.lower() not in ("true", "false"):
        return MASK
    return MASK if mask_line(value) != value else value


def mask_line(text: str) -> str:
    """`text` with whatever looks like a secret in it masked."""
    text = _SECRET.sub(MASK, text)
    return _RANDOM.sub(lambda found: MASK if _is_random(found[0]) else found[0], text)


def _is_random(word: str) -> bool:
    """A long word of letters and digits in no order, as keys are: it changes between kinds of letters all the time."""
    if _UUID.fullmatch(word):
        return False
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" if c.islower() else "-" for c in word]
    changes = sum(1 for one, two in pairwise(kinds) if one != two)
    return "d" in kinds and ("l" in kinds or "u" in kinds) and changes >= len(word) / 3
