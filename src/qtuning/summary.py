"""The figures of the paper's long and lifelong streams in one mapping, each with the conditions it holds under."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import mean, stdev
from typing import Any

from qtuning.config import MethodSettings
from qtuning.errors import RecordError
from qtuning.evaluation import sign_flip_p
from qtuning.run_labels import circumstances, label_of, label_runs

LONG = ("order-08", "order-09", "order-10")
LIFELONG = ("order-11", "order-12", "order-13")
LENGTH_MATCHED = "per-task-prompt-long"
"""The control whose prompts are as long as Q-tuning's and share nothing."""
LENGTHS = {"prompt_length", "shared_length", "queue_size"}
SWITCHES = {f.name for f in fields(MethodSettings)} - LENGTHS
"""Settings that mean nothing to that control."""
KEEPS_ALL = "eviction none"
"""A prompt that grows with the tasks: no control is as long."""

Record = dict[str, Any]
Seeds = Mapping[int, Record]
Labels = dict[str, dict[str, dict[int, Record]]]
"""Of one backbone: label, stream, seed -> record."""


def summarise(results: Sequence[Record]) -> dict[str, Any]:
    """Means over seeds, paired differences and conditions; `docs/reference.md` describes each key."""
    long, lifelong = _arranged(results, LONG), _arranged(results, LIFELONG)
    if not long and not lifelong:
        raise RecordError(f"no finished run of {LONG[0]} to {LIFELONG[-1]}; make one: qtuning run.")
    conditions: dict[str, Any] = {}
    for section, found in (("long_sequence", long), ("lifelong", lifelong)):
        for backbone, labels in found.items():
            for label, runs in labels.items():
                entry = conditions.setdefault(backbone, {}).setdefault(label, {})
                entry[section] = _conditions([r for seeds in runs.values() for r in seeds.values()])
    return {
        "long_sequence": {b: _section(LONG, labels, _long_order) for b, labels in long.items()},
        "lifelong": {
            b: _section(LIFELONG, labels, _lifelong_order) for b, labels in lifelong.items()
        },
        "conditions": conditions,
    }


def _arranged(results: Sequence[Record], orders: Sequence[str]) -> dict[str, Labels]:
    """The runs of some streams by backbone; two records of one run are refused."""
    found: dict[str, Labels] = {}
    wanted = [record for record in results if record["stream"] in orders]
    for backbone in sorted({record["backbone"]["name"] for record in wanted}):
        records = [record for record in wanted if record["backbone"]["name"] == backbone]
        named = list(zip(label_runs(records), records, strict=True))
        for label, record in sorted(named, key=lambda n: (n[0], n[1]["stream"], n[1]["seed"])):
            runs = found.setdefault(backbone, {}).setdefault(label, {})
            first = runs.setdefault(record["stream"], {}).setdefault(record["seed"], record)
            if first is not record:
                raise RecordError(
                    f"{first['folder']} and {record['folder']} are the same run ({label}, "
                    f"{record['stream']}, seed {record['seed']}); leave one of them out."
                )
    return found


def _section(
    orders: Sequence[str], labels: Labels, figures: Callable[[Seeds], dict[str, Any]]
) -> dict[str, Any]:
    """Each order, the mean over the orders, and how far that is from the control's."""
    averages = {label: _over(orders, runs) for label, runs in labels.items()}
    any_run = {
        label: next(iter(next(iter(runs.values())).values())) for label, runs in labels.items()
    }
    controls = {
        _compared_under(record): label
        for label, record in any_run.items()
        if record["method"] == LENGTH_MATCHED
    }
    found: dict[str, Any] = {}
    for label, runs in labels.items():
        control = controls.get(_compared_under(any_run[label]), "")
        found[label] = {
            "orders": {order: figures(runs[order]) for order in runs},
            "average": _spread_or_none(averages[label]),
        }
        if label != control:
            paired = _minus(averages[label], averages.get(control, {}))
            found[label]["minus_length_matched"] = paired and {"control": control, **paired}
    return found


def _over(orders: Sequence[str], runs: Mapping[str, Seeds]) -> dict[int, float]:
    """The mean over the orders of every seed that has them all."""
    scores = [_scores(runs.get(order, {})) for order in orders]
    whole = sorted(set.intersection(*map(set, scores)))
    return {seed: mean(each[seed] for each in scores) for seed in whole}


def _compared_under(record: Record) -> tuple[Any, ...]:
    """Equal for a run and its control: the same conditions and changed settings, but Q-tuning's own switches."""
    changed = label_of(record).split(", ")[1:]
    kept = [c for c in changed if c.split()[0] not in SWITCHES or c == KEEPS_ALL]
    config = circumstances(record)  # cells in between change no average
    return *kept, *((k, config[k]) for k in sorted(config) if k not in ("method", "inner_rows"))


def _minus(own: Mapping[int, float], other: Mapping[int, float]) -> dict[str, Any] | None:
    """Differences paired by seed; None where no seed has both."""
    differences = {seed: own[seed] - other[seed] for seed in own if seed in other}
    if not differences:
        return None
    p = sign_flip_p(list(differences.values()))
    return {**_spread(differences), "p": None if math.isnan(p) else _rounded(p)}


def _long_order(runs: Seeds) -> dict[str, Any]:
    """Scores."""
    return _spread(_scores(runs))


def _lifelong_order(runs: Seeds) -> dict[str, Any]:
    """Scores, the most that any run forgot or gained, and whether a task costs more at the end than at the start."""
    transfers = [r["backward_transfer"] for r in runs.values()]
    known = [transfer for transfer in transfers if transfer is not None]
    seconds = [[task["seconds"] for task in run["tasks"].values()] for run in runs.values()]
    return {
        **_spread(_scores(runs)),
        "backward_transfer": _rounded(max(known, key=abs)) if known else None,
        "tasks": len(seconds[0]),
        "seconds_first_ten": _rounded(mean(mean(each[:10]) for each in seconds)),
        "seconds_last_ten": _rounded(mean(mean(each[-10:]) for each in seconds)),
    }


def _conditions(records: Sequence[Record]) -> dict[str, Any]:
    """Every value that occurs among the runs of a label, so that a figure says what it is of."""
    found: dict[str, Any] = {}
    for key in ("preset", "protocol", "test_limit", "max_length", "dtype"):
        found[key] = _unique(circumstances(record).get(key) for record in records)
    for key in ("shots", "epochs", "most_steps", "average", "validation_limit"):
        found[key] = _unique(record["settings"].get(key, 0) for record in records)
    names = sorted({name for record in records for name in record["versions"]})
    found["versions"] = {name: _unique(r["versions"].get(name) for r in records) for name in names}
    return found


def _scores(runs: Seeds) -> dict[int, float]:
    return {seed: run["average_score"] for seed, run in runs.items()}


def _spread(values: Mapping[int, float]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds, and each seed's own value."""
    each = list(values.values())
    return {
        "mean": _rounded(mean(each)),
        "sd": _rounded(stdev(each)) if len(each) > 1 else None,
        "n": len(each),
        "seeds": {str(seed): _rounded(value) for seed, value in values.items()},
    }


def _spread_or_none(values: Mapping[int, float]) -> dict[str, Any] | None:
    return _spread(values) if values else None


def _rounded(value: float) -> float:
    return round(value, 6) + 0.0  # no -0.0


def _unique(values: Iterable[Any]) -> list[Any]:
    return sorted(set(values), key=str)
