"""Help of a command: an example that runs, and its options by group, of many those that people set first."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tyro

# --device, not --how.run.device; no --no-json beside --json
PARSING = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)

EXAMPLES = {
    "init": "mup-tpu init sweep",
    "plan": "mup-tpu plan --at params=1.3B --budget 200h --on 8xA100",
    "sweep": "mup-tpu sweep experiments/first_sweep.py --dry-run",
    "search": "mup-tpu search experiments/tune_small.py --budget 30m",
    "train": "mup-tpu train --width 64 --steps 100 --learning-rate 2^-8",
    "transfer": "mup-tpu transfer results/lr_transfer --at width=1024",
    "ask": "mup-tpu ask study.toml 8",
    "tell": "mup-tpu tell study.toml TRIAL_ID 2.31",
    "watch": "mup-tpu watch results/quickstart --once",
    "analyze": "mup-tpu analyze results/nanogpt_mup",
    "predict": "mup-tpu predict results/nanogpt_mup --at width=4096",
    "check": "mup-tpu check --scale width=64,128,256",
    "doctor": "mup-tpu doctor",
    "data prepare": "mup-tpu data prepare --corpus sotu --out runs/shards",
}

_MANY = 24
"""Options above which help lists the first ones alone."""
_FIRST = {
    "results", "scale", "tune", "compare", "num-seeds", "until-settled", "budget", "dry-run",
    "device", "address", "trainer", "loss", "config", "at", "architecture", "width",
    "depth", "parametrization", "corpus", "learning-rate", "steps", "batch-size", "seed",
    "export", "algorithm", "num-samples", "resume", "checkpoint-every", "json",
}  # fmt: skip


_VALUES = {
    "--at": "NAME=VALUE", "--budget": "TIME", "--columns": "ROLE=COLUMN", "--only": "CONDITION",
    "--price": "MONEY/h", "--address": "ADDRESS", "--states": "STATE=KIND", "--where": "CONDITION",
}  # fmt: skip
"""Placeholders of options whose values are texts of a form."""


def _parser(name: str, command: Callable[..., Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tyro prefers its own help, in boxes
        return tyro.extras.get_parser(command, prog=f"mup-tpu {name}", config=PARSING)


def misread(name: str, command: Callable[..., Any], words: list[str], box: str) -> str:
    """Return what is wrong with the words of a command in one sentence; `box` is tyro's of several lines."""
    actions = _parser(name, command)._actions
    options = [option for action in actions for option in action.option_strings]
    for word in (word.partition("=")[0] for word in words if word.startswith("--")):
        if word not in options:
            near = difflib.get_close_matches(word, options, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"`mup-tpu {name} --help-all` lists the options"
            return f"unknown option {word!r}; {hint}"
    needed = [_value(action) for action in actions if not action.option_strings and action.required]
    if len(words) < len(needed):
        return f"mup-tpu {name} needs {' and '.join(needed)}, as in: {EXAMPLES[name]}"
    _, *lines = [line.strip("│╭╮╰╯─- ") for line in box.partition("For full helptext")[0].splitlines()]
    text = " ".join(filter(None, lines)).partition(" Argument helptext")[0].removeprefix("Error parsing ")
    text = re.sub(
        r"no type matching (?:{None}\|)?(\S+) could be instantiated from \[(.+?)\].*", r"\2 is no \1", text
    )
    return f"{text[:1].lower()}{text[1:]}".rstrip(".")


def write_help(name: str, command: Callable[..., Any], every: bool) -> str:
    """Return the help of a command; `every` lists all options of one that has many."""
    parser = _parser(name, command)
    all_groups = parser._action_groups
    groups = [(group, [a for a in group._group_actions if a.dest != "help"]) for group in all_groups]
    paths = [action for group, actions in groups[:1] for action in actions]
    count = sum(len(actions) for _, actions in groups[1:])
    is_short = count > _MANY and not every
    lines = [" ".join(["usage: mup-tpu", name, *map(_value, paths), "[OPTIONS]"]), ""]
    lines += [textwrap.fill(part, _width()) for part in (parser.description or "").rstrip().split("\n")]
    lines += ["", f"Example: {EXAMPLES[name]}"]
    for group, actions in groups:
        shown = [
            a for a in actions if not is_short or not a.option_strings or a.option_strings[0][2:] in _FIRST
        ]
        if shown:
            is_ours = group.description and group is not groups[0][0]
            title = str(group.description if is_ours else group.title).rstrip(".")
            lines += ["", f"{title[0].upper()}{title[1:]}:".replace("Positional arguments", "Arguments")]
            lines += [line for action in shown for line in _entry(action)]
    if is_short:
        lines += ["", f"`mup-tpu {name} --help-all` lists all {count} options."]
    return "\n".join(lines)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)


