"""Shared by the tests of commands."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

SWEEP_TOML = """
experiment = "small"
scale = {{width = [32]}}
tune = {{learning_rate = ["2^-7", 0.02]}}

[base.model]
base_width = 32
head_size = 16

[base.data]
corpus = {corpus!r}
sequence_length = 32
batch_size = 4

[base.train]
steps = 12
"""


FORKS = """
import json, os, sys
import mup_tpu.cli.analysis, mup_tpu.cli.results, mup_tpu.cli.train
import mup_tpu.models.weights, mup_tpu.training.loop
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast
for line in sys.stdin:
    program, arguments, out, err = json.loads(line)
    child = os.fork()
    if not child:
        for path, stream in ((os.devnull, 0), (out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), stream)
        sys.argv = ["mup-tpu", *arguments]
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        break  # Python ends as it does after any program
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
MAIN = "from mup_tpu.cli import main\nmain()\n"
Ended = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ended]]:
    """Runs a program, or `mup-tpu ARGUMENTS`, in a process forked from one that has imported torch.

    Standard output and error go to files of the test's, or are returned.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FORKS], text=True, **pipes) as server:  # type: ignore[call-overload]

        def run(*arguments: object, program: str = MAIN, out: str = "", err: str = "") -> Ended:
            folder = tmp_path_factory.mktemp("forked")
            files = [Path(out or folder / "out"), Path(err or folder / "err")]
            asked = [program, [str(a) for a in arguments], *map(str, files)]
            print(json.dumps(asked), file=server.stdin, flush=True)
            code = int(server.stdout.readline())
            said = ["" if given else file.read_text() for file, given in zip(files, (out, err), strict=True)]
            return subprocess.CompletedProcess(asked, code, *said)

        yield run
        server.kill()  # torch takes seconds to end


@pytest.fixture
def small() -> list[object]:
    """Options of a trial that trains in a second."""
    size = ["--width", 32, "--base-width", 32, "--head-size", 16]
    return [*size, "--sequence-length", 32, "--batch-size", 4, "--steps", 12]


@pytest.fixture
def sweep_toml(corpus: Path) -> str:
    """TOML of a sweep of four trials."""
    return SWEEP_TOML.format(corpus=str(corpus))


@pytest.fixture
def valleys(tmp_path: Path) -> Callable[..., Path]:
    """Writes a table, a parabola a scale; a column is a value, or a function of scale and x = log2(lr)."""

    def write(
        name="runs.csv", scales=(64, 128, 256), grid=range(-10, -4), scale="width", tuned="lr", **columns
    ):
        given = {"loss": lambda s, x: 2 + 0.05 * (x + 7) ** 2} | columns
        rows = [
            {scale: s, tuned: 2.0**x}
            | {k: v(s, x) if callable(v) else v for k, v in given.items() if v is not None}
            for s in scales
            for x in grid
        ]
        table = pd.DataFrame(rows)
        for column in [name for name, value in given.items() if isinstance(value, list)]:
            table = table.explode(column)  # a row for each value
        (table.to_parquet if name.endswith("parquet") else table.to_csv)(tmp_path / name, index=False)
        return tmp_path / name

    return write
