"""`scan-log` over several files of one job: whose log stops first in a hang, older parts of a rotated log, and how late it
is by another file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_watchdog.cli.main import main
from slurm_watchdog.diagnose.logs.case import LogVerdict
from slurm_watchdog.diagnose.logs.digest import Collector
from slurm_watchdog.diagnose.logs.grouping import base_of, group, rotated_parts
from slurm_watchdog.diagnose.logs.report import judge_job
from tests.builders.failed_logs import DEFAULTS, steps, traceback

AT = "2024-05-01 14:00:00"
STARTED = "2024-05-01 10:00:00,000 - INFO - model built\n"
MONITOR = "".join(f"2024-05-01 {11 + n // 60}:{n % 60:02d}:00,000 - INFO - memory 61 GiB\n" for n in range(120))
ENDED = "slurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2024-05-01T10:03:30 DUE TO TIME LIMIT ***\n"


def judged(files: Mapping[str, str], at: str | None = AT) -> LogVerdict | None:
    (places,) = group(list(files))
    paths = [list(files)[place] for place in places]
    digests = []
    for path in paths:
        collector = Collector(markdown=True)
        collector.add(files[path].encode(), 1)
        digests.append(collector.digest())
    return judge_job(paths, digests, DEFAULTS, at).verdict


def of_ranks(*last: int) -> dict[str, str]:
    """The log of each rank, up to its last step."""
    return {f"logs/rank_{rank}.log": STARTED + steps(0, number + 1) for rank, number in enumerate(last)}


def named(files: Mapping[str, str], at: str | None = AT) -> tuple[str, int | None, str | None] | None:
    found = judged(files, at)
    return None if found is None else (found.name, found.rank, found.host)


def test_of_the_logs_of_all_ranks_the_one_that_stops_a_step_before_the_others_is_suspect() -> None:
    found = judged(of_ranks(90, 90, 90, 89, 90, 90))
    assert found is not None
    assert (found.name, found.rank, found.missing) == ("hang", 3, (3,))
    assert found.summary.endswith("Rank 3 is suspect: its log stops at step 89, all others' at step 90.")


def test_of_the_logs_of_nodes_the_one_that_stops_first_names_its_node() -> None:
    files = {f"logs/node{node}.log": STARTED + steps(0, 91 if node != 2 else 90) for node in range(4)}
    assert named(files) == ("hang", None, "node2")


@pytest.mark.parametrize(
    ("case", "files"),
    [
        ("all at the same step", of_ranks(90, 90, 90, 90)),
        ("two are behind", of_ranks(90, 89, 90, 89, 90, 90)),
        ("half of them are behind, as stages of a pipeline are", of_ranks(90, 90, 90, 89, 89, 89)),
        ("one is ahead", of_ranks(90, 90, 91, 90)),
        ("two ranks", of_ranks(90, 89)),
        ("three ranks", of_ranks(90, 89, 90)),
        ("a rank's log is not here", {k: v for k, v in of_ranks(90, 90, 90, 89, 90, 90).items() if "rank_1" not in k}),
        ("a rank's log is empty", of_ranks(90, 90, 90, 89, 90, 90) | {"logs/rank_1.log": ""}),
        ("one logs every seventh step", of_ranks(90, 90, 90, 90) | {"logs/rank_1.log": "".join(steps(0, 91).splitlines(True)[::7])}),
        ("what print writes comes in blocks", {k: v.replace(" - INFO - ", " ") for k, v in of_ranks(90, 90, 90, 89, 90).items()}),
        ("more ranks than logs", of_ranks(90, 90, 90, 89, 90) | {"logs/rank_0.log": "world_size: 8\n" + steps(0, 91)}),
        ("only rank 0 logs steps", of_ranks(90) | {f"logs/rank_{n}.log": STARTED for n in range(1, 6)}),
    ],
)  # fmt: skip
def test_where_it_cannot_be_told_whose_log_stops_first_nobody_is_named(case: str, files: dict[str, str]) -> None:
    assert named(files) == ("hang", None, None), case


def test_a_log_that_ends_long_before_the_others_may_have_lost_its_end() -> None:
    found = judged(of_ranks(90, 90, 40, 90, 90))
    assert found is not None
    assert (found.rank, found.missing) == (None, ())
    assert "The log of rank 2 ends at step 40" in found.summary


@pytest.mark.parametrize(
    "files",
    [
        of_ranks(90, 90, 90, 89, 90) | {"logs/rank_0.log": STARTED + steps(0, 91) + ENDED},
        of_ranks(90, 90, 90, 89, 90) | {"logs/rank_0.log": STARTED + steps(0, 91) + "INFO Training completed\n"},
    ],
)
def test_a_run_that_was_over_has_not_hung_since(files: dict[str, str]) -> None:
    assert named(files) is None


def test_a_rank_that_is_a_step_behind_while_the_job_trains_is_not_named() -> None:
    assert named(of_ranks(90, 90, 90, 89, 90), "2024-05-01 10:01:40") is None


def test_how_late_it_is_is_known_from_any_file_of_the_job() -> None:
    files = of_ranks(90, 90, 90, 90)
    assert named(files, None) is None
    assert named(files | {"logs/rank_0.log": files["logs/rank_0.log"] + MONITOR}, None) == ("hang", None, None)
    goes_on = files["logs/rank_0.log"] + steps(91, 7291, minute=2)
    assert named({**files, "logs/rank_0.log": goes_on}, None) is None


def test_a_file_whose_clock_is_not_known_to_be_the_same_says_nothing_of_how_late_it_is() -> None:
    ahead = "2024-05-01 19:00:00,000 - WARNING - deprecated\n"
    assert named({"train.out": steps(0, 91), "train.err": ahead}, None) is None
    node2 = steps(0, 91).replace(" 10:", " 19:") + MONITOR.replace(" 11:", " 20:").replace(" 12:", " 21:")
    assert named({"node1.log": steps(0, 91), "node2.log": steps(0, 91).replace(" 10:", " 19:")}, None) is None
    assert named({"node1.log": steps(0, 91), "node2.log": node2}, None) is None


def test_an_older_part_of_a_rotated_log_does_not_hang() -> None:
    parts = {"train.log.2": steps(0, 60), "train.log.1": steps(60, 120, 1), "train.log": steps(120, 180, 2)}
    assert named(parts, "2024-05-01 10:03:20") is None
    assert named(parts) == ("hang", None, None)


def test_of_rotated_logs_of_ranks_none_is_suspect_for_where_its_older_part_ends() -> None:
    older = {f"{path}.1": text for path, text in of_ranks(90, 90, 90, 89, 90).items()}
    newer = {f"logs/rank_{rank}.log": steps(91, 151, 2) for rank in range(5)}
    assert named({**older, **newer}) == ("hang", None, None)
    assert named({**older, **newer}, "2024-05-01 10:03:10") is None


def test_the_cause_is_found_in_an_older_part_and_nothing_where_the_newer_one_goes_on() -> None:
    raised = "2024-05-01 10:00:59,500 - ERROR - " + traceback("", "OSError: [Errno 28] No space left on device")
    lost = "2024-05-01 10:02:00,000 - ERROR - " + traceback(
        "", "RuntimeError: Connection closed by peer [10.0.0.4]:3301"
    )
    assert named({"train.log": lost, "train.log.1": steps(0, 60) + raised}, None) == ("disk_full", None, None)
    assert named({"train.log": steps(60, 120, 2), "train.log.1": steps(0, 60) + raised}, None) is None


def test_parts_of_a_rotated_log_are_put_in_order_and_numbers_without_a_log_are_none() -> None:
    paths = ["a.log", "a.log.1", "a.log.10.gz", "a.log.2", "b.log-20240501", "b.log"]
    assert group(paths) == [[2, 3, 1, 0], [4, 5]]
    assert rotated_parts(paths) == {
        "a.log.1": "a.log",
        "a.log.10.gz": "a.log",
        "a.log.2": "a.log",
        "b.log-20240501": "b.log",
    }
    numbered = ["std.0", "std.1", "std.2"]
    assert [base_of(path, numbered) for path in numbered] == numbered


def test_a_bar_with_the_word_of_its_end_in_its_line_is_read_beside_a_log_with_times(tmp_path: Path) -> None:
    bars = "".join(f"  2%|#     | {n}/1000 [00:{n:02d}<30:00,  2.00s/it]\r" for n in range(1, 30))
    aborted = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
    (tmp_path / "job-12.out").write_text(STARTED + steps(10, 60))
    (tmp_path / "job-12.err").write_text(bars.rstrip("\r") + aborted + ENDED)
    done = CliRunner().invoke(main, ["scan-log", str(tmp_path)])
    assert (done.exit_code, "its last step is 59" in done.stdout) == (0, True), done.output
