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
    steps, values = zip(*points, strict=True)
    first, last = min(steps), max(*steps, min(steps) + 1)
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    base, end = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [f'<path d="M{_LEFT},{_TOP}V{base}H{end}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>']

    def place(point: Point) -> tuple[float, float]:
        across, up = (point[0] - first) / (last - first), (high - point[1]) / (high - low)
        return _LEFT + across * (end - _LEFT), _TOP + up * (base - _TOP)

    def write(words: str, across: float, up: float, anchor: str, colour: str = "currentColor") -> None:
        parts.append(
            f'<text x="{across:.1f}" y="{up:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
        )

    for value in (low, (low + high) / 2, high):
        write(f"{value:.4g}", _LEFT - 6, place((first, value))[1] + 4, "end")
    write(str(first), _LEFT, base + 14, "start")
    write(str(last), end, base + 14, "end")
    write(x, _WIDTH / 2, _HEIGHT - 6, "middle")
    write(y, _LEFT + 6, _TOP + 8, "start")
    for index, (name, of_line) in enumerate(kept):
        if of_line:
            colour, drawn = _COLOURS[index % len(_COLOURS)], [place(point) for point in of_line]
            corners, (across, up) = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn), drawn[-1]
            parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
            parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="2.5" fill="{colour}"/>')
            write(name, end, _TOP + 10 + 14 * index, "end", colour)
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="currentColor"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'
