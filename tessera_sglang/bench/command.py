"""The command line of ``tessera-sglang bench``, and what it does."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tessera_sglang.claims import Check, at_least
from tessera_sglang.config import ConfigError
from tessera_sglang.launch import LaunchError, signals_raise

from . import workload as workloads
from .agents import WORKLOAD, Shape
from .client import CLIENT, OURS, ClientError, Requests, UsageError, drive
from .metrics import Metrics
from .report import Report
from .rounds import Opener, in_turns, runs
from .sides import STOCK, TESSERA, Launch, running, started
from .summary import THROUGHPUT, Side
from .workload import Workload

if TYPE_CHECKING:
    from tqdm import tqdm

POOL_TOKENS = 131_072
ROUNDS = 3
SERVER = "server"  # the only side, where somebody else started it
_SHAPE = ("agents", "documents", "document_tokens", "output_tokens")


def run(options: argparse.Namespace) -> int:
    """Measure and report: 0, 1 where it can not be measured or a claim fails, 2 for bad usage."""
    try:
        refuse_contradictions(options)
        with signals_raise():
            return measure(options).emit(as_json=options.json)
    except (UsageError, ConfigError) as error:
        print(f"tessera-sglang bench: {error}", file=sys.stderr)
        return 2
    except (ClientError, LaunchError) as error:
        print(error, file=sys.stderr)
        return 1


def measure(options: argparse.Namespace) -> Report:
    """All rounds of all sides."""
    from tqdm import tqdm  # here, so that --help needs nothing

    workload = _workload(options)
    sides = _sides(options, workload)
    with tqdm(
        total=runs(len(sides), options.rounds), unit="run", desc="starting", disable=None
    ) as progress:
        once = partial(_once, options, workload, progress)
        found = in_turns(sides, options.rounds, once, one_by_one=options.one_by_one)
    measured = tuple(Side(name, tuple(rounds)) for name, rounds in found.items())
    report = Report(workload.title, measured, _settings(options), tuple(_notes(options)))
    if options.require_gain is None:
        return report
    return Report(
        report.workload, measured, report.settings, report.notes, _checks(report, options)
    )


def _once(
    options: argparse.Namespace,
    workload: Workload,
    progress: tqdm[Any],
    side: str,
    url: str,
    number: int,
) -> Metrics:
    progress.set_description(f"{side}, {'warm-up' if number < 0 else f'round {number + 1}'}")
    seed = options.seed + number
    requests = None
    if workload.requests is not None:
        declared = side != STOCK and not options.no_spans
        requests = Requests(workload.requests(seed), spans=declared)
    measured = drive(url, workload.arguments, seed=seed, requests=requests)
    progress.update()
    return measured


def _workload(options: argparse.Namespace) -> Workload:
    arguments = list(options.client)
    if options.model_path is not None:
        arguments = ["--model", options.model_path, "--tokenizer", options.model_path, *arguments]
    if options.dataset_name != WORKLOAD:
        return workloads.of_sglang(options.dataset_name, arguments)
    given = {name: getattr(options, name) for name in _SHAPE}
    shape = Shape(**{name: value for name, value in given.items() if value is not None})
    tokenizer = options.model_path or workloads.tokenizer_of(options.url)
    return workloads.of_agents(shape, tokenizer, arguments)


def _sides(options: argparse.Namespace, workload: Workload) -> dict[str, Opener]:
    if options.url is not None:
        if not options.ab:
            return {SERVER: partial(running, options.url)}
        return {
            STOCK: partial(running, options.stock_url),
            TESSERA: partial(running, options.url),
        }
    launch = Launch(
        options.model_path,
        workload.pool_tokens(options.seed, options.pool_tokens or POOL_TOKENS),
        tuple(shlex.split(options.server_args)),
        options.stock_backend,
    )
    wanted = (STOCK, TESSERA) if options.ab else (TESSERA,)
    return {side: partial(started, launch, side) for side in wanted}


def _checks(report: Report, options: argparse.Namespace) -> tuple[Check, ...]:
    name = "throughput, tessera / stock"
    return (at_least(name, report.gain(THROUGHPUT) or 0.0, options.require_gain),)


def _settings(options: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(options).items() if name not in ("command", "json")}


def _notes(options: argparse.Namespace) -> Iterator[str]:
    how = "one side after the other" if options.one_by_one else "in turns"
    rounds = f"medians of {options.rounds} rounds" if options.rounds > 1 else "one round"
    yield (
        f"Measured by {CLIENT}: {rounds}{', ' + how if options.ab else ''}, after one to warm up, "
        "each on an empty cache."
    )
    if options.rounds > 1:
        yield "Spread: largest by smallest round, less 1."
    if not options.ab:
        return
    stock = "SGLang's prefix tree under Tessera's attention backend"
    if options.stock_url:
        stock = options.stock_url
    elif options.stock_backend:
        stock = f"SGLang without Tessera, --attention-backend {options.stock_backend}"
    yield f"Stock: {stock}. Both sides get the same tokens. Gain above 1: Tessera is better."
    if options.dataset_name == WORKLOAD and not options.no_spans:
        yield (
            "Only Tessera is told which tokens are spans. Cached: the request that caused a span's "
            "prefill counts it as computed."
        )


# --- the command line ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rule:
    """Options that need something, and what to say without it."""

    given: Callable[[argparse.Namespace], bool]
    remedy: str


_RULES = (
    _Rule(
        lambda o: o.url is None and o.model_path is None,
        "give --url URL of a server, or --model-path M to start one",
    ),
    _Rule(
        lambda o: o.ab and (o.url is None) != (o.stock_url is None),
        "--ab compares two servers: --model-path M alone starts both, or give --url and --stock-url",
    ),
    _Rule(lambda o: o.stock_url is not None and not o.ab, "--stock-url needs --ab"),
    _Rule(lambda o: o.stock_backend is not None and not o.ab, "--stock-backend needs --ab"),
    _Rule(lambda o: o.require_gain is not None and not o.ab, "--require-gain needs --ab"),
    _Rule(lambda o: o.one_by_one and not o.ab, "--one-by-one needs --ab"),
    _Rule(
        lambda o: o.url is not None and bool(o.server_args or o.stock_backend or o.pool_tokens),
        "--server-args, --stock-backend and --pool-tokens are for servers that this command starts; "
        "with --url there are none",
    ),
    _Rule(
        lambda o: (
            o.dataset_name != WORKLOAD
            and (o.no_spans or any(getattr(o, name) is not None for name in _SHAPE))
        ),
        "--agents, --documents, --document-tokens, --output-tokens and --no-spans belong to "
        f"--dataset-name {WORKLOAD}; options of SGLang's data sets go behind --",
    ),
)


def refuse_contradictions(options: argparse.Namespace) -> None:
    """Raise UsageError where options contradict each other or would be ignored."""
    for rule in _RULES:
        if rule.given(options):
            raise UsageError(rule.remedy)
    for argument in options.client:
        name = argument.partition("=")[0]
        if name in OURS:
            raise UsageError(f"{name} behind -- would be overridden; {_instead(name)}")


def _instead(name: str) -> str:
    if name in ("--seed", "--dataset-name"):
        return f"give {name} before it"
    return "use --json for results" if name == "--output-file" else "use --url"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments. What follows ``--`` is put into ``client`` by the caller."""
    server = parser.add_argument_group("which server")
    server.add_argument(
        "--url", help="of a running server; its cache is flushed before every round"
    )
    server.add_argument("--model-path", metavar="M", help="start a server for this model")
    server.add_argument(
        "--server-args",
        default="",
        metavar="ARGS",
        help='further ones of its launcher, in one word: --server-args="--tp-size 2"',
    )
    server.add_argument(
        "--pool-tokens",
        type=positive,
        help=f"of the servers' cache (default {POOL_TOKENS:,}, or what the agents need)",
    )
    _add_comparison(parser.add_argument_group("stock SGLang against Tessera"))
    _add_workload(parser.add_argument_group("what is sent"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(client=())


def _add_comparison(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ab", action="store_true", help="measure both, with the same requests")
    group.add_argument(
        "--stock-backend",
        metavar="NAME",
        help="stock is SGLang with this attention backend (default: SGLang's prefix tree under "
        "Tessera's)",
    )
    group.add_argument("--stock-url", help="of a running stock server; --url is Tessera's")
    group.add_argument(
        "--one-by-one", action="store_true", help="never two servers at once (no turns then)"
    )
    group.add_argument(
        "--require-gain", type=float, metavar="X", help="exit with 1 below this throughput ratio"
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    default = Shape()
    group.add_argument(
        "--dataset-name",
        default=WORKLOAD,
        metavar="NAME",
        help=f"{WORKLOAD} (default), or one that {CLIENT} has, such as generated-shared-prefix; its "
        "options go behind --",
    )
    group.add_argument("--agents", type=positive, help=f"default {default.agents}")
    group.add_argument(
        "--documents", type=positive, help=f"each agent reads all (default {default.documents})"
    )
    group.add_argument(
        "--document-tokens", type=positive, help=f"default {default.document_tokens}"
    )
    group.add_argument("--output-tokens", type=positive, help=f"default {default.output_tokens}")
    group.add_argument("--no-spans", action="store_true", help="declare none, on either side")
    group.add_argument(
        "--rounds", type=positive, default=ROUNDS, help="of each side (default %(default)s)"
    )
    group.add_argument("--seed", type=int, default=1, help="of the first round (default 1)")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)
