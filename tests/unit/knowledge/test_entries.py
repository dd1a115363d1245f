"""Text of a knowledge file: sections, values, and every error at once, each with its place."""

from __future__ import annotations

from slurm_watchdog.knowledge.entries import parse_entries, parts_of, read_rows, shown
from slurm_watchdog.knowledge.log_signatures import log_row

GOOD = r"""
# a comment
[part RANK]
pattern: rank (?P<rank>\d+)

[log acme_license]
means: the licence server refused
needle: "acme: "
pattern: ACME: no licence for {RANK}
pattern: ACME: licence lost
source: ACME 3, its manual
example: "ACME: licence lost "
not: ACME: licence taken
"""


def test_parse_entries_takes_values_as_they_stand_and_blanks_in_quotes() -> None:
    (part, log), problems = parse_entries(GOOD, "site.conf")
    assert problems == []
    assert (log.kind, log.name, log.line) == ("log", "acme_license", 6)
    assert log.values["needle"] == ("acme: ",)
    assert log.values["example"] == ("ACME: licence lost ",)
    assert parts_of([part, log]) == {"RANK": r"rank (?P<rank>\d+)"}
    assert shown(r"\x1b[31mred") == "\x1b[31mred"


def test_read_rows_joins_alternatives_and_puts_parts_in() -> None:
    rows = read_rows(GOOD, "site.conf", {"log": log_row})
    assert rows.problems == ()
    (row,) = rows.of("log")
    assert row.signature.regex.pattern == r"ACME: no licence for rank (?P<rank>\d+)|ACME: licence lost"
    assert row.means == "the licence server refused"


def test_read_rows_of_a_file_full_of_errors_names_each_with_its_place() -> None:
    text = """means: nobody
[log Bad Name]
neddle: x
needle: CUDA
pattern: (open
pattern: {NOPART}
consequence: perhaps
group: unheard_of
[lgo x]
"""
    found = read_rows(text, "a.conf", {"log": log_row}).problems
    for place, words in (
        ("a.conf:1: ", "neither a header"),
        ("a.conf:2: [log Bad Name]: ", "a name has lower-case letters"),
        ("a.conf:2: [log Bad Name]: ", "'CUDA' has capital letters"),
        ("a.conf:2: [log Bad Name]: ", "{NOPART} in `pattern` is not a part"),
        ("a.conf:2: [log Bad Name]: ", "is not a valid regular expression"),
        ("a.conf:2: [log Bad Name]: ", "`consequence` is yes or no"),
        ("a.conf:2: [log Bad Name]: ", "`group` is one of header"),
        ("a.conf:2: [log Bad Name]: ", "unknown key `neddle`"),
        ("a.conf:9: [lgo x]: ", "unknown kind 'lgo'; known are log"),
    ):
        assert any(each.startswith(place) and words in each for each in found), words
    assert len(found) == 9


def test_a_blank_at_the_end_of_a_line_is_refused_because_nobody_sees_whether_it_counts() -> None:
    (entry,), problems = parse_entries("[log a]\nneedle: nan in \n", "a.conf")
    assert problems == ["a.conf:2: ends with a blank: remove it, or put the value in double quotes"]
    assert entry.values["needle"] == ("nan in",)
