"""Charts as inline SVG that take their colours from the page, so that light and dark both read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1b7f5c", "#c2543d", "#3b6fb6", "#9a6fb0", "#b8860b", "#5f6b73")
DASHES = ("", "7 4", "2 4")
"""For the second and third line of a colour."""


def _stroke(number: int) -> str:
    """Colour and dashes of a chart's line; the same again after eighteen."""
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="2"{dashed}'


def line_chart(
    series: Mapping[str, Sequence[float]],
    labels: Sequence[str],
    title: str,
    percent: bool = True,
    low: float | None = None,
    order: Sequence[str] = (),
) -> str:
    """One line per entry over the tasks; hovering a point names it. Its place in `order` gives a name its colour."""
    order = order or list(series)
    width, height, left, bottom, top = 720, 260, 52, 34, 14
    values = [value for line in series.values() for value in line]
    if not values:
        return ""
    floor = min(values) if low is None else low
    ceiling = max(values)
    pad = max(0.06 * (ceiling - floor), 0.01)  # a flat line still gets a scale around it
    floor, ceiling = (floor if low is not None else floor - pad), ceiling + pad
    ceiling = min(ceiling, 1.0) if percent else ceiling  # no score is above 100 %
    count = max(len(line) for line in series.values())

    def x(i: int) -> float:
        return left + (width - left - 12) * (i / max(count - 1, 1))

    def y(value: float) -> float:
        return top + (height - top - bottom) * (1 - (value - floor) / (ceiling - floor))

    def shown(value: float) -> str:
        return f"{100 * value:.1f} %" if percent else f"{value:,.4g}"

    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    ]
    for k in range(5):
        value = floor + (ceiling - floor) * k / 4
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - 12}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="tick" x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{shown(value)}</text>'
        )
    step = max(1, count // 10)
    for i in range(0, count, step):
        parts.append(
            f'<text class="tick" x="{x(i):.1f}" y="{height - 12}" text-anchor="middle">{i + 1}</text>'
        )
    for name, line in series.items():
        number = order.index(name)
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(line))
        parts.append(f'<g class="line"><polyline points="{points}" fill="none" {_stroke(number)}/>')
        for i, value in enumerate(line):
            task = labels[i] if i < len(labels) else str(i + 1)
            parts.append(
                f'<circle cx="{x(i):.1f}" cy="{y(value):.1f}" r="3.2" fill="{colour}">'
                f"<title>{escape(name)}, {escape(task)}: {shown(value)}</title></circle>"
            )
        parts.append("</g>")
    parts.append("</svg>")
    keys = "".join(
        f'<span class="key"><svg viewBox="0 0 26 10"><path d="M0 5H26" {_stroke(order.index(name))}/></svg>'
        f"{escape(name)}</span>"
        for name in series
    )
    return f'<figure><figcaption>{escape(title)}</figcaption>{"".join(parts)}<div class="keys">{keys}</div></figure>'


def heat_table(
    rows: Sequence[Sequence[float | None]],
    row_names: Sequence[str],
    column_names: Sequence[str],
    low: float,
    high: float,
    digits: str = "percent",
) -> str:
    """A matrix as a table whose cells are shaded from `low` to `high`; numbers stay readable as text."""
    head = "".join(
        f'<th title="{escape(name)}">{i + 1}</th>' for i, name in enumerate(column_names)
    )
    body = []
    for name, row in zip(row_names, rows, strict=True):
        cells = []
        for j, value in enumerate(row):
            if value is None:
                cells.append("<td></td>")
                continue
            share = min(max((value - low) / (high - low or 1), 0), 1)
            text = f"{100 * value:.0f}" if digits == "percent" else f"{value:.2f}"
            title = f"{name} / {column_names[j]}: {text}"
            cells.append(f'<td style="--heat:{share:.2f}" title="{escape(title)}">{text}</td>')
        body.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table class="heat"><tr><th></th>{head}</tr>{"".join(body)}</table></div>'
