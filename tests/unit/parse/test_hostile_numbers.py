"""Numbers that no training logs: whatever stands in a line, reading it raises nothing, and a report can tell
what was read."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_watchdog.agent.logs.step_rows import make_event
from slurm_watchdog.controller.state.counter_clock import CounterClock
from slurm_watchdog.controller.state.progress_clock import apply_loss, apply_step, read_progress
from slurm_watchdog.knowledge.checkpoint_layouts import parse_tracker, recognise
from slurm_watchdog.knowledge.trainer_options import _seconds
from slurm_watchdog.model.report import Report
from slurm_watchdog.parse.training_log.learned_format import Learner
from slurm_watchdog.parse.training_log.line import all_rows, parse_line
from slurm_watchdog.parse.training_log.line_scan import scan
from slurm_watchdog.parse.training_log.site_patterns import compile_patterns
from slurm_watchdog.wire.codec import decode_report, encode_report

LINES = tuple(
    line
    for file in sorted((Path(__file__).parents[2] / "captures/logs").glob("*.txt"))
    for line in dict.fromkeys(re.sub(r"\d+", "7", line) for line in file.read_text().splitlines())
    if "7" in line
)
"""Every form of line of the captures, once."""
NUMBERS = st.one_of(
    st.sampled_from(
        ("1e999", "-1e999", "5e-324", "nan", "inf", "-0", "0", "1,2,3", "1_0", "٣", "²", "1j", "0x7", "True", "[1]", "00", "1.", ".5")
    ),
    st.integers(min_value=1, max_value=5000).map(lambda digits: "1" * digits),
    st.integers(min_value=15, max_value=25).map(lambda digits: "9" * digits),
    st.floats().map(repr),
)  # fmt: skip
OWN = compile_patterns((r"it (?P<step>\d+) of (?P<total>\S+) took (?P<step_seconds>\S+) loss (?P<loss>\S+)",))
ROWS = msgspec.structs.replace(all_rows(), own=OWN)


@st.composite
def hostile_lines(draw: st.DrawFn) -> str:
    """A line of a capture, or a mapping, with other numbers."""
    keys = st.sampled_from(("loss", "epoch", "step", "global_step", "max_steps", "lr", "train_runtime"))
    mapping = st.lists(keys, min_size=1, max_size=4).map(lambda names: ", ".join(f"'{n}': 7" for n in names))
    form = draw(
        st.one_of(
            st.sampled_from(LINES),
            mapping.map("{{{}}}".format),
            mapping.map(lambda text: "{" + text.replace("'", '"') + "}"),
            st.just("it 7 of 7 took 7 loss 7"),
        )
    )
    parts = form.split("7")
    return "".join(part + draw(NUMBERS) for part in parts[:-1]) + parts[-1]


@settings(max_examples=600)
@given(hostile_lines())
@example("{'loss': 1e999, 'epoch': " + "1" * 400 + "}")
@example('{"loss": 1, "epoch": ' + "1" * 400 + "}")
@example("{[1]: 2, 'loss': 1, 'step': 3}")
@example("[7/" + "9" * 30 + "] loss 1")
@example("hf_trainer\t{'loss': 1, 'learning_rate': 1, 'epoch': " + "1" * 330 + ".1e999, 'step': 1e999}")
def test_a_line_with_any_number_raises_nothing_and_fits_into_a_report(line: str) -> None:
    clocks: dict[tuple[str, str], CounterClock] = {}
    facts = [
        parse_line(line),
        parse_line(line, ROWS),
        *scan(line.encode() + b"\n", own=OWN).facts,
    ]
    for fact in filter(None, facts):
        event = replace(make_event(fact, 1.0), job_id="1", source="/log")
        report = Report(node="n1", boot_id="b", agent_id="a", sequence=1, events=(event,))
        (told,) = decode_report(encode_report(report)).events
        if told.step is not None or told.count is not None:
            apply_step(clocks, told, 1.0)
            apply_step(clocks, told, 2.0)
            apply_loss(clocks, told, 2.0)
            read_progress(clocks, None, 0.0, 3.0)
    learner = Learner()
    for at in range(3):
        learner.feed(f"{line} loss 1.5 acc 0.{at}\n".encode(), float(at))


@given(st.text(alphabet="0123456789", min_size=1, max_size=250))
def test_a_checkpoint_with_any_number_in_its_name_fits_into_a_report(digits: str) -> None:
    for step in (parse_tracker(digits), *(each.step for each in recognise([(f"global_step{digits}", True)]))):
        assert step is None or step < 2**63


@given(st.text(alphabet="0123456789:", min_size=1, max_size=400))
def test_a_timeout_of_any_length_raises_nothing(text: str) -> None:
    seconds = _seconds(text, 1.0)
    assert seconds is None or seconds > 0
