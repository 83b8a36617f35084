"""The command line: `mup-tpu COMMAND`, also `python -m mup_tpu COMMAND`.

Commands are plain typed functions; their options come from their signatures and from the configuration's
dataclasses. Only the module of the command that runs is imported, so that help answers at once.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import functools
import gc
import importlib
import io
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import mup_tpu
from mup_tpu.errors import ConfigError
from mup_tpu.internals import leave_out_backends

__all__ = ["COMMANDS", "main"]


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the process at once where Ctrl-C comes during an import.

    An import may turn KeyboardInterrupt into a traceback or another error (numpy, torch), or swallow it.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            with contextlib.suppress(Exception):  # the interrupted code may hold the stream
                sys.stdout.flush()
                os.write(2, b"stopped\n")
            os._exit(130)
        frame = frame.f_back
    signal.default_int_handler(number, frame)


# Before the slow imports, all of which are inside of functions.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _interrupt)

# Module in this package, and summary, of each command
COMMANDS = {
    "init": ("study", "Write a first TOML file, which runs as it is."),
    "plan": ("target", "Plan the runs, within a budget, that predict a large model's hyperparameters."),
    "sweep": ("sweep", "Run the missing trials of a sweep."),
    "search": ("sweep", "Search several hyperparameters at once with Ray Tune."),
    "train": ("train", "Train one trial and print its loss."),
    "transfer": ("target", "Train a larger model with the hyperparameters of a search or sweep."),
    "ask": ("study", "Print trials of a study to run elsewhere, each trial once."),
    "tell": ("study", "Store the loss of a trial that `mup-tpu ask` printed."),
    "watch": ("watch", "Show a results folder as it fills: what analyze shows, time left, failures."),
    "analyze": ("analysis", "Print the optimum of every scale, its drift and regret, and the verdict."),
    "predict": ("analysis", "Predict the optimum at a scale that was not run."),
    "check": ("check", "Check that nothing grows or dies with the scale, and name the cause of what does."),
    "doctor": ("doctor", "Report packages, devices and folders, with a remedy for each problem."),
    "data prepare": ("train", "Write a corpus as tokenised shards that training streams."),
}

_COMPLETION = "`mup-tpu --print-completion bash` prints completions for a shell: bash, zsh or fish."
_DESCRIPTION = "Tune a narrow model, check that the optimum transfers, and train the wide model once."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command of `mup-tpu`; wrong input ends it with one sentence and exit code 2."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if words[:1] == ["help"]:  # `mup-tpu help sweep`, as git and uv have it
        words = [*words[1:], "--help"]
    if words in (["--version"], ["-V"]):
        print(f"mup-tpu {mup_tpu.__version__}")
        return
    if not words or words[0] in ("-h", "--help") or words in (["data"], ["data", "--help"], ["data", "-h"]):
        lines, group = ["usage: mup-tpu COMMAND [OPTIONS]", "", _DESCRIPTION, ""], words[:1] == ["data"]
        for name, (_, summary) in COMMANDS.items():
            if name.startswith("data" * group):
                lines += textwrap.wrap(summary, 78, initial_indent=f"  {name:14}", subsequent_indent=" " * 16)
        lines += ["", "`mup-tpu COMMAND --help` lists the options of a command.", _COMPLETION]
        try:
            print("\n".join(lines), flush=True)
        except BrokenPipeError:  # `mup-tpu --help | head`
            from mup_tpu.cli.console import discard_output

            discard_output()
        sys.exit(0 if words else 2)

    leave_out_backends()
    atexit.unregister(_end_quietly)
    atexit.register(_end_quietly)
    from mup_tpu.cli.console import guard

    guard(lambda: _run(words))


def _end_quietly() -> None:
    """Hide what nanobind (in triton, which torch imports) writes after the results when Python ends."""
    if "triton" in sys.modules:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _run(words: Sequence[str]) -> None:
    import tyro  # a tenth of a second, which the overview and --version do without

    from mup_tpu.cli.help import PARSING, SHELLS, misread, write_completion, write_help

    if words[0] == "--print-completion":
        if len(words) != 2 or words[1] not in SHELLS:
            raise ConfigError(f"--print-completion needs a shell: {', '.join(SHELLS)}")
        commands = {name: (_command(name), summary) for name, (_, summary) in COMMANDS.items()}
        print(write_completion(words[1], commands))
        return
    count = 2 if words[0] == "data" else 1
    name = " ".join(words[:count])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, "--help", "--version"], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}; {hint}")
    if name in ("analyze", "plan", "predict", "watch"):
        gc.set_threshold(100_000)  # otherwise collections take a sixth: each looks at all that was imported
        # Several threads on small matrices wait for each other: twenty times the time on a busy machine.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    command = _command(name)
    if {"-h", "--help", "--help-all"} & {*words[count:]}:
        print(write_help(name, command, every="--help-all" in words))
        sys.exit(0)
    given, shown = [*_repeated(words[count:])], io.StringIO()

    @functools.wraps(command)
    def read(*values: Any, **options: Any) -> Callable[[], None]:
        return functools.partial(command, *values, **options)

    try:
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
            run = tyro.cli(read, prog=f"mup-tpu {name}", args=given, config=PARSING)
    except SystemExit:
        raise ConfigError(misread(name, command, given, shown.getvalue())) from None
    run()


def _command(name: str) -> Callable[..., None]:
    module = importlib.import_module(f"mup_tpu.cli.{COMMANDS[name][0]}")
    command: Callable[..., None] = getattr(module, name.split()[-1])
    return command


# Form of the values of options that take several: a path behind them is not one of theirs
_VALUES = {
    "--at": r"[\w.]+=[^/\\]*|[\d.]+e\d+",
    "--columns": r"\w+=.*",
    "--states": r"[^=/]+=\w+",
    "--set": r"\w+=.*",
    "--where": r"[^=<>/]+[<>]?=.*",
}


def _repeated(words: Sequence[str]) -> Iterator[str]:
    """Yield the words with the option before each of its values: `--at width=64 --at depth=2`."""
    option, is_first = "", False
    for word in words:
        if option and not is_first and re.fullmatch(_VALUES[option], word):
            yield option
        elif not is_first:
            option = ""
        is_first = word in _VALUES
        option = word if is_first else option
        yield word
