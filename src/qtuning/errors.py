"""What can go wrong, said in the caller's words: the rule, the value it got, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QTuningError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(QTuningError, ValueError):
    """A setting, name or option that breaks a rule."""


class TaskError(QTuningError, ValueError):
    """Labelled texts that cannot become a task."""


class BackboneError(QTuningError, RuntimeError):
    """A language model that cannot be loaded or used."""


class CollectionError(QTuningError, RuntimeError):
    """A saved collection that cannot be read or written."""


class HubError(CollectionError):
    """Something that the hub did not give or take."""


class ExportError(QTuningError, RuntimeError):
    """A task that another format cannot hold, or an adapter that a collection cannot."""


class RecordError(QTuningError, RuntimeError):
    """A run's folder that cannot be read or written."""


class TrainingError(QTuningError, RuntimeError):
    """Training that cannot go on."""


def in_a_line(error: Exception) -> str:
    """Kind and first line of any error, for a warning that says what is done without."""
    reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
    return f"{type(error).__name__}: {reason}"


MOST_NAMES = 40
"""Names an error lists at most."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line for an unknown name: the nearest known one, then all of them."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    shown = ", ".join(options[:MOST_NAMES]) or "none"
    rest = f", … ({len(options)} in all)" if len(options) > MOST_NAMES else ""
    return f"Unknown {kind} {name!r}.{hint} Known: {shown}{rest}."
