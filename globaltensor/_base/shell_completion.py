"""Scripts that complete a command's verbs, options and values in bash, zsh and fish.

``globaltensor completion`` prints them. They are generated from the parsers of the verbs, so they
know every option that the parsers know.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Final

__all__ = ["SHELLS", "completion_script"]

Parsers = Mapping[str, argparse.ArgumentParser]


def completion_script(
    shell: str, command: str, top: argparse.ArgumentParser, verbs: Parsers
) -> str:
    """Return the script for a shell, one of `SHELLS`.

    ``top`` is the parser of the command, which has a line about each verb. ``verbs`` has the parser
    of each verb.
    """
    return "\n".join(SHELLS[shell](command, top, verbs)) + "\n"


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options of a parser, without those that its help hides."""
    for action in parser._actions:
        if action.option_strings and action.help is not argparse.SUPPRESS:
            yield action


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0


def _choices(action: argparse.Action) -> list[str]:
    return [] if action.choices is None else [str(choice) for choice in action.choices]


def _takes_the_rest(parser: argparse.ArgumentParser) -> bool:
    """Return True if the verb passes further arguments on to a program."""
    return any(action.nargs == argparse.REMAINDER for action in _positionals(parser))


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Return the beginning of an option's help, up to the first bracket or semicolon."""
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    for end in (" (", "; "):
        text = text.partition(end)[0]
    return text


def _summaries(top: argparse.ArgumentParser) -> dict[str, str]:
    """Return the line of each verb in the help of the command."""
    return {
        verb.dest: (verb.help or "").partition(" (")[0]
        for action in top._actions
        if isinstance(action, argparse._SubParsersAction)
        for verb in action._get_subactions()
    }


def _bash(command: str, top: argparse.ArgumentParser, verbs: Parsers) -> Iterator[str]:
    first = [*verbs, *(text for action in _options(top) for text in action.option_strings)]
    yield f'# bash completion of {command}: eval "$({command} completion bash)" in ~/.bashrc'
    yield f"_{command}() {{"
    yield "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}"
    yield "    local words= valued= rest= i"
    yield "    COMPREPLY=()"
    yield "    if ((COMP_CWORD == 1)); then"
    yield f'        COMPREPLY=($(compgen -W "{" ".join(first)}" -- "$cur"))'
    yield "        return"
    yield "    fi"
    yield '    case "${COMP_WORDS[1]}" in'
    for verb, parser in verbs.items():
        options = list(_options(parser))
        spelled = [text for action in options for text in action.option_strings]
        valued = [t for action in options if _takes_value(action) for t in action.option_strings]
        yield f"    {verb})"
        yield f'        words="{" ".join(spelled)}" valued=" {" ".join(valued)} "'
        if _takes_the_rest(parser):
            yield "        rest=1"
        values = [(action.option_strings, _choices(action)) for action in options]
        if any(choices for _, choices in values):
            yield '        case "$prev" in'
            for strings, choices in values:
                if choices:
                    words = " ".join(choices)
                    yield f"        {'|'.join(strings)})"
                    yield f'            COMPREPLY=($(compgen -W "{words}" -- "$cur"))'
                    yield "            return ;;"
            yield "        esac"
        given = [word for action in _positionals(parser) for word in _choices(action)]
        if given:
            yield f'        [[ $cur != -* ]] && words="{" ".join(given)}"'
        yield "        ;;"
    yield "    esac"
    yield "    # without an answer, bash completes the names of files"
    yield '    [[ $valued == *" $prev "* ]] && return'
    yield "    if [[ $rest ]]; then  # options after the script are the script's own"
    yield "        for ((i = 2; i < COMP_CWORD; i++)); do"
    yield '            if [[ $valued == *" ${COMP_WORDS[i]} "* ]]; then'
    yield "                ((i++))"
    yield "            elif [[ ${COMP_WORDS[i]} != -* ]]; then"
    yield "                return"
    yield "            fi"
    yield "        done"
    yield "    fi"
    yield '    [[ $cur == -* || $words != -* ]] && COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield "}"
    yield f"complete -o default -F _{command} {command}"