def _value(action: argparse.Action) -> str:
    """Return the placeholder of an option's value: {None}|STR is STR, [STR [STR ...]] is STR ...."""
    if action.option_strings and (form := _VALUES.get(action.option_strings[0])):
        return form
    metavar = str(action.metavar or "").replace("{None}|", "")
    if not action.option_strings:  # TRIAL_ID in place of its type
        metavar = re.sub("STR|INT", action.dest.upper().replace("-", "_"), metavar)
    while several := re.fullmatch(r"\[(.+?) \[\1 \.\.\.\]\]|\[(\[.+\])\]", metavar):
        metavar = f"{several[1]} ..." if several[1] else several[2]
    return metavar


def _entry(action: argparse.Action) -> Iterator[str]:
    head = "  " + " ".join(filter(None, [*action.option_strings[:1], _value(action)]))
    text = " ".join(str(action.help or "").replace("%%", "%").split())
    text = re.sub(r" ?\(default: (None|False|auto|)\)| ?\((required|repeatable)\)", "", text)
    text = re.sub(r"\(default: '?(.*?)'?\)$", r"(\1 by default)", text)
    lines = textwrap.wrap(text, _width() - 24)
    if len(head) > 22 or not lines:
        yield head
    else:
        yield f"{head:24}{lines.pop(0)}"
    yield from (f"{'':24}{line}" for line in lines)


SHELLS = ("bash", "zsh", "fish")


# Completion in the form of bash rests on compinit, which some shells have not run.
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U +X compinit && compinit }
autoload -U +X bashcompinit && bashcompinit"""


def write_completion(shell: str, commands: Mapping[str, tuple[Callable[..., Any], str]]) -> str:
    """Return a script that completes commands and their options in a shell."""
    options = {
        name: [a for a in _parser(name, command)._actions if a.option_strings and a.dest != "help"]
        for name, (command, _) in commands.items()
    }
    if shell == "fish":
        lines = ["complete -c mup-tpu -f -n __fish_use_subcommand"]
        for name, (_, summary) in commands.items():
            word, _, rest = name.partition(" ")
            lines.append(
                f"complete -c mup-tpu -f -n __fish_use_subcommand -a {word} -d {shlex.quote(summary)}"
            )
            chosen = f"'__fish_seen_subcommand_from {word}'"
            if rest:
                lines.append(f"complete -c mup-tpu -f -n {chosen} -a {rest}")
            for action in options[name]:
                value = "" if action.nargs == 0 else " -r"
                lines.append(f"complete -c mup-tpu -n {chosen} -l {action.option_strings[0][2:]}{value}")
        return "\n".join(lines)
    cases = [
        f"    {name.split()[0]}) words='{' '.join(name.split()[1:] + [a.option_strings[0] for a in of])}' ;;"
        for name, of in options.items()
    ]
    first = " ".join(dict.fromkeys(name.split()[0] for name in commands))
    return "\n".join(
        [
            *([_ZSH] if shell == "zsh" else []),
            "_mup_tpu() {",
            "  local words",
            "  case ${COMP_WORDS[1]} in",
            *cases,
            "  esac",
            f"  [[ $COMP_CWORD == 1 ]] && words='{first}'",
            '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
            "}",
            "complete -o default -F _mup_tpu mup-tpu",
        ]
    )
