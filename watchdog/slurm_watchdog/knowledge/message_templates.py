"""Templates of a site's own messages: any JSON, with names in the braces of its strings. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

PLACEHOLDERS: Final = (
    "text", "details", "todo", "event", "severity", "kind", "incident", "jobs", "users", "partitions", "accounts",
    "cluster", "link", "runbook",
)  # fmt: skip
_NAMES = re.compile(r"\{([a-z_]+)\}")


def unknown_placeholders(template: Any) -> set[str]:
    """Names in a template that are none of ours."""
    if isinstance(template, str):
        return set(_NAMES.findall(template)) - set(PLACEHOLDERS)
    values = template.values() if isinstance(template, dict) else template if isinstance(template, list) else ()
    return {name for each in values for name in unknown_placeholders(each)}


def fill(template: Any, values: Mapping[str, str]) -> Any:
    """The template with values in its strings; what is in a value is not looked at again, so that no text of a user
    makes the document another one."""
    if isinstance(template, str):
        return _NAMES.sub(lambda found: values.get(found[1], found[0]), template)
    if isinstance(template, dict):
        return {key: fill(each, values) for key, each in template.items()}
    return [fill(each, values) for each in template] if isinstance(template, list) else template