def _zsh(command: str, top: argparse.ArgumentParser, verbs: Parsers) -> Iterator[str]:
    def text(words: str) -> str:
        for mark in "\\[]:":
            words = words.replace(mark, f"\\{mark}")
        return words

    def spec(action: argparse.Action, parser: argparse.ArgumentParser) -> Iterator[str]:
        value = ""
        if _takes_value(action):
            choices = _choices(action)
            value = f":{action.dest}:" + (f"({' '.join(choices)})" if choices else "_files")
        for name in action.option_strings:
            others = " ".join(action.option_strings)
            yield shlex.quote(f"({others}){name}[{text(_help(action, parser))}]{value}")

    yield f"#compdef {command}"
    yield f"# zsh completion of {command}: save it as _{command} in a folder of $fpath"
    yield f"_{command}() {{"
    yield "    local -a verbs"
    yield "    verbs=("
    for verb, what in _summaries(top).items():
        yield f"        {shlex.quote(f'{verb}:{text(what)}')}"
    yield "    )"
    yield "    if (( CURRENT == 2 )); then"
    yield "        if [[ $words[2] == -* ]]; then"
    yield "            _arguments \\"
    for action in _options(top):
        for one in spec(action, top):
            yield f"                {one} \\"
    yield "                ;"
    yield "        else"
    yield "            _describe verb verbs"
    yield "        fi"
    yield "        return"
    yield "    fi"
    yield "    local verb=$words[2]"
    yield "    shift words"
    yield "    (( CURRENT-- ))"
    yield "    case $verb in"
    for verb, parser in verbs.items():
        yield f"    {verb})"
        yield "        _arguments \\"
        for action in _options(parser):
            for one in spec(action, parser):
                yield f"            {one} \\"
        for action in _positionals(parser):
            choices = _choices(action)
            how = f"({' '.join(choices)})" if choices else "_files"
            many = {argparse.REMAINDER: "*::", argparse.ZERO_OR_MORE: "*:"}
            each = f"{many.get(str(action.nargs), ':')}{action.dest}:{how}"
            yield f"            {shlex.quote(each)} \\"
        yield "            ;;"
    yield "    esac"
    yield "}"
    yield f'if [[ $funcstack[1] == _{command} ]]; then _{command} "$@"; else compdef _{command} {command}; fi'  # noqa: E501


def _fish(command: str, top: argparse.ArgumentParser, verbs: Parsers) -> Iterator[str]:
    def names(action: argparse.Action) -> str:
        return " ".join(
            f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}"
            for text in action.option_strings
        )

    yield f"# fish completion of {command}: save it as ~/.config/fish/completions/{command}.fish"
    start = f"complete -c {command}"
    yield f"{start} -n __fish_use_subcommand -f"
    for action in _options(top):
        explained = shlex.quote(_help(action, top))
        yield f"{start} -n __fish_use_subcommand {names(action)} -d {explained}"
    for verb, what in _summaries(top).items():
        explained = shlex.quote(what)
        yield f"{start} -n __fish_use_subcommand -a {verb} -d {explained}"
    for verb, parser in verbs.items():
        within = f"{start} -n '__fish_seen_subcommand_from {verb}'"
        for action in _options(parser):
            choices, explained = _choices(action), shlex.quote(_help(action, parser))
            value = f" -x -a '{' '.join(choices)}'" if choices else " -r" * _takes_value(action)
            yield f"{within} {names(action)}{value} -d {explained}"
        for action in _positionals(parser):
            if choices := _choices(action):
                yield f"{within} -f -a '{' '.join(choices)}'"


SHELLS: Final[Mapping[str, Callable[[str, argparse.ArgumentParser, Parsers], Iterator[str]]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
