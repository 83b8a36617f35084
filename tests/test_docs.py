"""Documentation pages: their commands parse, their imports work, their files exist."""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import runpy
import shlex
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import tyro

from mup_tpu import Study
from mup_tpu.cli import COMMANDS, check, main
from mup_tpu.config.toml import kind_of, load_sweep, read_toml
from mup_tpu.rules.optimizer import BATCH_RULES, DECAY_RULES, TOKEN_RULES
from mup_tpu.rules.parametrization import PARAMETRIZATIONS
from mup_tpu.study.study import load_study

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
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
STARTS = re.compile(r"(mup-tpu|python|pip|scripts/\w[\w/]*|\.\.\.)(?= |$)")
NAMED = re.compile(r"mup-tpu( [a-z-]+){0,2}")
"""Name of a command in prose, without arguments."""
ELSEWHERE = ("git", "cd", "source", "gcloud", "sbatch")
"""Other projects' programs: their lines are not checked."""


def text_of(page: Path) -> str:
    """Markdown of a page, or of a notebook's prose."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def blocks(text: str, language: str) -> list[str]:
    return [inside for _, name, inside in FENCE.findall(text) if name == language]


def commands(text: str) -> Iterator[list[str]]:
    """Words of each command: lines of bash blocks, then code in prose and tables.

    `... --address auto` goes on from the command before; what stands in [brackets] may be left out, and is
    taken.
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
    """Command with the same command line that does nothing."""

    @functools.wraps(command)
    def does_nothing(*_: object, **__: object) -> None:
        pass

    return does_nothing


def run_experiment(path: str, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "argv", [path, *arguments])
    patch.setattr(check, "check_trials", lambda *_, **__: None)
    for name in ("run", "verdict"):
        patch.setattr(Study, name, lambda *_, **__: None)
    if "--check" in arguments:
        patch.setattr("mup_tpu.parametrize.coord_check", lambda *_, **__: SimpleNamespace(reports={}))
    runpy.run_path(path, run_name="__main__")


