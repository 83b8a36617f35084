"""Pages for people: their commands, files and imports are there, and the site is built of them."""

import doctest
import functools
import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
import tyro

from mup_tpu.cli import checks, data, main, replay, training, tuning
from mup_tpu.config_io import load_sweep

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "results/**/*.md",
        "benchmarks/*.md",
        "tests/**/*.md",
        "notebooks/*.ipynb",
    )
    for page in ROOT.glob(pattern)
)
COMMANDS = {
    training: ("train",),
    tuning: ("sweep", "search", "transfer"),
    checks: ("coord_check", "doctor"),
    replay: ("runs", "analyze", "next_", "plot", "report", "referee"),
}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
STARTS = re.compile(r"(mup-tpu|python|pip|scripts/\w[\w/]*|\.\.\.)(?= |$)")
NAMED = re.compile(r"mup-tpu( [a-z-]+){0,2}")
"""A command that is named in prose, not written out."""
ELSEWHERE = ("git", "cd", "source", "gcloud")
"""Programs that are not ours: their lines are not checked."""


def text_of(page: Path) -> str:
    """The Markdown of a page; of a notebook, that of its prose."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def blocks(text: str, language: str) -> list[str]:
    return [inside for _, name, inside in FENCE.findall(text) if name == language]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command: lines of bash blocks, then what is written as code in prose and tables.

    `... --ray` goes on from the command before it; what stands in [brackets] may be left out, and is taken.
    """
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                words = shlex.split(command, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words = words[1:]
                if words:
                    yield words
    before: list[str] = []
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", text)):
        if not STARTS.match(code):
            continue
        words = shlex.split(re.sub(r"\[(--[^\]]+)\]", r"\1", code))
        if words[0] == "...":
            if not words[1:2] or not words[1].startswith("--"):
                continue
            words = before + words[1:]
        else:
            before = words
        yield [*words, "--help"] if NAMED.fullmatch(code) else words


def parsed_only(command: Callable) -> Callable:
    """The same command line, of a command that does nothing."""

    @functools.wraps(command)
    def does_nothing(*_: object, **__: object) -> None:
        pass

    return does_nothing


def run_experiment(path: str, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "argv", [path, *arguments])
    # Where its command line has been read, and its sweep made.
    patch.setattr(tuning, "run_and_show", lambda sweep, *_: sweep.trials())
    patch.setattr(tuning, "run_either", lambda sweep, *_: sweep.trials() and {})
    for module, name in ((tuning, "show_and_judge"), (tuning, "search_and_show"), (checks, "coord_checks")):
        patch.setattr(module, name, lambda *_: None)
    runpy.run_path(path, run_name="__main__")


def run_benchmark(path: str, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    cli, from_dict = tyro.cli, tyro.extras.subcommand_cli_from_dict
    patch.setattr(sys, "argv", [path, *arguments])
    patch.setattr(tyro, "cli", lambda f, **options: cli(parsed_only(f), **options))
    name = "subcommand_cli_from_dict"
    patch.setattr(tyro.extras, name, lambda fs: from_dict({k: parsed_only(f) for k, f in fs.items()}))
    runpy.run_path(path, run_name="__main__")


def run_ours(arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    for module, names in COMMANDS.items():
        for name in names:
            patch.setattr(module, name, parsed_only(getattr(module, name)))
    group = tyro.extras.SubcommandApp()
    for command in (data.prepare, data.inspect):
        group.command(parsed_only(command))
    patch.setattr(data, "app", group)
    main(arguments)


def run_script(path: str, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    is_script = Path(path).read_bytes().startswith(b"#!")
    assert os.access(path, os.X_OK) == is_script, f"{path} cannot be executed"
    if path == "scripts/quickstart":
        run_experiment("experiments/quickstart.py", arguments, patch)
    elif path == "scripts/tpu/cluster" and arguments:
        command, *rest = arguments
        assert f"\n{command})" in Path(path).read_text(), f"{command} is no command of {path}"
        if command == "submit":
            run_experiment(f"experiments/{rest[0]}.py", rest[1:], patch)


def install(requirement: str) -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"[\w-]+", requirement.partition("[")[2])
    assert set(asked) <= set(extras), f"{requirement}: no such extra"


def dispatch(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Hand a command's words to the parser that they are for."""
    program, *arguments = words
    for before, word in pairwise(words):
        if re.match(r"(experiments|benchmarks|tests|scripts)/(?!NAME)", word) and before != "--out":
            assert Path(word).exists(), f"{word} is not there"
    if program == "mup-tpu":
        run_ours(arguments, patch)
    elif program == "python" and arguments[0].startswith("benchmarks/"):
        run_benchmark(arguments[0], arguments[1:], patch)
    elif program == "python" and re.match("experiments/(?!NAME)", arguments[0]):
        run_experiment(arguments[0], arguments[1:], patch)
    elif program.startswith("scripts/"):
        run_script(program, arguments, patch)
    elif program == "pip":
        install(arguments[-1])
    elif program == ".venv/bin/python":
        assert importlib.util.find_spec(arguments[1]), f"there is no module {arguments[1]}"
    else:
        assert program in ("python", *ELSEWHERE), f"{program}: nothing here checks its commands"


@pytest.fixture
def parse(monkeypatch, capsys) -> Callable[[list[str]], None]:
    """Has a command's words read, and nothing run; what its parser says against them is an AssertionError."""
    monkeypatch.chdir(ROOT)

    def parse_words(words: list[str]) -> None:
        with monkeypatch.context() as patch:
            try:
                dispatch(words, patch)
            except SystemExit as end:
                said = capsys.readouterr()
                assert not end.code, f"{shlex.join(words)}: {' '.join((said.out + said.err).split())}"

    return parse_words


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_is_understood(page, parse):
    for words in commands(text_of(page)):
        parse(words)


@pytest.mark.parametrize(
    "command",
    [
        "mup-tpu nothing",
        "mup-tpu analyze results/quickstart --nothing 1",
        "mup-tpu data prepare --corpus sotu",
        "python experiments/nothing.py",
        "python experiments/lr_transfer.py --nothing",
        "python experiments/lr_transfer.py --tune nothing=1,2",
        "python experiments/tune_small.py --nothing",
        "python benchmarks/halving.py --nothing",
        "scripts/nothing",
        "scripts/quickstart --nothing",
        "scripts/tpu/cluster nothing",
        "scripts/tpu/cluster submit lr_transfer --nothing",
        "pip install .[nothing]",
        "nothing --help",
    ],
)
def test_a_stale_command_is_found(command, parse):
    with pytest.raises((AssertionError, OSError)):
        parse(command.split())


def test_sweeps_that_are_written_out_can_be_run(tmp_path):
    found = [block for page in PAGES for block in blocks(text_of(page), "toml") if "experiment =" in block]
    assert len(found) > 1
    for number, block in enumerate(found):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        assert load_sweep(file).trials()


def test_what_is_imported_in_examples_is_there():
    lines = [
        found
        for page in PAGES
        for block in blocks(text_of(page), "python")
        for found in re.findall(r"^from (mup_tpu[\w.]*) import ([\w, ]+)$", block, re.M)
    ]
    assert lines
    for module, names in lines:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


WITH_EXAMPLES = [
    file for file in sorted((ROOT / "mup_tpu").rglob("*.py")) if ">>> " in file.read_text("utf-8")
]


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_examples_in_docstrings_say_what_they_print(file, monkeypatch):
    """From the repository's top."""
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    ran = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert ran.attempted and not ran.failed


def test_the_snippet_for_python_runs(tmp_path, monkeypatch, capsys):
    (snippet,) = blocks(text_of(ROOT / "docs" / "reference" / "python.md"), "python")
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "docs/reference/python.md", "exec"), {})
    assert "sp: DRIFTS" in capsys.readouterr().out
    assert (tmp_path / "transfer.png").exists()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as scripts/docs builds it."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_has_every_page_and_no_dead_link(site):
    """Pages and anchors are mkdocs' to check, in its strict mode; here also what is HTML from the start."""
    there = {file.relative_to(site).as_posix() for file in site.rglob("*")}
    for page in PAGES:
        name = page.relative_to(ROOT).with_suffix(".html")
        assert (name.with_name("index.html") if name.stem == "README" else name).as_posix() in there
    for file in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?:]+)["#?]', file.read_text(encoding="utf-8")):
            target = site / link.lstrip("/") if file.name == "404.html" else file.parent / unquote(link)
            assert target.exists(), f"{file.relative_to(site)} links to {link}"


def test_the_site_asks_for_nothing_over_the_network(site):
    """Of what a browser fetches by itself; links that a reader may follow are another thing."""
    fetched = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")
    for file in site.rglob("*.html"):
        found = set(fetched.findall(file.read_text(encoding="utf-8")))
        assert not found, f"{file.relative_to(site)}: {found}"
    for file in site.rglob("*.css"):
        assert not re.findall(r"url\(\"?(?:https?:)?//", file.read_text(encoding="utf-8")), file.name


def test_the_reference_shows_what_packages_export(site):
    """Docstrings are read from the code, unrun, and a name that a package takes from its rooms by __all__."""
    for name in ("analysis", "parametrize"):
        module = importlib.import_module(f"mup_tpu.{name}")
        text = (site / "docs" / "reference" / f"{name}.html").read_text(encoding="utf-8")
        assert [n for n in module.__all__ if f'id="mup_tpu.{name}.{n}"' not in text] == []
    for file in (site / "docs" / "reference").glob("*.html"):
        assert "<blockquote>" not in file.read_text(encoding="utf-8"), (
            f"{file.name}: >>> outside of Examples:"
        )
