"""Reports of coordinate checks."""

from __future__ import annotations

import pandas as pd

from mup_tpu.analysis.coord_check import by_setting, conclusions, scale_of
from mup_tpu.config.columns import label
from mup_tpu.report.page import Block, Box, Interactive, Page, Section, interactive
from mup_tpu.words.names import name, ordered
from mup_tpu.words.tables import conclusion, slopes_table


def coordinate_check_page(title: str, table: pd.DataFrame) -> Page:
    """Report of a coordinate check's measurements: lines and slopes of all layers, by setting.

    Raises:
        TableError: Bokeh is not installed, or it is no such table.
    """
    scale, lead, sections = label(scale_of(table)), [], []
    for part in by_setting(table).values():
        setting = _setting(part)
        lead += _boxes(part, setting)
        blocks: list[Block] = [
            Interactive(
                f"Sizes against {scale}, a line a layer; none should rise",
                interactive().coordinate_check_panels(part),
            ),
            slopes_table(part, ordered(part["parametrization"].unique())),
        ]
        sections.append(Section(setting or "Figure", blocks))
    return Page(
        f"{title}: do activations and updates keep their size as {scale} grows?",
        lead,
        sections,
        f"A slope is the exponent of a layer's size in {scale}, fitted over all seeds after the last step; a "
        "positive one means that it grows without bound. Intervals are 95 %.",
    )


def _boxes(part: pd.DataFrame, setting: str) -> list[Box]:
    """A box a parametrization, in the colour of whether it passes."""
    found, boxes = {one.parametrization: one for one in conclusions(part)}, []
    for rule in ordered(found):
        lines = conclusion(found[rule], scale_of(part), name(rule))
        decision = "" if found[rule].fastest is None else "passes" if found[rule].passes else "fails"
        boxes.append(Box(lines[0], [*([setting] if setting else []), *lines[1:]], decision=decision))
    return boxes


def _setting(part: pd.DataFrame) -> str:
    """Update rule and tying of a part; "" if unknown."""
    if not {"optimizer", "tied"} <= set(part):
        return ""
    rule, tied = str(part["optimizer"].iloc[0]), bool(part["tied"].iloc[0])
    return f"{name(rule, 'optimizer')}, {'tied' if tied else 'untied'} embeddings"