def run_benchmark(path: str, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    cli, from_dict = tyro.cli, tyro.extras.subcommand_cli_from_dict
    patch.setattr(sys, "argv", [path, *arguments])
    patch.setattr(tyro, "cli", lambda f, **options: cli(parsed_only(f), **options))
    name = "subcommand_cli_from_dict"
    patch.setattr(tyro.extras, name, lambda fs: from_dict({k: parsed_only(f) for k, f in fs.items()}))
    runpy.run_path(path, run_name="__main__")


def run_ours(arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    """Parse our own command."""
    for name, (module, _) in COMMANDS.items():
        place = importlib.import_module(f"mup_tpu.cli.{module}")
        function = name.split()[-1]
        patch.setattr(place, function, parsed_only(getattr(place, function)))
    main(arguments)


def run_script(path: str, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    is_script = Path(path).read_bytes().startswith(b"#!")
    assert os.access(path, os.X_OK) == is_script, f"{path} cannot be executed"
    if path == "scripts/quickstart":
        run_ours(["sweep", "experiments/first_verdicts.py", *arguments], patch)
    elif path == "scripts/tpu/cluster" and arguments:
        command, *rest = arguments
        assert f"\n{command})" in Path(path).read_text(), f"{command} is no command of {path}"
        if command == "submit" and Path(f"experiments/{rest[0]}.py").exists():
            run_ours(["sweep", f"experiments/{rest[0]}.py", *rest[1:]], patch)
        elif command == "submit":
            run_ours(rest, patch)


def install(requirement: str) -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"[\w-]+", requirement.partition("[")[2])
    assert set(asked) <= set(extras), f"{requirement}: no such extra"


def run_ray(arguments: list[str]) -> set[str]:
    """Parse a command of Ray without running it; return the command's options."""
    from ray.scripts.scripts import cli

    command = cli.commands[arguments[0]]
    try:
        command.make_context(arguments[0], arguments[1:])
    except click.UsageError as error:
        raise AssertionError(f"ray {shlex.join(arguments)}: {error.format_message()}") from None
    return {option for parameter in command.params for option in parameter.opts}


def dispatch(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Hand a command's words to its program's parser."""
    program, *arguments = words
    for before, word in pairwise(words):
        if re.match(r"(experiments|benchmarks|tests|scripts)/(?!NAME)", word) and before != "--out":
            assert Path(word.partition(":")[0]).exists(), f"{word} is not there"
    if program == "mup-tpu":
        run_ours(arguments, patch)
    elif program == "python" and arguments[0].startswith("benchmarks/"):
        run_benchmark(arguments[0], arguments[1:], patch)
    elif program == "python" and re.match("experiments/(?!NAME)", arguments[0]):
        run_experiment(arguments[0], arguments[1:], patch)
    elif program.startswith("scripts/"):
        run_script(program, arguments, patch)
    elif program == "ray":
        run_ray(arguments)
    elif program == "pip":
        install(arguments[-1])
    elif program == ".venv/bin/python":
        assert importlib.util.find_spec(arguments[1]), f"there is no module {arguments[1]}"
    else:
        assert program in ("python", *ELSEWHERE), f"{program}: nothing here checks its commands"


@pytest.fixture
def parse(monkeypatch, capsys) -> Callable[[list[str]], None]:
    """Function that parses a command's words without running it; a refusal is an AssertionError."""
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
        "mup-tpu sweep experiments/lr_transfer.py --nothing",
        "python benchmarks/sweep.py --nothing",
        "scripts/nothing",
        "scripts/quickstart --nothing",
        "scripts/tpu/cluster nothing",
        "scripts/tpu/cluster submit lr_transfer --nothing",
        "ray start --nothing",
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
        if kind_of(read_toml(file)) == "study":
            study, _ = load_study(file)
            assert study.trials() or study.grid.space
        else:
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


@pytest.mark.nightly
def test_the_code_of_the_page_about_models_of_your_own_can_be_pasted(capsys):
    pytest.importorskip("transformers")
    names: dict[str, object] = {}
    # GPT-2's defaults are 12 layers and 50 k words.
    page = (ROOT / "docs" / "your_own_model.md").read_text()
    for block in blocks(page.replace("GPT2Config(", "GPT2Config(n_layer=1, vocab_size=64, "), "python"):
        exec(block, names)
    printed = capsys.readouterr().out
    assert "model.layers.1.mlp.down_proj.weight" in printed
    assert re.search(r"^no layer grows with width", printed, re.M), printed


OF_OTHERS = ("pretrain.py", "completed_adamh.py")
"""Files of other projects that docs/rules.md names."""


def named(pattern: str) -> Iterator[tuple[str, str]]:
    """Code in prose that matches a pattern, with its page.

    Without benchmarks' pages, which name options of their scripts and files of other projects.
    """
    for page in PAGES:
        if page.parent.name == "benchmarks":
            continue
        for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", text_of(page))):
            if re.fullmatch(pattern, code):
                yield code, page.relative_to(ROOT).as_posix()


def test_options_that_prose_names_are_there(monkeypatch, capsys):
    """Options of a command or of `ray start`, as --heartbeat or --tune weight_decay=0,0.01."""
    reference = (ROOT / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"\n## mup-tpu {command}\n" in reference, f"{command} is not on the page of commands"
        with pytest.raises(SystemExit):
            main([*command.split(), "--help-all"])
    options = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out)) | {
        "--help",
        "--help-all",
        "--print-completion",
    }
    options |= run_ray(["start", "--head"])
    for code, page in named(r"--[a-z].*"):
        missing = set(re.findall(r"(?<!\S)--[a-z][\w-]+", code)) - options
        assert not missing, f"{page}: no command has {missing}"


def test_files_and_private_names_that_prose_names_are_there():
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    files = [f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in folder.rglob("*.py")]
    for code, page in named(r"[a-z_][a-z_/\d]*\.py"):
        assert code in OF_OTHERS or any(file.endswith(f"/{code}") for file in files), f"{page}: {code}"

    def words(*folders):
        sources = (
            path.read_text(encoding="utf-8") for name in folders for path in (ROOT / name).rglob("*.py")
        )
        return {word for source in sources for word in re.findall(r"\w+", source)}

    known = words("mup_tpu")
    for code, page in named(r"_[a-z]\w+"):
        assert code in known, f"{page}: nothing in mup_tpu is called {code}"
    known |= words("tests")
    for code, page in named(r"[A-Z][A-Z_]+|[A-Z][a-z]\w+"):
        assert page != "CONTRIBUTING.md" or code in known, f"nothing is called {code}"


def test_no_page_holds_both_sides_of_a_merge():
    assert [page for page in PAGES if re.search(r"^(<{7}|>{7}) ", page.read_text(), re.M)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=str)
def test_a_list_begins_after_an_empty_line(page):
    """The site's Markdown takes it for a part of the paragraph above otherwise."""
    for block in re.split(r"\n\s*\n|^#.*\n", FENCE.sub("", page.read_text()), flags=re.M):
        first, *others = block.strip("\n").split("\n")
        is_list = re.match(r" *([-*]|\d+\.) ", first)
        assert is_list or not any(re.match(r"([-*]|\d+\.) ", line) for line in others), block


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=str)
def test_a_table_begins_with_its_headings(page):
    """Rows after an empty line would be text on the site."""
    for table in re.findall(r"(?:^ *\|.*\n?)+", FENCE.sub("", page.read_text(encoding="utf-8")), re.M):
        head, *rows = table.splitlines()
        assert head.split("|")[1].strip(), f"the first column has no heading: {head}"
        assert rows and re.fullmatch(r"[ |:-]+", rows[0]), f"no rule below {head}"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_overview_of_commands_has_the_first_sentence_of_each(command):
    module, summary = COMMANDS[command]
    function = getattr(importlib.import_module(f"mup_tpu.cli.{module}"), command.split()[-1])
    assert function.__doc__.splitlines()[0] == summary


def classes_of_options(function: Callable) -> Iterator[type]:
    """Dataclasses whose fields are options of a command."""
    hints = [*typing.get_type_hints(function).values()]
    while hints:
        if dataclasses.is_dataclass(hint := hints.pop()):
            yield hint
            hints += typing.get_type_hints(hint).values()


def test_every_option_is_on_a_page_of_the_reference():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    shown = re.findall(r"^::: ([\w.]+)$", "\n".join(page.read_text() for page in pages), re.M)
    for name in shown:
        assert pkgutil.resolve_name(name)
    of_options = set()
    for name, (module, _) in COMMANDS.items():
        place = f"mup_tpu.cli.{module}.{name.split()[-1]}"
        assert place in shown
        function = getattr(importlib.import_module(f"mup_tpu.cli.{module}"), name.split()[-1])
        of_options |= {*classes_of_options(function)}
    public = vars(importlib.import_module("mup_tpu.config"))  # whose page leaves out what ends on Options
    for cls in of_options:
        is_shown = public.get(cls.__name__) is cls and not cls.__name__.endswith("Options")
        places = {f"{cls.__module__}.{cls.__name__}", f"mup_tpu.config.{cls.__name__}"}
        assert is_shown or places & {*shown}, f"{cls.__name__} is on no page"


def test_every_room_is_in_the_table_of_rooms_and_no_other():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(mup_tpu/[\w./]+)` \|", text, re.M))
    rooms = {f"mup_tpu/{path.parent.name}/" for path in (ROOT / "mup_tpu").glob("*/__init__.py")}
    rooms |= {f"mup_tpu/{path.name}" for path in (ROOT / "mup_tpu").glob("*.py")}
    assert rooms - listed == {"mup_tpu/__init__.py", "mup_tpu/__main__.py"}
    assert listed - rooms == set()


def test_every_rule_has_its_place_on_the_page_of_rules():
    text = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    for table in (PARAMETRIZATIONS, BATCH_RULES, TOKEN_RULES, DECAY_RULES):
        assert [name for name in table if f"`{name}`" not in text] == []


def test_every_station_of_the_two_walks_is_in_a_file_that_it_links_to():
    page = ROOT / "docs" / "architecture.md"
    walks = page.read_text(encoding="utf-8").partition("## Two walks")[2].partition("\n## ")[0]
    stations = re.split(r"^\d\. ", walks, flags=re.M)[1:]
    assert len(stations) == 10
    for station in stations:
        station = station.partition("\n\n")[0]
        linked = re.findall(r"\]\((\.\./mup_tpu/[\w/]+\.py)\)", station)
        source = "".join((page.parent / path).read_text(encoding="utf-8") for path in linked)
        for code in re.findall(r"`([A-Za-z]\w+(?:\.\w+)*)`", station):
            for name in code.split("."):
                assert re.search(rf"(def|class) {name}\b|^    {name}:", source, re.M), (station, name)
