"""The lines of one log within the records of whatever collected them: the answer is that of the plain log."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.builders.failed_logs import read

BEGAN = datetime(2026, 3, 4, 10)
LINES = [
    *(f"[rank{n % 4}]: step: {n}/5000 loss: 2.9" for n in range(1, 41)),
    "[rank3]: Traceback (most recent call last):",
    '[rank3]:   File "/app/train.py", line 88, in <module>',
    "[rank3]: OSError: [Errno 5] Input/output error: '/data/shard-0007.tar'",
    *(f"[rank{n}]: torch.distributed.DistBackendError: NCCL error: remote process exited" for n in range(3)),
]
Wrap = Callable[[str, datetime], Any]


def micros(at: datetime) -> int:
    return int((at - datetime(1970, 1, 1)).total_seconds() * 1e6)


RECORDS: dict[str, Wrap] = {
    "docker": lambda text, at: {"log": text + "\n", "stream": "stderr", "time": at.isoformat() + ".000000000Z"},
    "journal": lambda text, at: {"__REALTIME_TIMESTAMP": str(micros(at)), "_HOSTNAME": "n7", "_PID": "77", "MESSAGE": text},
    "journal, bytes": lambda text, at: {"MESSAGE": list(text.encode()), "__REALTIME_TIMESTAMP": str(micros(at))},
    "kubernetes": lambda text, at: {"log": text, "kubernetes": {"host": "n7", "pod_name": "train-0"}, "@timestamp": at.isoformat() + "Z"},
    "google": lambda text, at: {"textPayload": text, "timestamp": at.isoformat() + "Z", "severity": "ERROR", "resource": {"type": "k8s"}},
    "python-json-logger": lambda text, at: {"asctime": str(at), "levelname": "INFO", "name": "t", "message": text},
    "structlog": lambda text, at: {"event": text, "level": "info", "timestamp": at.isoformat()},
    "zap": lambda text, at: {"level": "info", "ts": micros(at) / 1e6, "msg": text},
    "a record in a record": lambda text, at: {"log": json.dumps({"message": text, "ts": micros(at) / 1e6}) + "\n", "stream": "stdout"},
    "three deep": lambda text, at: {"message": json.dumps({"log": json.dumps({"msg": text})}), "time": at.isoformat()},
    "otel": lambda text, at: {"timestamp": micros(at) * 1000, "body": {"stringValue": text}, "severity": "INFO"},
    "elastic": lambda text, at: {"_index": "logs", "_source": {"@timestamp": at.isoformat(), "message": text}},
}  # fmt: skip
DOCUMENTS: dict[str, Callable[[list[tuple[str, datetime]]], Any]] = {
    "cloudwatch": lambda rows: {"events": [{"timestamp": micros(at) // 1000, "message": text} for text, at in rows]},
    "insights": lambda rows: {"results": [[{"field": "@timestamp", "value": str(at)}, {"field": "@message", "value": text}] for text, at in rows]},
    "array": lambda rows: [{"time": at.isoformat(), "log": text} for text, at in rows],
    "loki": lambda rows: {"data": {"result": [{"stream": {}, "values": [[str(micros(at) * 1000), text] for text, at in rows]}]}},
    "search": lambda rows: {"hits": {"total": 9, "hits": [{"_source": {"message": text, "@timestamp": at.isoformat()}} for text, at in rows]}},
}  # fmt: skip


def rows() -> list[tuple[str, datetime]]:
    return [(line, BEGAN + timedelta(seconds=5 * n)) for n, line in enumerate(LINES)]


def answer(text: str) -> tuple[Any, ...]:
    judged = read(text)
    assert judged.verdict is not None, judged.unread
    progress = judged.rows()[0]["progress"]
    return (judged.verdict.name, judged.verdict.rank, judged.verdict.line, progress["last_step"])


RIGHT = ("io_error", 3, 43, 40)


def test_the_plain_log_is_read() -> None:
    assert answer("\n".join(f"{at.isoformat()}Z {line}" for line, at in rows())) == RIGHT


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("before", ["", "0: ", "2026-03-04T10:00:00.000000000Z stdout F "])
def test_records_of_a_line_each(name: str, before: str) -> None:
    assert answer("\n".join(before + json.dumps(RECORDS[name](*row)) for row in rows())) == RIGHT


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("indent", [None, 2])
def test_one_document_of_records(name: str, indent: int | None) -> None:
    assert answer(json.dumps(DOCUMENTS[name](rows()), indent=indent)) == RIGHT


def test_the_export_of_the_journal() -> None:
    text = "\n\n".join(
        f"__CURSOR=s\n__REALTIME_TIMESTAMP={micros(at)}\n_HOSTNAME=n7\nMESSAGE={line}\n_PID=7" for line, at in rows()
    )
    assert answer(text)[:2] == RIGHT[:2]
    assert answer(text)[3] == 40


def test_rank_host_and_traceback_in_fields_of_their_own() -> None:
    steps = [json.dumps({"message": f"step {n}/500 loss 2.3", "rank": n % 4, "host": "n1"}) for n in range(40)]
    raised = "Traceback (most recent call last):\n  File \"t.py\", line 7, in f\nOSError: [Errno 28] No space left on device: '/x'"
    failed = json.dumps({"message": "training failed", "level": "error", "rank": 2, "host": "n1", "exc_info": raised})
    judged = read("\n".join([*steps, failed]))
    assert judged.verdict is not None
    assert (judged.verdict.name, judged.verdict.rank, judged.verdict.host) == ("disk_full", 2, "n1")


@pytest.mark.parametrize("count", ["step", "epoch", "global_step"])
def test_a_record_that_counts_in_fields_of_its_own_is_progress(count: str) -> None:
    text = "\n".join(json.dumps({"message": "train", "level": "info", count: n, "loss": 2.5}) for n in range(1, 30))
    progress = read(text).rows()[0]["progress"]
    assert (progress["lines"], progress["advancing"]) == (29, True)


@pytest.mark.parametrize(
    "text", ['{"rows": [{"a": 1}]}', '{"traceEvents": [{"name": "aten::mm", "ts": 1}]}', "[" * 5000, '{"a": ' * 5000]
)  # fmt: skip
def test_json_of_another_kind_is_not_understood(text: str) -> None:
    judged = read(text)
    assert judged.verdict is None
    assert judged.unread is not None and "JSON" in judged.unread
