"""Figures for a page: SVG whose points have tooltips, and whose key hides curves on a click.

matplotlib draws the same figure as for a PNG file. Then everything that `describe` has named gets an
attribute for the page's script, and transparent circles and boxes with a `<title>` lie over points and key.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from scipy.spatial import cKDTree

from mup_tpu.config.values import visible
from mup_tpu.plots.style import STYLE, keys_of

# Least and largest reach of a tooltip around its point, in points of type: a marker alone is hard to hit
_RADIUS = (2.0, 5.0)
_MOST_RUNS = 6  # most runs that a tooltip lists one by one


def describe(artist: Artist, entry: str, texts: Sequence[str] = ()) -> None:
    artist.entry, artist.texts = entry, texts  # type: ignore[attr-defined]


def loss_text(loss: float, error: float | None = None) -> str:
    """Write a loss with its standard error, to the six digits that float32 carries."""
    return f"loss {loss:.6g}" + ("" if error is None else f" ± {error:.2g}")


def run_lines(runs: pd.DataFrame | None) -> list[str]:
    """Write a line a run: seed, loss, and trial where known."""
    lines = []
    runs = pd.DataFrame() if runs is None else runs
    for run in runs.sort_values("seed").head(_MOST_RUNS).to_dict("records") if len(runs) else []:
        fate = "refused" if run.get("refused") else "stopped early" if run.get("stopped") else "diverged"
        seed = run["seed"] if isinstance(run["seed"], str) else f"{run['seed']:g}"
        trial = f", trial {run['trial_id']}" if pd.notna(run.get("trial_id")) and run["trial_id"] else ""
        lines.append(f"seed {seed}: {loss_text(run['loss']) if np.isfinite(run['loss']) else fate}{trial}")
    return [*lines, f"and {len(runs) - _MOST_RUNS} more"] if len(runs) > _MOST_RUNS else lines


def svg(figure: Figure, prefix: str) -> str:
    """Return a figure as an `<svg>` element; `prefix` keeps its ids apart from those of other figures."""
    described = [artist for artist in figure.findobj() if hasattr(artist, "entry")]
    entries = {name: i for i, name in enumerate(dict.fromkeys(artist.entry for artist in described))}
    for artist in described:
        artist.set_gid(f"entry-{entries[artist.entry]}")
    with matplotlib.rc_context(STYLE):
        if (layout := figure.get_layout_engine()) is not None:
            layout.execute(figure)
        figure.set_layout_engine(None)  # places of points stay those of the file
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :].rstrip().removesuffix("</svg>")
    text = re.sub(r'<g id="entry-(\d+)">', r'<g data-entry="\1">', text)
    # Hundredths of a point are enough; without comments, ids of groups and indents half of the bytes is left.
    text = re.sub(r"(?<!scale\(0)(\.\d\d)\d+", r"\1", text)
    text = re.sub(r"\s+", " ", re.sub(r'<!--.*?-->|(?<=<g) id="[^"]*"', "", text))
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    overlay = [*_tooltips(figure, described, entries), *_buttons(figure, described, entries)]
    return "\n".join([text, *overlay, "</svg>"]) if overlay else f"{text}</svg>"


def _tooltips(figure: Figure, described: Sequence[Any], entries: dict[str, int]) -> Iterator[str]:
    """Return a transparent circle a point that its panel shows."""
    points: list[tuple[float, float, int, str]] = []
    for artist in described:
        if len(artist.texts):
            places = artist.get_transform().transform(np.asarray(artist.get_xydata(), float))
            for place, text in zip(places, artist.texts, strict=True):
                if text and artist.axes.bbox.contains(*place):
                    points.append((*_on_page(figure, *place), entries[artist.entry], text))
    if not points:
        return
    places = np.array([point[:2] for point in points])
    nearest = cKDTree(places).query(places, k=2)[0][:, 1]
    # Of close points the pointer finds the nearest, so their circles may not overlap.
    for (left, top, entry, text), radius in zip(points, np.clip(nearest / 2, *_RADIUS), strict=True):
        yield (
            f'<circle class="point" data-entry="{entry}" cx="{left:.1f}" cy="{top:.1f}" r="{radius:.1f}">'
            f"{_title(text)}</circle>"
        )


def _buttons(figure: Figure, described: Sequence[Any], entries: dict[str, int]) -> Iterator[str]:
    """Return a transparent button an entry of a key that hides something."""
    of_label = {name: name for name in entries} | {a.get_label(): a.entry for a in described}
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    keys: list[Any] = keys_of(figure)
    for key in keys:
        for label, handle, text in zip(key.labels, key.legend_handles, key.get_texts(), strict=True):
            if label not in of_label:
                continue
            entry = of_label[label]
            plain = entry.replace(r"\$", "$")
            box = matplotlib.transforms.Bbox.union(
                [handle.get_window_extent(renderer), text.get_window_extent(renderer)]
            ).padded(3)
            (left, top), scale = _on_page(figure, box.x0, box.y1), 72 / figure.dpi
            yield (
                f'<rect class="button" data-key="{entries[entry]}" role="button" tabindex="0" '
                f'aria-pressed="true" x="{left:.1f}" y="{top:.1f}" width="{box.width * scale:.1f}" '
                f'height="{box.height * scale:.1f}">{_title(f"hide or show {plain}")}</rect>'
            )


def _on_page(figure: Figure, x: float, y: float) -> tuple[float, float]:
    return x * 72 / figure.dpi, (figure.bbox.height - y) * 72 / figure.dpi


def _title(text: str) -> str:
    return f"<title>{html.escape(visible(text))}</title>"
