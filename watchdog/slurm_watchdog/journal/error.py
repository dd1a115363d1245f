"""The one error of the journal, for those who have to know it and not the database."""

from __future__ import annotations


class JournalError(Exception):
    """A sentence: what is wrong with the journal, where it lies, what to do."""


class NewerRelease(JournalError):
    """The journal was written by a later release than this one."""
