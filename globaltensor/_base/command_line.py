"""The parser of the commands, with examples in its help and suggestions in its errors.

``globaltensor`` and the launcher use it.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

__all__ = ["CommandParser", "closest"]

_INVALID_CHOICE = re.compile(r"argument ([^:]+): invalid choice: '([^']*)'")


def closest(word: str, among: Iterable[str]) -> str:
    """Return the name that a misspelt or shortened word most likely means, or an empty string.

    >>> names = ["plan", "profile", "--role", "--nproc_per_node"]
    >>> closest("profle", names), closest("zebra", names), closest("--nproc", names)
    ('profile', '', '--nproc_per_node')
    """
    names = list(among)
    longer = [name for name in names if len(word) > 3 and name.startswith(word)]
    return next(iter(difflib.get_close_matches(word, longer, 1, 0) or
                     difflib.get_close_matches(word, names, 1)), "")  # fmt: skip


class CommandParser(argparse.ArgumentParser):
    """A parser whose help ends in examples, and whose errors name what a misspelt word means.

    ``examples`` are command lines, each with a comment or none. Parsers of verbs are made by
    ``add_subparsers`` of this class, so they have these features too.

    >>> parser = CommandParser("tool", examples=["tool --size 2"])
    >>> print(parser.epilog)
    examples:
      tool --size 2
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        if examples:
            lines = "\n".join(f"  {line}" for line in examples)
            more = options.get("epilog")
            options["epilog"] = f"examples:\n{lines}" + (f"\n\n{more}" if more else "")
        super().__init__(*args, **options)
        self.suggest_on_error = False  # Python 3.14's own suggestions, which are of choices only
        self._arguments: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse the arguments, and end with an error of this parser if any is unknown.

        argparse lets the parser of all verbs report what the parser of one verb does not know.
        """
        self._arguments = list(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2, the usage, the message and a suggestion."""
        near = self._suggestion(message)
        super().error(f"{message}; did you mean {near}?" if near else message)

    def _suggestion(self, message: str) -> str:
        """Return the verb, option or value that is meant, or an empty string."""
        choice = _INVALID_CHOICE.match(message)
        if choice:
            name, word = choice.groups()
            for action in self._actions:
                names = ("/".join(action.option_strings), action.metavar, action.dest)
                if action.choices is not None and name in names:
                    return closest(word, map(str, action.choices))
            return ""
        options = [text for action in self._actions for text in action.option_strings]
        if message.startswith("unrecognized arguments: "):
            words = message.partition(": ")[2].split()
        elif "required" in message:  # a misspelt option may be why something seems to be missing
            words = [word for word in self._arguments if word.partition("=")[0] not in options]
        else:
            words = []
        near = [closest(w.partition("=")[0], options) for w in words if re.match("--?\\w", w)]
        return ", ".join(dict.fromkeys(filter(None, near)))
