"""A curve of losses as SVG text, without any package, for notebooks."""

import math
from collections.abc import Sequence
from html import escape

Point = tuple[int, float]
_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 34
_COLOURS = ("#1f77b4", "#d62728")


def curve_svg(lines: Sequence[tuple[str, Sequence[Point]]], x: str, y: str) -> str:
    """A drawing of up to two named lines of (iteration, value) with axes; values that are not finite are left out."""
    kept = [(name, [point for point in points if math.isfinite(point[1])]) for name, points in lines]
    points = [point for _, of_line in kept for point in of_line]
    if not points:
        return ""
    steps, values = [p[0] for p in points], [p[1] for p in points]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    first, last = min(steps), max(*steps, min(steps) + 1)

    def place(point: Point) -> str:
        across = _LEFT + (point[0] - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)
        up = _TOP + (high - point[1]) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{up:.1f}"

    base = _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="11" fill="currentColor">',
        f'<path d="M{_LEFT},{_TOP}V{base}H{_WIDTH - _RIGHT}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>',
    ]
    for value in (low, (low + high) / 2, high):
        _, _, up = place((first, value)).partition(",")
        parts.append(f'<text x="{_LEFT - 6}" y="{float(up) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for step, anchor in ((first, "start"), (last, "end")):
        across, _, _ = place((step, low)).partition(",")
        parts.append(f'<text x="{across}" y="{base + 14}" text-anchor="{anchor}">{step}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text x="{_LEFT + 6}" y="{_TOP + 8}">{escape(y)}</text>')
    for index, (name, of_line) in enumerate(kept):
        if not of_line:
            continue
        colour = _COLOURS[index % len(_COLOURS)]
        drawn = " ".join(map(place, of_line))
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        across, up = place(of_line[-1]).split(",")
        parts.append(f'<circle cx="{across}" cy="{up}" r="2.5" fill="{colour}"/>')
        where = f'x="{_WIDTH - _RIGHT}" y="{_TOP + 10 + 14 * index}"'
        parts.append(f'<text {where} text-anchor="end" fill="{colour}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])
