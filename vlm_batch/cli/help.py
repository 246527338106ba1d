"""Help in two lengths: ``--help`` with everyday options, ``--help-all`` with all."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._everyday: Sequence[str] = ()
        self._examples: Sequence[str] = ()

    def set_everyday(self, names: Sequence[str], examples: Sequence[str]) -> None:
        """Set ``--help``'s options and examples."""
        self._everyday, self._examples = names, examples
        self.add_argument(
            "--help-all", action=_HelpAll, nargs=0, help="show every option, in groups"
        )

    def format_help(self) -> str:
        return self.format_everyday() if self._everyday else super().format_help()

    def format_everyday(self) -> str:
        by_name = {
            name: action
            for action in self._actions
            for name in (*action.option_strings, action.dest)
        }
        shown = [by_name[name] for name in (*self._everyday, "--help", "--help-all")]
        places = [action for action in shown if not action.option_strings]
        formatter = self._get_formatter()
        formatter.add_usage(
            f"{self.prog} {''.join(f'{one.metavar} ... ' for one in places)}[options]",
            [],
            [],
        )
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments(shown)
        formatter.end_section()
        examples = "".join(f"\n  {example}" for example in self._examples)
        return f"{formatter.format_help()}\nexamples:{examples}\n"

    def format_everything(self) -> str:
        return super().format_help()

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with the option probably meant."""
        name = unknown[0].partition("=")[0]
        names = [name for action in self._actions for name in action.option_strings]
        meant = difflib.get_close_matches(name, names, 1)
        self.error(
            f"there is no {name}" + (f"; {meant[0]} is probably meant" if meant else "")
        )

    def error(self, message: str) -> NoReturn:
        """Exit with the message, without a long usage line."""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help shows the options\n")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        parser._print_message(parser.format_everything(), sys.stdout)
        parser.exit()
