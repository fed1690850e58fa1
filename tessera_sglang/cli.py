"""``tessera-sglang COMMAND``: small tools around a server.

A command is a function that adds its parser and sets ``command`` to what runs; heavy imports stay
inside that, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name

MOST_AGENTS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="tessera-sglang", description="Tessera for SGLang.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (_add_demo, _add_doctor, _add_layout):
        add(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.command(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="agents over one document: SGLang's own prefix tree against the content index",
        description="Starts two servers one after the other, sends both the same requests from "
        "agents that read one document behind different preambles, and prints what each computed "
        "and kept. Exits with 0 only if the claims hold.",
    )
    parser.add_argument("--text", action="store_true", help="a real language model (SmolLM2-135M)")
    parser.add_argument("--agents", type=_agents, default=MOST_AGENTS, help=f"2 to {MOST_AGENTS}")
    parser.add_argument("--json", action="store_true", help="print the raw figures as JSON")
    parser.set_defaults(command=_demo)


def _demo(options: argparse.Namespace) -> int:
    try:
        from .demo.launch import LaunchError
        from .demo.run import DemoError, run
    except ImportError as error:
        print(f"{error.name} is missing: pip install 'tessera-sglang[sglang]'", file=sys.stderr)
        return 1
    try:
        return run(text=options.text, agents=options.agents, as_json=options.json)
    except (DemoError, LaunchError) as error:
        print(error, file=sys.stderr)
        return 1


def _agents(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 2 <= number <= MOST_AGENTS:
        raise argparse.ArgumentTypeError(f"must be a whole number from 2 to {MOST_AGENTS}")
    return number


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="whether a server would start here, and with what",
        description="Checks versions, hooks, device and TESSERA_CONFIG. Exits with 1 if a server "
        "would refuse to start, as far as can be told without a model.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    return doctor.run(as_json=options.json)


def _add_layout(commands: Commands) -> None:
    from . import layout

    parser = commands.add_parser(
        "layout",
        help="what a model's cache costs, per layer, per format and per context",
        description="Derives the cache of a model from its config in exact arithmetic: rows, bytes "
        "per token, pages, formats side by side, what scales, padding and replicas add, and where "
        "printed figures differ. Needs neither the model's weights nor SGLang.",
    )
    layout.add_arguments(parser)
    parser.set_defaults(command=layout.run)


if __name__ == "__main__":
    sys.exit(main())
