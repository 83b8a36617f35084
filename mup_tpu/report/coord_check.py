"""Reports of coordinate checks."""

from __future__ import annotations

import pandas as pd

from mup_tpu.analysis.coord_check import by_setting, scale_of, sentences
from mup_tpu.config.columns import label
from mup_tpu.plots import name as name_of
from mup_tpu.plots import ordered
from mup_tpu.report.page import Block, Box, Interactive, Page, Section, interactive
from mup_tpu.report.tables import slopes_table
from mup_tpu.report.words import said


def coordinate_check_page(name: str, table: pd.DataFrame) -> Page:
    """Report of a coordinate check's measurements: lines and slopes of all layers, by setting.

    Raises:
        TableError: Bokeh is not installed, or it is no such table.
    """
    scale, lead, sections = label(scale_of(table)), [], []
    for part in by_setting(table).values():
        setting = _setting(part)
        lead += _boxes(part, setting)
        title = f"Sizes against {scale}, a line a layer; none should rise"
        blocks: list[Block] = [
            Interactive(title, interactive().coordinate_check_panels(part)),
            slopes_table(part, ordered(part["parametrization"].unique())),
        ]
        sections.append(Section(setting or "Figure", blocks))
    return Page(
        f"{name}: do activations and updates keep their size as {scale} grows?",
        lead,
        sections,
        f"A slope is the exponent of a layer's size in {scale}, fitted over all seeds after the last step; a "
        "positive one means that it grows without bound. Intervals are 95 %.",
    )


def _boxes(part: pd.DataFrame, setting: str) -> list[Box]:
    """A box a parametrization, in the colour of whether it passes."""
    found: dict[str, list[str]] = {name: [] for name in ordered(part["parametrization"].unique())}
    for sentence in sentences(part):
        found[sentence.partition(": ")[0]].append(sentence)
    return [
        Box(
            said(said_of[0]),
            [setting, *map(said, said_of[1:])] if setting else [*map(said, said_of[1:])],
            decision=next((word for word in ("passes", "fails") if f": {word}" in said_of[0]), ""),
        )
        for said_of in found.values()
        if said_of
    ]


def _setting(part: pd.DataFrame) -> str:
    """Update rule and tying of a part; "" if unknown."""
    if not {"optimizer", "tied"} <= set(part):
        return ""
    rule, tied = str(part["optimizer"].iloc[0]), bool(part["tied"].iloc[0])
    return f"{name_of(rule, 'optimizer')}, {'tied' if tied else 'untied'} embeddings"
