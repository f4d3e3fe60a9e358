"""Tables as Markdown, LaTeX and CSV; figures as PNG or SVG."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

from qtuning.errors import ConfigError
from qtuning.report.tables import Group

HEADINGS = ("stream", "method", "backbone", "seeds", "shots", "average", "sd", "backward transfer")


def table_rows(groups: Sequence[Group]) -> list[list[str]]:
    """One row per group, numbers in percent."""
    rows = []
    for group in groups:
        mean, sd = group.mean_sd("average_score")
        backward, _ = group.mean_sd("backward_transfer")
        rows.append(
            [
                group.stream,
                group.label,
                group.backbone,
                " ".join(map(str, group.seeds)),
                str(group.runs[0]["settings"]["shots"] or "all"),
                f"{100 * mean:.1f}",
                "" if sd is None else f"{100 * sd:.1f}",
                "" if math.isnan(backward) else f"{100 * backward:z.1f}",
            ]
        )
    return rows


def to_markdown(groups: Sequence[Group]) -> str:
    """A GitHub table."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    return (
        "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in table_rows(groups))]) + "\n"
    )


def to_latex(groups: Sequence[Group]) -> str:
    """A booktabs table."""

    def escaped(text: str) -> str:
        return text.replace("_", r"\_").replace("%", r"\%").replace("&", r"\&")

    body = [" & ".join(map(escaped, row)) + r" \\" for row in table_rows(groups)]
    head = " & ".join(HEADINGS) + r" \\"
    columns = "l" * 5 + "r" * 3
    begin = rf"\begin{{tabular}}{{{columns}}}"
    end = [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([begin, r"\toprule", head, r"\midrule", *body, *end])


def to_csv(groups: Sequence[Group]) -> str:
    """Comma-separated values."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADINGS)
    writer.writerows(table_rows(groups))
    return out.getvalue()


def save_figures(groups: Sequence[Group], folder: Path, ending: str) -> list[Path]:
    """The evolution of the average and each score matrix, as PNG or SVG files."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'qtuning[report]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for stream, backbone in dict.fromkeys((g.stream, g.backbone) for g in groups):
        own = [g for g in groups if (g.stream, g.backbone) == (stream, backbone)]
        curves = {group.label: curve for group in own if (curve := group.mean_curve())}
        if curves:  # none where every method was asked at the end alone
            figure, axis = pyplot.subplots(figsize=(7, 3.6))
            for number, (label, curve) in enumerate(curves.items()):
                style = ("-", "--", ":")[number // 10 % 3]  # there are ten colours
                places = range(1, len(curve) + 1)
                axis.plot(places, [100 * v for v in curve], f"o{style}", label=label, markersize=3)
            axis.set(
                xlabel="tasks learnt",
                ylabel="average score so far (%)",
                title=f"{stream} on {backbone}",
            )
            axis.legend(frameon=False, fontsize=8)
            axis.spines[["top", "right"]].set_visible(False)
            made.append(folder / f"{_file_name(stream, backbone, 'average')}.{ending}")
            figure.savefig(made[-1], dpi=140, bbox_inches="tight")
            pyplot.close(figure)
        for group in own:
            matrix = [
                [float("nan") if v is None else 100 * v for v in row]
                for row in group.mean_matrix()[1:]
            ]
            figure, axis = pyplot.subplots(figsize=(4.6, 4))
            image = axis.imshow(matrix, cmap="viridis", vmin=0, vmax=100)
            axis.set(xlabel="task", ylabel="after task", title=f"{group.label} on {stream}")
            figure.colorbar(image, shrink=0.8)
            name = _file_name(stream, backbone, group.label, "matrix")
            made.append(folder / f"{name}.{ending}")
            figure.savefig(made[-1], dpi=140, bbox_inches="tight")
            pyplot.close(figure)
    return made


def _file_name(*words: str) -> str:
    """Words that may hold anything, as the name of a file."""
    return re.sub(r"[^\w.+-]+", "-", "-".join(words)).strip("-")
