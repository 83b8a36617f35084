import contextlib
import io
import os
import re
import shlex
import subprocess
import sys

import pytest
import tyro

from mup_tpu.cli import COMMANDS, _command, main
from mup_tpu.cli.help import EXAMPLES, PARSING


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_is_understood_and_no_placeholder_of_types(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert not end.value.code and f"Example: {EXAMPLES[command]}\n" in out
    assert not re.search(r"\{None|\[\[[A-Z]|Args:|default: \)|\w+\.\w+ options", out), out
    assert max(map(len, out.splitlines())) <= 90
    words = shlex.split(EXAMPLES[command])[1 + len(command.split()) :]
    tyro.extras.get_parser(_command(command), config=PARSING).parse_args(words)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("predict x --att width=3", "unknown option '--att'; did you mean '--at'?"),
        ("train --no-json", "unknown option '--no-json'; `mup-tpu train --help-all` lists the options"),
        ("--verison", "unknown command '--verison'; did you mean '--version'?"),
        ("tell x", "needs PATH and TRIAL_ID, as in: mup-tpu tell study.toml"),
        ("sweep x --num-seeds b", "--num-seeds: 'b' is no INT\n"),
        (
            "train --device tpuu",
            "invalid choice 'tpuu' for argument '--device'. Expected one of ('auto', 'cpu'",
        ),
        ("sweep a b", "unrecognized options: b\n"),
        ("train --steps", "missing value for argument '--steps'"),
    ],
)
def test_words_that_are_not_understood_end_in_one_sentence(words, sentence, outcome):
    code, out, error = outcome(*words.split())
    assert code == 2 and not out and sentence in f"{error}\n" and error.count("\n") == 0


@pytest.mark.parametrize("words", ["--help", "analyze results/nanogpt_mup --runs"])
def test_a_reader_that_ends_early_is_no_error(words):
    command = f"{shlex.quote(sys.executable)} -m mup_tpu {words} | true"
    ran = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert not ran.stderr


def test_help_of_many_options_lists_the_first_ones_and_the_rest_where_it_is_asked(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    short = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    whole = capsys.readouterr().out
    few, count = (len(re.findall(r"^  --", text, re.M)) for text in (short, whole))
    assert few <= 15 and f"`mup-tpu train --help-all` lists all {count}" in short
    assert "--adam-beta2" not in short and "--data-seed" in whole


@pytest.fixture(scope="module")
def script() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["--print-completion", "bash"])
    return printed.getvalue()


@pytest.mark.parametrize(
    "line, completions",
    [
        ("pr", ["predict"]),
        ("predict --clai", ["--claim"]),
        ("data prep", ["prepare"]),
        ("sweep --until", ["--until-settled"]),
        ("analyze --nothing", []),
    ],
)
def test_bash_completes_commands_and_options(script, line, completions):
    words = ["mup-tpu", *line.split()]
    typed = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
    code = f"{script}\n{typed}; _mup_tpu; echo ${{COMPREPLY[@]}}"
    ran = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert ran.stdout.split() == completions


def test_completion_of_a_shell_that_is_not_known_is_one_sentence(refused):
    assert "bash, zsh, fish" in refused("--print-completion", "tcsh")
