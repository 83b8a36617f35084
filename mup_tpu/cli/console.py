"""Output of commands: console, files, and the end of a command.

The console shows foreign text safely, and failing output does not end the work.
Names and paths are shown as they are, never as Rich's markup; control characters are shown as escapes. Output
that cannot be written is noted, and `guard` reports it when the work is done.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import rich.console
from rich.segment import Segment
from rich.text import Text

from mup_tpu.config.values import VisibleFormatter, visible
from mup_tpu.errors import (
    ConfigError,
    MupTpuError,
    TableError,
    extra_with,
    fields_as_options,
    not_installed,
    reason,
)
from mup_tpu.files import Folder

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.status import Status


class Console(rich.console.Console):
    """Console that shows `[/b]`, `:smile:` and escape characters as they are; lines break between words."""

    failure: OSError | None = None  # first error of standard output in this process; later output is lost

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def print(self, *objects: Any, wrap: bool = True, **options: Any) -> None:
        """Print lines of text, and tables within the terminal's width.

        Without `wrap` lines stay whole, for commands, which people copy.
        """
        if wrap and self.is_terminal:
            objects = tuple(_wrapped(o, self.width) if isinstance(o, str) else o for o in objects)
        options.setdefault("soft_wrap", all(isinstance(o, str) for o in objects))
        try:
            super().print(*objects, **options)
        except OSError as error:
            self.lose(error)

    def write(self, text: str) -> None:
        try:
            print(visible(text), file=self.file, flush=True)
        except OSError as error:
            self.lose(error)

    def status(self, status: Any, **options: Any) -> Status:
        if not self.is_terminal:  # a quiet console cannot fail on a full disk
            return rich.console.Console(quiet=True).status(status, **options)
        return super().status(Text(status), **options)

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 (called where the error is handled; Rich would end the process)

    def lose(self, error: OSError) -> None:
        if not self.stderr:
            Console.failure = Console.failure or error
        discard_output(sys.stderr if self.stderr else sys.stdout)


def _wrapped(text: str, width: int) -> str:
    """Wrap lines between words; the rest of a broken line is indented by two more."""
    lines = []
    for line in _WITH_UNIT.sub("\N{NO-BREAK SPACE}", text).split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, max(width, 20), subsequent_indent=f"{indent}  ", break_long_words=False,
            break_on_hyphens=False, replace_whitespace=False,
        ) or [line]  # fmt: skip
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


# Space between a number and its unit, where no line breaks
_WITH_UNIT = re.compile(r"(?<=\d) (?=(nat|s|min|h|FLOP|octaves?)\b|%)")


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    """Show a bar on terminals; the yielded function takes the present work and the share that is done."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TaskProgressColumn()
    left, is_off = (TimeRemainingColumn(), TextColumn("left")), not console.is_terminal
    with Progress(*columns, *left, console=console, disable=is_off, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda doing, share: progress.update(task, description=doing, completed=share)


def discard_output(stream: TextIO | None = None) -> None:
    # A stream that failed once would fail again when Python ends.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def prepare_streams() -> None:
    """Write characters that the terminal's encoding lacks, and control characters of logs, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # nobody may read earlier output any more
                stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = _format_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())


_plain_format_warning = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, *arguments: Any, **options: Any
) -> str:
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"warning: {visible(str(message))}\n"
    return visible(_plain_format_warning(message, category, filename, *arguments, **options))


# Columns that an option names by role
ROLES = ("loss", "seed", "status", "step", "params", "tokens", "cost", "along")
# Field in a message -> its option, where that has another name
OPTIONS = {
    "hyperparameter": "--tune",
    "parametrization": "--compare",
    "unit": "--loss-unit",
} | {role: f"--columns {role}=" for role in ROLES}


def guard(call: Callable[[], Any]) -> None:
    """Run a command; an error that the user can mend becomes one sentence and an exit code."""
    prepare_streams()
    Console.failure = None
    try:
        with fields_as_options(OPTIONS):
            call()
        sys.stdout.flush()  # here an error still becomes a sentence
        if Console.failure is not None:
            raise Console.failure
    except MupTpuError as error:
        _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "mup_tpu" or extra_with(missing) is None:
            raise
        _fail(f"this command {not_installed(missing)}", 2)
    except KeyboardInterrupt as interrupt:
        Console(stderr=True).print(str(interrupt) or "stopped", style="yellow")
        with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader of the output
            sys.stdout.flush()
        # At exit libraries would wait for threads, and the interrupt may have left those hanging.
        os._exit(130)
    except OSError as error:
        if error.errno == errno.EPIPE:
            discard_output()  # the reader has read enough
            return
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            discard_output()
            _fail(f"{reason(error)}; stored results are kept; run the same command to continue", 2)
        _fail(": ".join(filter(None, (reason(error), error.filename))), 2)


def _fail(sentence: str, code: int) -> NoReturn:
    Console(stderr=True).print(f"error: {sentence}", style="red")
    sys.exit(code)


def write_file(what: str, path: Path | str, content: str | bytes) -> None:
    """Put a file into its place, whole; `what` is its name in errors (TableError)."""
    folder, slash, name = str(path).rpartition("/")
    try:
        place = Folder(folder or slash or ".")
        place.write(name, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise TableError(f"{what} cannot be written: {reason(error)}") from None


_DATA = (".json", ".toml", ".parquet", ".arrow")  # suffixes of files that no page or table is written over


def write_output(option: str, path: Path | str, content: str | bytes) -> None:
    """Write the file that an option names; ConfigError where it would take the place of data."""
    if str(path).endswith(_DATA) and Path(path).is_file():
        raise ConfigError(
            f"{option} {path} is not allowed: that file is data, and would be lost; give another name"
        )
    write_file(f"{option} {path}", path, content)


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
    from mup_tpu.files import scratch_folder

    written = []
    with scratch_folder() as scratch:
        for name, figure in figures.items():
            for file in plots.save_figure(figure, scratch, name):
                write_file(f"figures folder {folder}", f"{folder}/{file.name}", file.read_bytes())
                written.append(f"{folder}/{file.name}")
    return [path for path in written if path.endswith(".png")]


def to_csv(table: pd.DataFrame) -> bytes:
    import pyarrow as pa
    import pyarrow.csv  # takes a tenth of pandas' time

    sink = io.BytesIO()
    pa.csv.write_csv(pa.Table.from_pandas(table, preserve_index=False), sink)
    return sink.getvalue()


def to_json(value: Any, digits: int = 0) -> str:
    """Write valid JSON: nan is null, infinities are text; `digits` are the significant ones of fractions."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(v) for key, v in item.items()}
        if isinstance(item, list | tuple):
            return [plain(v) for v in item]
        if hasattr(item, "item"):
            item = item.item()
        if isinstance(item, float) and not math.isfinite(item):
            return None if math.isnan(item) else "inf" if item > 0 else "-inf"
        if isinstance(item, float) and digits and not item.is_integer():
            return float(f"{item:.{digits}g}")
        return round(item, 10) if isinstance(item, float) else item

    return json.dumps(plain(value), indent=1)
