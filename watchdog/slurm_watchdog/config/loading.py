"""Reads a configuration file: every error at once, each with its line and what may have been meant."""

from __future__ import annotations

import os
from typing import Any, Final

import yaml
from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.config.converting import Wrong, convert
from slurm_watchdog.config.detectors import with_patience
from slurm_watchdog.config.knowledge_files import check_texts, read_texts
from slurm_watchdog.config.moved import Moves
from slurm_watchdog.config.schema import Config, Expert

CREDENTIALS: Final = "${CREDENTIALS_DIRECTORY}"
"""In a path: where systemd puts what a unit's LoadCredential= names (systemd.exec(5)), for that service alone."""
MAX_BYTES: Final = 1 << 20
"""Of a configuration; the whole example has 40 KiB."""
MAX_VALUES: Final = 100_000
"""With all aliases written out: a few lines of YAML can stand for billions of values."""


class ConfigProblem(Struct):
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
    return replace(config, site_texts=texts)


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
    except _BadYaml as error:
        raise ConfigError(file, [ConfigProblem(path="", line=error.line, message=str(error))]) from error
    if not isinstance(data, dict):
        raise ConfigError(file, [ConfigProblem(path="", line=1, message="must be a mapping of keys and values")])
    lines, duplicates = _lines_by_path(node)
    data = _with_credentials(data)
    moves, wrong = Moves(data), Wrong()
    detectors, entries = data.setdefault("detectors", {}), data.get("except")
    if isinstance(detectors, dict):
        own = {kind: dict(block) for kind, block in detectors.items() if isinstance(block, dict)}
        for each in (data, *(entries if isinstance(entries, list) else ())):
            if isinstance(each, dict) and "patience" in each and isinstance(each.setdefault("detectors", {}), dict):
                with_patience(each["patience"], each["detectors"], own)
    expert: Expert = convert(Expert, data.pop("expert", {}), "expert", wrong)
    config: Config = convert(Config, data, "", wrong)
    if not wrong:
        config = replace(config, **{name: getattr(expert, name) for name in Expert.__struct_fields__})
        wrong = [(path, why) for path, _, why in (each.partition(": ") for each in config.contradictions())]
    problems = [ConfigProblem(path=path, line=line, message="is given twice; remove one") for path, line in duplicates]
    problems += _with_lines([*moves.wrong, *((moves.written(path), why) for path, why in wrong)], lines)
    if problems:
        raise ConfigError(file, sorted(problems, key=lambda p: (p.line or 0, p.path)))
    return replace(config, warnings=tuple(ConfigError(file, _with_lines(moves.warned, lines)).lines()))


def _with_lines(found: Wrong, lines: dict[str, int]) -> list[ConfigProblem]:
    """With the line of each, or of what it is in."""
    problems = []
    for path, message in found:
        near = path
        while near and near not in lines:
            near = near[: max(near.rfind("."), near.rfind("["), 0)]
        problems.append(ConfigProblem(path=path, line=lines.get(near), message=message))
    return problems


class _BadYaml(Exception):
    """What is wrong with a text as YAML, and in which line."""

    def __init__(self, message: str, line: int | None = None):
        super().__init__(message)
        self.line = line


class _Values(yaml.constructor.SafeConstructor):
    """Makes values of a text's nodes."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a date or a number for YAML, and none that exists
            kind, said = node.tag.rpartition(":")[2], node.value
            said = said if len(said) <= 40 else f"{said[:40]}…"
            message = f"{said} is not a valid {kind} ({error}); put text in quotes"
            raise _BadYaml(message, node.start_mark.line + 1) from error


def _parse_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """The text's nodes, which know their lines, and its values; of nothing an empty mapping. Raises _BadYaml."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if _values_in(node, {}) > MAX_VALUES:
            raise _BadYaml(f"has more than {MAX_VALUES:,} values, with its aliases (*name) written out")
        data = None if node is None else _Values().construct_document(node)
        return node, {} if data is None else data
    except yaml.reader.ReaderError as error:
        place = text.count("\n", 0, error.position) + 1
        raise _BadYaml(f"is not valid YAML: the character #x{error.character:04x} is not allowed", place) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        message = f"is not valid YAML: {getattr(error, 'problem', None) or error}"
        raise _BadYaml(message, mark.line + 1 if mark else None) from error
    except RecursionError as error:
        raise _BadYaml("is nested too deeply, or has an alias (*name) that contains itself") from error


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
