"""A line chart as inline SVG, in the colours of report.html; pure."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 480, 230, 68, 24, 10
MAX_POINTS = 240  # of a line
COLOURS = 8
OUTLIERS = 0.02  # share of a curve's values that may lie above its axis: the first losses

Points = list[tuple[float, float]]


class Series(NamedTuple):
    """One line: its name in the legend, where, which colour, and whether it is dashed."""

    name: str
    points: Points
    colour: int
    dashed: bool = False

    @property
    def stroke(self) -> str:
        """Attributes of what is drawn."""
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        return f'stroke="var(--c{self.colour % COLOURS})"{dash}'


def thinned(points: Points) -> Points:
    """At most `MAX_POINTS`, each the mean of its neighbours; the last one stays as it is."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return points
    groups = [points[at : at + size] for at in range(0, len(points) - 1, size)]
    means = [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
    return [*means[:-1], points[-1]]


def ticks(low: float, high: float, number: int = 4) -> list[float]:
    """Round values from low to high."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / number
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    return [round(n * step, 12) for n in range(first, math.ceil(high / step - 1e-9) + 1)]


def number(value: float) -> str:
    """A number for people."""
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def chart(title: str, unit: str, series: Sequence[Series]) -> str:
    """A line chart as a figure; '' without points."""
    shown = [one._replace(points=thinned(one.points)) for one in series if one.points]
    if not shown:
        return ""
    xs = [x for one in shown for x, _ in one.points]
    ys = sorted(y for one in shown for _, y in one.points)
    top = ys[max(0, math.ceil(len(ys) * (1 - OUTLIERS)) - 1)]
    y_ticks = ticks(min(0.0, ys[0]) if ys[0] < top / 2 else ys[0], top)
    x_ticks = [x for x in ticks(min(xs), max(xs), 5) if x <= max(xs)]
    x0, x1 = min(min(xs), x_ticks[0]), max(max(xs), x_ticks[0] + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        down = (y_ticks[-1] - min(y, y_ticks[-1])) / (y_ticks[-1] - y_ticks[0])
        right = (x - x0) / (x1 - x0)
        return LEFT + right * (WIDTH - LEFT - 12), TOP + down * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y in y_ticks:
        at = place(x0, y)[1]
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 12}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in x_ticks:
        at = place(x, y_ticks[0])[0]
        anchor = "end" if at > WIDTH - 30 else "middle"
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - 5}" text-anchor="{anchor}">{number(x)}</text>'
        )
    parts += [_curve(one, [place(x, y) for x, y in one.points]) for one in shown]
    legend = "".join(
        f'<span><svg viewBox="0 0 18 4"><path d="M0 2H18" {one.stroke} stroke-width="3"/></svg>'
        f"{escape(one.name)} {number(one.points[-1][1])}</span>"
        for one in shown
    )
    return (
        f"<figure><figcaption>{escape(title)}<small>{escape(unit)}</small></figcaption>"
        f'<div class="legend">{legend}</div><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}, {escape(unit)}">{"".join(parts)}</svg></figure>'
    )


def _curve(series: Series, places: Points) -> str:
    """A line, and a spot at each point that says its value."""
    alone = len(places) == 1  # a line needs two ends
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places * (2 if alone else 1))
    ends = ' class="point"' if alone else ""
    spots = [
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5"><title>{escape(series.name)}, {number(x)}: '
        f"{number(y)}</title></circle>"
        for (px, py), (x, y) in zip(places, series.points, strict=True)
    ]
    return f'<polyline points="{line}"{ends} {series.stroke}/>{"".join(spots)}'
