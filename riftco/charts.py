"""Line charts as SVG text: linear or logarithmic axes with round ticks, and gaps where values are missing.

Colours come from CSS classes of the page around it (`series-0`, `series-1`, `grid`, `axis`), so a chart follows the
page's light and dark themes. `riftco.report` is the page.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_BUCKETS = 600  # more points than this on a line are drawn as the least and the largest of each bucket
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 42
_FONT = 13

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One named row of (x, y) points, in the order of x. A y that is not finite leaves a gap."""

    label: str
    points: Sequence[Point]
    color: int = 0
    style: Literal["line", "faint", "dots"] = "line"


def smooth(points: Sequence[Point], span: int) -> list[Point]:
    """The mean over about `span` points around each, so that the curve lags behind nothing.

    Towards the ends the window shrinks on both sides. Values that are not finite count nowhere and stay gaps.
    """
    sums, counts = [0.0], [0]
    for _, y in points:
        sums.append(sums[-1] + (y if math.isfinite(y) else 0.0))
        counts.append(counts[-1] + math.isfinite(y))
    result: list[Point] = []
    for i, (x, y) in enumerate(points):
        half = min(span // 2, i, len(points) - 1 - i)
        first, last = i - half, i + half + 1
        known = math.isfinite(y)
        result.append((x, (sums[last] - sums[first]) / (counts[last] - counts[first]) if known else math.nan))
    return result


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    width: int = 640,
    height: int = 260,
    x_label: str = "step",
    log: bool = True,
) -> str:
    """An `<svg>` element.

    Args:
        title: read out for those who cannot see the chart; escaped.
        series: what to draw, the first one lowest; labels are escaped.
        width: of the viewBox; the page scales it.
        height: of the viewBox.
        x_label: what x counts.
        log: whether y may become logarithmic, which it does when all values are positive and span over two decades.

    Returns:
        The element, or a paragraph that says that there is nothing to draw.
    """
    finite = [point for row in series for point in row.points if all(map(math.isfinite, point))]
    if not finite:
        return '<p class="empty">No finite values were recorded.</p>'
    ys = [y for _, y in finite]
    logarithmic = log and min(ys) > 0 and max(ys) / min(ys) > 100
    x_axis = _Axis.around([x for x, _ in finite], (_LEFT, width - _RIGHT), tight=True, whole=True)
    y_axis = _Axis.around(ys, (height - _BOTTOM, _TOP), logarithmic=logarithmic)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}" font-size="{_FONT}">',
        *_grid(x_axis, y_axis, width, height, x_label + ("" if not logarithmic else " (vertical axis logarithmic)")),
        *(_draw(row, x_axis, y_axis) for row in series),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


# ---- axes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    pixels: tuple[float, float]
    ticks: Sequence[float]
    logarithmic: bool = False

    @classmethod
    def around(
        cls,
        values: Sequence[float],
        pixels: tuple[float, float],
        *,
        logarithmic: bool = False,
        tight: bool = False,
        whole: bool = False,
    ) -> "_Axis":
        """An axis that holds the values, its ends on ticks unless `tight`."""
        low, high = min(values), max(values)
        if logarithmic:
            exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            stride = max(1, math.ceil(len(exponents) / 7))
            return cls(
                10.0 ** exponents[0], 10.0 ** exponents[-1], pixels, [10.0**e for e in exponents[::stride]], True
            )
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value, or as good as one
            pad = 1.0 if whole else (0.1 * abs(high) or 1.0)
            low, high = low - pad, high + pad
        step = _round_step((high - low) / (6 if whole else 5), whole)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = [n * step for n in range(first, last + 1)]
        if tight:
            return cls(low, high, pixels, [tick for tick in ticks if low <= tick <= high])
        return cls(ticks[0], ticks[-1], pixels, ticks)

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.pixels[0] + (self.pixels[1] - self.pixels[0]) * (value - low) / (high - low)


def _round_step(rough: float, whole: bool) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `rough`; at least 1 for whole numbers."""
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return max(1.0, step) if whole else step


def tick_label(value: float) -> str:
    """`0`, `250`, `1.5k`, `20M`, `0.05`, `3e-5`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 9.99e-5 or size >= 1e12:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit * (1 - 1e-9):
            return f"{value / limit:.4g}{suffix}"
    return f"{value:.4g}"


def _grid(x_axis: _Axis, y_axis: _Axis, width: int, height: int, x_label: str) -> list[str]:
    right, bottom = width - _RIGHT, height - _BOTTOM
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="axis" x="{_LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">{tick_label(tick)}</text>'
        )
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        anchor = "end" if x > right - 12 else "middle"
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(
            f'<text class="axis" x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}">{tick_label(tick)}</text>'
        )
    middle = (_LEFT + right) / 2
    parts.append(f'<line class="tick" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(
        f'<text class="axis" x="{middle:.1f}" y="{height - 5}" text-anchor="middle">{html.escape(x_label)}</text>'
    )
    return parts


# ---- series ----------------------------------------------------------------------------------------------------------


def _draw(row: Series, x_axis: _Axis, y_axis: _Axis) -> str:
    def dot(point: Point, radius: float) -> str:
        x, y = x_axis.at(point[0]), y_axis.at(point[1])
        return f'<circle class="series-{row.color} dot" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'

    parts = []
    for run in _runs(row.points):
        if len(run) > 1:
            spots = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in run)
            style = "faint" if row.style == "faint" else "line"
            parts.append(f'<polyline class="series-{row.color} {style}" points="{spots}"/>')
        if len(run) == 1 or (row.style == "dots" and len(run) <= 80):
            parts.extend(dot(point, 3.5) for point in run)
    return "\n".join(parts)


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """The points between gaps, thinned to what a screen can show."""
    runs: list[list[Point]] = [[]]
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [_thin(run) for run in runs if run]


def _thin(run: list[Point]) -> list[Point]:
    if len(run) <= 2 * _BUCKETS:
        return run
    result: list[Point] = []
    for bucket in range(_BUCKETS):
        part = run[bucket * len(run) // _BUCKETS : (bucket + 1) * len(run) // _BUCKETS]
        extremes = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        result.extend(sorted(extremes))
    return result
