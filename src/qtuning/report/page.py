"""The HTML page: everything inline, opens offline, light and dark, wide and narrow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from qtuning import __version__
from qtuning.report.charts import heat_table, line_chart
from qtuning.report.comparing import Scores, compare, overviews, squares
from qtuning.report.gather import Records
from qtuning.report.tables import Group, group_runs, mean_sd, papers_numbers

MOST_ROWS = 20
"""Tables with more rows are shown when asked for."""


def render_page(records: Records) -> str:
    """The whole page as one string."""
    groups = group_runs(records.results)
    comparisons = compare(groups)
    text = (files("qtuning.report") / "page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = lambda value: "–" if value is None else f"{100 * value:z.1f}"
    environment.filters["score"] = _score
    environment.filters["of_seeds"] = _of_seeds
    return environment.from_string(text).render(
        version=__version__,
        groups=groups,
        streams=_by_stream(groups),
        overviews=overviews(groups),
        comparisons=comparisons,
        squares=squares(comparisons),
        most_rows=MOST_ROWS,
        unfinished=records.unfinished,
        unreadable=records.unreadable,
        papers_numbers=papers_numbers,
        details=[_details(group) for group in groups],
    )


def _score(pair: tuple[float, float | None]) -> str:
    mean, sd = pair
    if math.isnan(mean):
        return "–"
    return f"{100 * mean:z.1f}" if sd is None else f"{100 * mean:z.1f} ± {100 * sd:.1f}"


def _of_seeds(scores: Scores) -> str:
    return _score(mean_sd(list(scores.values()))) if scores else "–"


def _by_stream(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Per stream and backbone: the evolution of the average, all methods in one chart."""
    keys = dict.fromkeys((group.stream, group.backbone) for group in groups)
    order = list(dict.fromkeys(group.label for group in groups))  # one colour on all charts
    found = []
    for stream, backbone in keys:
        own = [group for group in groups if (group.stream, group.backbone) == (stream, backbone)]
        tasks = list(own[0].runs[0]["tasks"])
        curves = {group.label: curve for group in own if (curve := group.mean_curve())}
        title = "Average score of the tasks learnt so far"
        chart = line_chart(curves, tasks, title, order=order)
        about = {"stream": stream, "backbone": backbone, "tasks": tasks}
        without = [group.label for group in own if group.label not in curves]
        found.append({**about, "chart": Markup(chart), "without": without})
    return found


def _details(group: Group) -> dict[str, Any]:
    """The sections of one group; charts of single runs show its first seed."""
    run = group.runs[0]
    tasks = list(run["tasks"])
    cost = run["costs"]
    return {
        "group": group,
        "run": run,
        "is_long": len(tasks) > MOST_ROWS,
        "matrix": Markup(_matrix(group, tasks)),
        "ends": Markup(_ends(group, tasks)),
        "transfer": Markup(_transfer(group, tasks)),
        "scale": Markup(_scale(run, tasks)),
        "keeps": Markup(_keeps(run, tasks)),
        "time": Markup(line_chart({"seconds": [c["seconds"] for c in cost]}, tasks, "Seconds per task", False, 0.0)),
        "memory": Markup(
            line_chart(
                {"live tensors, MiB": [_live_bytes(c) / 2**20 for c in cost]},
                tasks, "Live tensors after each task (MiB)", False, 0.0,
            )
        ),
        "rows": Markup(
            line_chart(
                {"rows": [float(run["tasks"][t]["prompt_rows"]) for t in tasks]},
                tasks, "Prompt vectors per task", False, 0.0,
            )
        ),
    }  # fmt: skip


def _has_inner_cells(matrix: Sequence[Sequence[float | None]]) -> bool:
    """Whether an earlier task was asked between its own lesson and the end of the stream."""
    return any(value is not None for i, row in enumerate(matrix[1:-1]) for value in row[:i])


def _matrix(group: Group, tasks: Sequence[str]) -> str:
    """All measured scores; nothing where a chart of each task's two says the same."""
    matrix = group.mean_matrix()
    if len(tasks) > 2 and not _has_inner_cells(matrix):
        return ""
    return heat_table(matrix[1:], tasks, tasks, 0.3, 1.0)


def _ends(group: Group, tasks: Sequence[str]) -> str:
    """Every task when it was learnt and at the end."""
    end = [score for score in group.mean_matrix()[-1] if score is not None]
    lines = {"at the end": end, "when learnt": group.when_learnt()}
    return line_chart({k: line for k, line in lines.items() if line}, tasks, "Score of each task")


def _transfer(group: Group, tasks: Sequence[str]) -> str:
    """Backward transfer per task, and forward transfer where the next task was scored before it was learnt."""
    matrix, learnt = group.mean_matrix(), group.when_learnt()
    if not learnt:
        return ""
    last = len(tasks)
    backward = [(matrix[last][j] or 0) - learnt[j] for j in range(last)]
    series = {"backward: end - when learnt": backward}
    before = [matrix[j][j] for j in range(last)]
    if all(value is not None for value in before[1:]) and matrix[0][0] is not None:
        forward = [(matrix[j][j] or 0) - (matrix[0][j] or 0) for j in range(last)]
        series["forward: before learning - untrained"] = forward
    return line_chart(series, tasks, "Backward and forward transfer per task")


def _scale(run: dict[str, Any], tasks: Sequence[str]) -> str:
    """The learnt row weights u of each task, averaged over each prompt of its queue."""
    length = run["settings"]["prompt_length"]
    rows = []
    widest = 0
    for task in tasks:
        weights = run["tasks"][task]["scale"]
        means = [sum(weights[i : i + length]) / length for i in range(0, len(weights), length)]
        rows.append([float(mean) for mean in means])
        widest = max(widest, len(means))
    if not widest or all(value == 1.0 for row in rows for value in row):
        return ""
    values = [value for row in rows for value in row]
    padded: list[list[float | None]] = [[*row, *[None] * (widest - len(row))] for row in rows]
    places = [f"place {i + 1} of the queue" for i in range(widest)]
    return heat_table(padded, tasks, places, min(values), max(values), "plain")


def _keeps(run: dict[str, Any], tasks: Sequence[str]) -> str:
    """Share of each task's prompt that the queue still spans after each later task."""
    if not run["queue_keeps"]:
        return ""
    full: list[list[float | None]] = [
        [*row, *[None] * (len(tasks) - len(row))] for row in run["queue_keeps"]
    ]
    return heat_table(full, tasks, tasks, 0.0, 1.0)


def _live_bytes(cost: dict[str, Any]) -> int:
    """Of all tensors, or of those on cards where only these were counted."""
    found: int = cost["live_tensor_bytes"] if "live_tensor_bytes" in cost else cost["card_bytes"]
    return found
