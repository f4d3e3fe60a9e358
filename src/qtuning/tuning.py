"""Choosing hyper-parameters on streams set aside for it: every method with the same number of tries.

A method declares a small grid of factors on the family's defaults (`MethodInfo.grid`). Every candidate is an
ordinary run with a record, so tuning can be stopped and gone on with; the best average score at the end of the
tuning streams wins, over all seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from qtuning.config import make_settings, settings_dict
from qtuning.errors import ConfigError
from qtuning.files import write_atomic
from qtuning.methods import get_method
from qtuning.presets import get_preset
from qtuning.runs import RunConfig, run
from qtuning.streams import get_stream, list_tasks

BUDGET = 6
"""Candidates of every method that has something to tune."""


@dataclass(frozen=True)
class Tried:
    """One candidate and what it scored."""

    settings: dict[str, Any]
    scores: list[float]
    """Average score at the end of each stream and seed."""

    @property
    def score(self) -> float:
        """Mean over streams and seeds."""
        return mean(self.scores)


def candidates(method: str, family: str, base: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The method's grid around the base settings, whole numbers rounded and at least 1."""
    grid = get_method(method).grid
    start = settings_dict(*make_settings(family, **base))
    found = []
    for factors in itertools.product(*grid.values()):
        own: dict[str, Any] = {}
        for names, factor in zip(grid, factors, strict=True):
            for name in names.split("+"):
                value = start[name] * factor
                is_whole = isinstance(start[name], int)
                own[name] = max(1, round(value)) if is_whole else float(f"{value:.3g}")
                if (
                    name == "epochs" and start["most_steps"]
                ):  # or more epochs would be the same steps
                    own["most_steps"] = round(start["most_steps"] * factor)
        found.append(own)
    return found


def start_of(preset: str, method: str) -> dict[str, Any]:
    """What the grid starts from: a method's settings in a preset, but those that are tuned as all methods have them."""
    tuned = {name for names in get_method(method).grid for name in names.split("+")}
    if "epochs" in tuned:
        tuned.add("most_steps")
    own, common = get_preset(preset, method), get_preset(preset)
    return {
        **{name: value for name, value in own.items() if name not in tuned},
        **{name: common[name] for name in tuned & common.keys()},
    }


def tune(
    config: RunConfig,
    streams: Sequence[str],
    seeds: Sequence[int],
    family: str,
    root: Path,
    after: Callable[[Tried], None] | None = None,
    **how: Any,
) -> list[Tried]:
    """All candidates of a method, best first; a tie goes to the one declared first.

    Args:
        config: The run to tune; its stream is replaced by each of `streams`.
        streams: Set aside for tuning: never reported.
        seeds: One run each.
        family: Of the model, whose defaults the grid starts from.
        root: Where the records lie.
        after: Called with every finished candidate.
        how: Passed on to `runs.run`.
    """
    for stream in streams:
        _check_not_reported(replace(config, stream=stream, protocol="").resolved())
    tried = []
    for own in candidates(config.method, family, config.settings):
        scores = []
        for stream in streams:
            settings = {**config.settings, **own}
            wanted = replace(  # what lies between learning and the end decides nothing here
                config, stream=stream, protocol="", inner_rows=0, settings=settings
            )
            scores += [result["average_score"] for result in run(wanted, seeds, root, **how)]
        tried.append(Tried(own, scores))
        if after:
            after(tried[-1])
    return sorted(tried, key=lambda each: -each.score)


def _check_not_reported(config: RunConfig) -> None:
    """Refuse test rows that tables report: those of public data sets, but under the protocol `tuning`."""
    cards = [
        list_tasks()[name][0] for name in get_stream(config.stream).tasks if name in list_tasks()
    ]
    if config.protocol != "tuning" and any(card.hub for card in cards):
        raise ConfigError(
            f"the test rows of {config.stream!r} are for reporting; tune on other streams, such as 'tuning', or on "
            f"a stream with 'protocol: tuning', such as 'tuning-long'."
        )


def write_preset(path: Path, config: RunConfig, tried: Sequence[Tried], about: str) -> None:
    """The winner as a preset that `qtuning run --preset FILE` takes, with every candidate beside it."""
    preset = {
        "description": f"{config.method} on {config.model}, {about}",
        "settings": {**config.settings, **tried[0].settings},
        "tried": [{**asdict(each), "mean": each.score} for each in tried],
    }
    write_atomic(path, yaml.safe_dump(preset, sort_keys=False).encode())
