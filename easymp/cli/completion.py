"""Print a script by which a shell completes easymp's commands, flags and the words that flags take.

examples:
  easymp completion bash >> ~/.bashrc
  easymp completion zsh > "${fpath[1]}/_easymp"       then start a new zsh
  easymp completion fish > ~/.config/fish/completions/easymp.fish

The script stands by itself: completing starts no Python. After an update of easymp, make it again.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from . import COMMANDS, parser_of

FRONT = "easymp"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SHELLS), help="which")


def run(args: argparse.Namespace) -> int:
    print(SHELLS[args.shell](list(nodes())), end="")
    return 0


@dataclass(frozen=True)
class Flag:
    """Its spellings, whether a value follows, and which are possible (none listed: any)."""

    names: tuple[str, ...]
    words: str
    takes: bool
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """What can follow some words, such as ``"easymp checkpoint list"``.

    Attributes:
        below: further commands, with their help.
        choices: words for the first argument that is no flag.
    """

    path: str
    below: dict[str, str]
    flags: tuple[Flag, ...]
    choices: tuple[str, ...] = ()

    @property
    def first(self) -> list[str]:
        """The words that can come next."""
        return [*self.below, *self.choices, *(name for flag in self.flags for name in flag.names)]


def nodes() -> Iterator[Node]:
    """All of them, by the parsers that the commands themselves use."""
    yield Node(
        FRONT,
        dict(COMMANDS),
        (Flag(("--help",), "what there is", False, ()), Flag(("--version",), "of easymp", False, ())),
    )
    for name in COMMANDS:
        yield from _nodes(
            f"{FRONT} {name}", parser_of(name, importlib.import_module(f".{name}", __package__))
        )


def _nodes(path: str, parser: argparse.ArgumentParser) -> Iterator[Node]:
    flags, below, choices = [], dict[str, argparse.ArgumentParser](), ()
    helps: dict[str, str] = {}
    for action in parser._actions:  # argparse shows what a parser takes nowhere else
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.option_strings and action.help != argparse.SUPPRESS:
            words = re.split(r"[;(]", action.help or "")[0].replace("%%", "%").strip()
            flags.append(
                Flag(
                    tuple(action.option_strings),
                    words,
                    action.nargs != 0,
                    tuple(map(str, action.choices or ())),
                )
            )
        elif action.choices and not choices:
            choices = tuple(map(str, action.choices))
    yield Node(path, {name: helps.get(name, "") for name in below}, tuple(flags), choices)
    for name, parser_below in below.items():
        yield from _nodes(f"{path} {name}", parser_below)


def values(found: list[Node]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Words with a flag at their end, and what may follow that: nothing listed means a file, say."""
    for node in found:
        for flag in node.flags:
            for name in flag.names if flag.takes else ():
                yield f"{node.path} {name}", flag.choices


def bash(found: list[Node]) -> str:
    paths = "|".join(shlex.quote(node.path) for node in found[1:])
    follow = [
        f"    {shlex.quote(words)}) known={shlex.quote(' '.join(choices))} ;;"
        for words, choices in values(found)
    ]
    come = [f"    {shlex.quote(node.path)}) known={shlex.quote(' '.join(node.first))} ;;" for node in found]
    return "\n".join(
        [
            "# easymp's completion for bash; made by `easymp completion bash`",
            "_easymp() {",
            f"  local known word path={FRONT} current=${{COMP_WORDS[COMP_CWORD]}}",
            '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
            f'    case "$path $word" in {paths}) path="$path $word" ;; esac',
            "  done",
            '  case "$path ${COMP_WORDS[COMP_CWORD-1]}" in',
            *follow,
            '    *) case "$path" in',
            *come,
            "    esac ;;",
            "  esac",
            '  COMPREPLY=($(compgen -W "$known" -- "$current"))',
            "}",
            "complete -o default -F _easymp easymp",  # files, where no word of ours fits
            "",
        ]
    )


def zsh(found: list[Node]) -> str:
    paths = "|".join(shlex.quote(node.path) for node in found[1:])
    follow = []
    for words, choices in values(found):
        then = f"compadd -- {' '.join(map(shlex.quote, choices))}" if choices else "_files"
        follow.append(f"    {shlex.quote(words)}) {then}; return ;;")
    come = []
    for node in found:
        entries = [(name, words) for name, words in node.below.items()] + [
            (choice, "") for choice in node.choices
        ]
        entries += [(name, flag.words) for flag in node.flags for name in flag.names]
        listed = " ".join(
            shlex.quote(name.replace(":", "\\:") + (f":{words}" if words else "")) for name, words in entries
        )
        files = "" if node.below or node.choices else "; _files"
        come.append(f"    {shlex.quote(node.path)}) known=({listed}); _describe easymp known{files} ;;")
    return "\n".join(
        [
            "#compdef easymp",
            "# easymp's completion for zsh; made by `easymp completion zsh`",
            "_easymp() {",
            f"  local -a known; local word path_={FRONT}",
            '  for word in "${(@)words[2,CURRENT-1]}"; do',
            f'    case "$path_ $word" in {paths}) path_="$path_ $word" ;; esac',
            "  done",
            '  case "$path_ ${words[CURRENT-1]}" in',
            *follow,
            "  esac",
            '  case "$path_" in',
            *come,
            "  esac",
            "}",
            'if [ "$funcstack[1]" = "_easymp" ]; then _easymp "$@"; else compdef _easymp easymp; fi',
            "",
        ]
    )


def fish(found: list[Node]) -> str:
    lines = ["# easymp's completion for fish; made by `easymp completion fish`"]
    for node in found:
        path = node.path.split()[1:]
        seen = "".join(f"; and __fish_seen_subcommand_from {word}" for word in path)[6:]
        rest = f"not __fish_seen_subcommand_from {' '.join(node.below)}" if node.below else ""
        when = shlex.quote("; and ".join(filter(None, (seen, rest))) or "true")
        for name, words in node.below.items():
            lines.append(f"complete -c easymp -n {when} -f -a {name} -d {_fish(words)}")
        if node.choices:
            lines.append(f"complete -c easymp -n {when} -f -a {shlex.quote(' '.join(node.choices))}")
        for flag in node.flags:
            spelled = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in flag.names)
            takes = (
                (f" -x -a {shlex.quote(' '.join(flag.choices))}" if flag.choices else " -r")
                if flag.takes
                else ""
            )
            lines.append(f"complete -c easymp -n {when} {spelled}{takes} -d {_fish(flag.words)}")
    return "\n".join([*lines, ""])


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
