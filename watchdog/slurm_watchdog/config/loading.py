"""Reads a configuration file: every error at once, each with its line and what may have been meant."""

from __future__ import annotations

import os
import re
from typing import Any, Final, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from slurm_watchdog.base.python310 import is_class
from slurm_watchdog.config.knowledge_files import check_texts, read_texts
from slurm_watchdog.config.removed import take_removed
from slurm_watchdog.config.schema import Config
from slurm_watchdog.identity.secret_files import CREDENTIALS

MAX_BYTES: Final = 1 << 20
"""Of a configuration; the whole example has 40 KiB."""
MAX_VALUES: Final = 100_000
"""With all aliases written out: a few lines of YAML can stand for billions of values."""


class ConfigProblem(BaseModel):
    """One thing that is wrong in a configuration file."""

    path: str
    """The key, as a dotted path; empty for the file as a whole."""
    line: int | None
    message: str


class ConfigError(Exception):
    """The file was rejected, whole. `problems` has every error at once."""

    def __init__(self, file: str, problems: list[ConfigProblem]):
        self.file = file
        self.problems = problems
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """One line an error: file, line, key, what is wrong."""
        return [
            f"{self.file}{f':{p.line}' if p.line else ''}: {f'{p.path}: ' if p.path else ''}{p.message}"
            for p in self.problems
        ]


def load_config(file: str, *, with_knowledge: bool = True) -> Config:
    """Reads and checks a configuration file, and with it the site's knowledge files (`knowledge.directory`),
    unless the caller needs neither their rows nor their errors. Raises ConfigError with every problem in
    them."""
    config = parse_config(_read(file), file)
    if not with_knowledge:
        return config
    texts, problems = read_texts(config.knowledge.directory)
    problems += check_texts(texts)
    if problems:
        found = [ConfigProblem(path="knowledge.directory", line=None, message=each) for each in problems]
        raise ConfigError(file, found)
    return config.with_site_texts(texts)


def _read(file: str) -> str:
    """The text of a configuration file. Raises ConfigError."""
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB, which no configuration is")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text ({error.reason})"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = str(error)
    raise ConfigError(file, [ConfigProblem(path="", line=None, message=f"cannot be read: {reason}")])


def parse_config(text: str, file: str = "configuration") -> Config:
    """Checks the text of a configuration file; `file` is its name in messages. Raises ConfigError."""
    try:
        node, data = _parse_yaml(text)
        lines, duplicates = _lines_by_path(node)
    except _BadYaml as error:
        raise ConfigError(file, [ConfigProblem(path="", line=error.line, message=str(error))]) from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(file, [ConfigProblem(path="", line=1, message="must be a mapping of keys and values")])
    problems = [ConfigProblem(path=path, line=line, message="is given twice; remove one") for path, line in duplicates]
    data = _with_credentials(data)
    removed = [
        ConfigProblem(path=path, line=_nearest_line(path, lines), message=message)
        for path, message in take_removed(data)
    ]
    try:
        config = Config.model_validate(data).with_warnings(ConfigError(file, removed).lines())
    except ValidationError as error:
        for each in error.errors():
            problems.extend(_explain(each, lines))
        config = None
    if problems or config is None:
        raise ConfigError(file, sorted(problems, key=lambda p: (p.line or 0, p.path)))
    return config


class _BadYaml(Exception):
    """What is wrong with a text as YAML, and in which line."""

    def __init__(self, message: str, line: int | None = None):
        super().__init__(message)
        self.line = line


def _parse_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """The text's nodes, which know their lines, and its values. Raises _BadYaml."""
    node: yaml.Node | None = None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if _values_in(node, {}) > MAX_VALUES:
            raise _BadYaml(f"has more than {MAX_VALUES:,} values, with its aliases (*name) written out")
        return node, yaml.safe_load(text)
    except yaml.reader.ReaderError as error:
        place = text.count("\n", 0, error.position) + 1
        raise _BadYaml(f"is not valid YAML: the character #x{error.character:04x} is not allowed", place) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        message = f"is not valid YAML: {getattr(error, 'problem', None) or error}"
        raise _BadYaml(message, mark.line + 1 if mark else None) from error
    except RecursionError as error:
        raise _BadYaml("is nested too deeply, or has an alias (*name) that contains itself") from error
    except ValueError as error:  # a date or a number for YAML, and none that exists
        message, line = _bad_scalar(node, str(error))
        raise _BadYaml(message, line) from error


