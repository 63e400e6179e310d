"""How executions look in a notebook: HTML without scripts, with all texts escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import Any

from .curves import Curve
from .errors import ClientError
from .job import AsyncJob
from .status import Status

_COLORS = {
    "completed": "#2e7d32",
    "started": "#1565c0",
    "bound": "#5c6bc0",
    "pending": "#9e9e9e",
    "queued": "#bdbdbd",
    "paused": "#f9a825",
    "held": "#ef6c00",
    "verifying": "#00838f",
    "failed": "#c62828",
    "cancelled": "#6d4c41",
    "returned": "#78909c",
}
_WIDTH = 640
_LANE = 18
_LABEL = 96
_CURVE = 48
_CURVES = 6
_POINTS = 300


@dataclass(frozen=True)
class Seen:
    """What is shown of an execution."""

    name: str
    status: Status
    placements: Sequence[Mapping[str, Any]]
    curves: Mapping[str, Curve]
    notice: str = ""


async def read(job: AsyncJob) -> Seen:
    """Reads what is shown.

    Without the history there is no timeline.
    """
    how = await job.status()
    try:
        return Seen(job.id, how, await job.placements(), await job.curves())
    except ClientError as error:
        return Seen(job.id, how, (), {}, str(error))


def of_job(seen: Seen) -> str:
    """An execution: its phase, a lane for each node where it was, and its curves."""
    how = seen.status
    where = f" on <b>{escape(how.node)}</b>" if how.node and not how.ended else ""
    of = f" of {how.of}" if how.of is not None else ""
    words = [f"boundary {how.boundary}{of}"] if how.boundary else []
    words += [escape(text) for text in (how.note, how.reason, seen.notice) if text]
    parts = [
        f"<div><b>{escape(seen.name)}</b> {_badge(how.phase)}{where}"
        f"<div style='opacity:.8'>{' · '.join(words)}</div>"
    ]
    if seen.placements:
        parts.append(_timeline(seen.placements))
    for curve in list(seen.curves.values())[:_CURVES]:
        parts.append(_curve(curve))
    if len(seen.curves) > _CURVES:
        parts.append(f"<div>and {len(seen.curves) - _CURVES} more curves</div>")
    return "".join(parts) + "</div>"


def of_counts(name: str, counts: Mapping[str, int]) -> str:
    """Many executions: how many are in each phase."""
    total = sum(counts.values()) or 1
    at, bars, legend = 0.0, [], []
    for phase, color in _COLORS.items():
        if count := counts.get(phase, 0):
            width = _WIDTH * count / total
            place = f"x='{at:.1f}' y='0' width='{width:.1f}' height='14'"
            bars.append(f"<rect {place} fill='{color}'/>")
            legend.append(f"{_badge(phase)} {count:,}")
            at += width
    return (
        f"<div><b>{escape(name)}</b>: {total:,} executions<br>{_svg(14, ''.join(bars))}<br>"
        f"{' '.join(legend)}</div>"
    )


def _badge(phase: str) -> str:
    color = _COLORS.get(phase, "#9e9e9e")
    return f"<span style='color:{color}'>●</span> {escape(phase)}"


def _svg(height: float, content: str) -> str:
    return (
        f"<svg viewBox='0 0 {_WIDTH} {height:.0f}' style='width:100%;max-width:{_WIDTH}px' "
        f"role='img'>{content}</svg>"
    )


def _text(x: int, y: int, size: int, words: str, anchor: str = "start") -> str:
    place = f"x='{x}' y='{y}' font-size='{size}' text-anchor='{anchor}'"
    return f"<text {place} fill='currentColor'>{escape(words)}</text>"


def _timeline(rows: Sequence[Mapping[str, Any]]) -> str:
    now = datetime.now(timezone.utc)
    nodes = list(dict.fromkeys(str(row["node"]) for row in rows))
    first = min(row["bound_at"] for row in rows)
    last = max(row["ended_at"] or now for row in rows)
    span = max((last - first).total_seconds(), 1e-3)
    room = _WIDTH - _LABEL

    def x(moment: datetime) -> float:
        return float(_LABEL + room * (moment - first).total_seconds() / span)

    drawn = []
    for nth, node in enumerate(nodes):
        y = nth * _LANE
        drawn.append(_text(0, y + 13, 12, node[:14]))
        for row in rows:
            if row["node"] != node:
                continue
            begin, end = x(row["bound_at"]), x(row["ended_at"] or now)
            words = f"{row['cause']}, epoch {row['epoch']}"
            if row["end_reason"]:
                words += f", until {row['end_reason']}"
            drawn.append(
                f"<rect x='{begin:.1f}' y='{y + 3}' width='{max(end - begin, 1.5):.1f}' "
                f"height='{_LANE - 6}' rx='2' fill='{_COLORS['started']}'>"
                f"<title>{escape(words)}</title></rect>"
            )
    height = len(nodes) * _LANE + 14
    drawn.append(_text(_LABEL, height - 2, 10, f"{first:%H:%M:%S}"))
    drawn.append(_text(_WIDTH, height - 2, 10, f"{span:,.1f} s", "end"))
    return _svg(height, "".join(drawn))


def _curve(curve: Curve) -> str:
    step = max(len(curve) // _POINTS, 1)
    points = [
        (at, value)
        for at, value in list(zip(curve.boundary, curve.value))[::step]
        if value is not None and value == value and abs(value) != float("inf")
    ]
    title = _text(0, 14, 12, curve.name[:14])
    if not points:
        return _svg(_LANE, title)
    lowest, highest = min(v for _, v in points), max(v for _, v in points)
    begin, end = points[0][0], points[-1][0]
    room, tall = _WIDTH - _LABEL, (highest - lowest) or 1.0
    line = " ".join(
        f"{_LABEL + room * (at - begin) / ((end - begin) or 1):.1f},"
        f"{_CURVE - 4 - (_CURVE - 8) * (value - lowest) / tall:.1f}"
        for at, value in points
    )
    last = _text(0, 30, 11, f"{curve.last:.6g}")
    stroke = f"fill='none' stroke='{_COLORS['started']}' stroke-width='1.5'"
    return _svg(_CURVE, f"{title}{last}<polyline points='{line}' {stroke}/>")
