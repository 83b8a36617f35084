"""Files of commands: figures, tables for spreadsheets, JSON; in a folder or at an fsspec URL."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mup_tpu.config.values import visible
from mup_tpu.errors import ConfigError, TableError, reason
from mup_tpu.files import Folder
from mup_tpu.files.leftovers import scratch_folder

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def write_file(what: str, path: Path | str, content: str | bytes) -> None:
    """Put a file into its place, whole; `what` is its name in errors (TableError)."""
    folder, slash, name = str(path).rpartition("/")
    try:
        place = Folder(folder or slash or ".")
        place.write(name, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise TableError(f"{what} cannot be written: {reason(error)}") from None


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet; ConfigError where it is, or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"out {str(path)!r} exists already: give another --out") from None
    except OSError as error:
        raise ConfigError(f"out {str(path)!r} cannot be written: {reason(error)}") from None


def write_figures(figures: Mapping[str, Figure], folder: Path | str) -> list[str]:
    """Write figures as PNG and SVG; returns the paths of the PNG files."""
    from mup_tpu import plots

    written = []
    with scratch_folder() as scratch:
        for name, figure in figures.items():
            for file in plots.save_figure(figure, scratch, name):
                write_file(f"figures folder {folder}", f"{folder}/{file.name}", file.read_bytes())
                written.append(f"{folder}/{file.name}")
    return [path for path in written if path.endswith(".png")]


def to_csv(table: pd.DataFrame, **options: Any) -> str:
    """Write CSV without formulas for a spreadsheet: a quote goes before text with =, +, -, @ or a tab first.

    Control characters become escapes: a carriage return would begin a row, and so a formula.
    """

    def quoted(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return f"'{visible(value)}" if value.startswith(tuple("=+-@\t")) else visible(value)

    table = table.apply(lambda of: of.astype(object).map(quoted) if of.dtype.kind == "O" else of)
    return str(table.rename(columns=quoted).to_csv(index=False, **options))


def to_json(value: Any) -> str:
    """Write valid JSON: nan is null, infinities are text."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(v) for key, v in item.items()}
        if isinstance(item, list | tuple):
            return [plain(v) for v in item]
        if hasattr(item, "item"):
            item = item.item()
        if isinstance(item, float) and not math.isfinite(item):
            return None if math.isnan(item) else "inf" if item > 0 else "-inf"
        return round(item, 10) if isinstance(item, float) else item

    return json.dumps(plain(value), indent=1)