def _values_in(node: yaml.Node | None, known: dict[int, int]) -> int:
    """How many values a node is with its aliases written out. Raises RecursionError if it contains itself."""
    if id(node) not in known:
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        known[id(node)] = 1 + sum(_values_in(each, known) for each in inner)
    return known[id(node)]


def _bad_scalar(node: yaml.Node | None, reason: str) -> tuple[str, int | None]:
    """The sentence about the first value that YAML takes for a date or number and that is none, and its line."""
    if isinstance(node, yaml.ScalarNode):
        try:
            yaml.constructor.SafeConstructor().construct_object(node)
        except ValueError as error:
            kind = node.tag.rpartition(":")[2]
            said = node.value if len(node.value) <= 40 else f"{node.value[:40]}…"
            return f"{said} is no {kind} that exists ({error}); put text in quotes", node.start_mark.line + 1
    elif isinstance(node, yaml.CollectionNode):
        for each in node.value:
            for part in each if isinstance(each, tuple) else (each,):
                found = _bad_scalar(part, reason)
                if found[1] is not None:
                    return found
    return f"is not valid YAML: {reason}", None


def _with_credentials(value: Any) -> Any:
    """The same value with the directory in place of its name; outside of a service nothing can be read there."""
    if isinstance(value, dict):
        return {key: _with_credentials(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_credentials(each) for each in value]
    if isinstance(value, str) and value.startswith(CREDENTIALS):
        return os.environ.get("CREDENTIALS_DIRECTORY", "/run/credentials") + value.removeprefix(CREDENTIALS)
    return value


def _lines_by_path(node: yaml.Node | None) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """The line of every key, by dotted path, and the keys that are given twice."""
    lines: dict[str, int] = {}
    duplicates: list[tuple[str, int]] = []

    def walk(current: yaml.Node | None, path: str) -> None:
        if isinstance(current, yaml.MappingNode):
            for key, value in current.value:
                inner = f"{path}.{key.value}" if path else str(key.value)
                if inner in lines:
                    duplicates.append((inner, key.start_mark.line + 1))
                lines[inner] = key.start_mark.line + 1
                walk(value, inner)
        elif isinstance(current, yaml.SequenceNode):
            for index, value in enumerate(current.value):
                lines[f"{path}[{index}]"] = value.start_mark.line + 1
                walk(value, f"{path}[{index}]")

    walk(node, "")
    return lines, duplicates


def _explain(error: Any, lines: dict[str, int]) -> list[ConfigProblem]:
    """pydantic's error in our words, with its line. A cross-field check holds several."""
    path = ""
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else str(part))
    message = str(error["msg"]).removeprefix("Value error, ")
    if not path or message.startswith(f"{path}."):
        found = []
        for sentence in message.splitlines():
            where, _, rest = sentence.partition(": ")
            found.append(ConfigProblem(path=where, line=_nearest_line(where, lines), message=rest))
        return found
    if error["type"] == "extra_forbidden":
        parent, _, key = path.rpartition(".")
        message = f"unknown key{_did_you_mean(parent, key)}"
    elif error["type"] == "missing":
        message = "is missing"
    elif error["type"] == "model_type":
        message = "must be a mapping of keys and values"
    elif isinstance(error["input"], bool) and error["type"] == "string_type":
        message += ": YAML reads on, off, yes and no as true and false, so write them in quotes"
    elif isinstance(error["input"], str | int | float) and repr(error["input"]) not in message:
        message = f"{message}, got {error['input']!r}"
    return [ConfigProblem(path=path, line=_nearest_line(path, lines), message=message[:1].lower() + message[1:])]


def _nearest_line(path: str, lines: dict[str, int]) -> int | None:
    while path:
        if path in lines:
            return lines[path]
        path = re.sub(r"(\.?\[[^\[\]]*\]|\.[^.\[]+|^[^.\[]+|.)$", "", path)  # `.[key]`: a key that is none
    return None


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that an option is, or is a list of; None if it is neither."""
    inside = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    return inside if is_class(inside) and issubclass(inside, BaseModel) else None


def _did_you_mean(parent: str, key: str) -> str:
    from difflib import get_close_matches

    section: type[BaseModel] = Config
    for part in parent.split(".") if parent else []:
        field = section.model_fields.get(part.partition("[")[0])
        inner = _section_in(None if field is None else field.annotation)
        if inner is None:
            return ""
        section = inner
    close = get_close_matches(key, section.model_fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(section.model_fields)}"
