"""``tessera-sglang layout``: what a model's cache costs, per layer, per format and per context."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from fractions import Fraction
from pathlib import Path

from . import tables
from .memory_pool.formats import Comparison
from .memory_pool.known_models import KNOWN, KnownModel, Unit
from .memory_pool.ledger import Ledger, build
from .memory_pool.model_geometry import read_model
from .memory_pool.models import AnyModel
from .memory_pool.persistence import Cost, costs
from .memory_pool.rows import IndexFormat, KvFormat
from .tables import Table

CONFIG_FILES = ("config.json", "params.json")  # the second is Mistral's own
CONTEXTS = "8K,128K,1M"
_SUFFIXES = {"K": 1 << 10, "M": 1 << 20}
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class LayoutError(Exception):
    """Nothing to lay out; says what was looked for."""


def run(options: argparse.Namespace) -> int:
    """Print the ledger of ``options.model``; 2 where there is none to print."""
    kv = options.kv_dtype and KvFormat(options.kv_dtype)
    index = options.index_dtype and IndexFormat(options.index_dtype)
    try:
        model, known = find(options.model)
        ledger = build(
            model,
            options.context,
            kv=kv,
            index=index,
            page_tokens=options.page_size,
            tensor_parallel=options.tp,
            known=known,
        )
        windows = costs(
            model.geometry(kv, index, page_tokens=options.page_size, tensor_parallel=options.tp),
            checkpoint_tokens=options.swa_checkpoint_tokens,
        )
    except (LayoutError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        found = dataclasses.asdict(ledger)
        found["swa_persistence"] = [dataclasses.asdict(cost) for cost in windows]
        print(json.dumps(found, indent=2, default=_plain))
    else:
        show(ledger, windows)
    return 0


def find(text: str) -> tuple[AnyModel, KnownModel | None]:
    """The model of a config file, of a directory that holds one, or of a known name.

    Raises :class:`LayoutError` where ``text`` is none of them, and ValueError where a config is of no
    use.
    """
    try:
        return _from_path(Path(text)), None
    except FileNotFoundError:
        pass
    except OSError as error:  # too long, not permitted
        raise LayoutError(f"{text[:60]}: {error.strerror}") from error
    name = text.lower().rpartition("/")[2]
    if name not in KNOWN:
        raise LayoutError(
            f"{text}: neither a config file nor a directory, and no known name. Known are "
            + ", ".join(KNOWN)
        )
    return read_model(KNOWN[name].config, name), KNOWN[name]


def _from_path(path: Path) -> AnyModel:
    """Raises FileNotFoundError where there is neither a file nor a directory."""
    if path.is_dir():
        files = [path / name for name in CONFIG_FILES if (path / name).is_file()]
        if not files:
            raise LayoutError(f"{path}: the directory holds no {' and no '.join(CONFIG_FILES)}")
        return _read(files[0])
    path.stat()
    return _read(path)


def _read(path: Path) -> AnyModel:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LayoutError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise LayoutError(f"{path}: wanted a JSON object, found {type(config).__name__}")
    return read_model(config, path.resolve().parent.name)


_MOST_DIGITS = 12


def contexts(text: str) -> tuple[int, ...]:
    """Context lengths in tokens from ``8K,128K,1M``; K is 1,024 tokens and M 1,024 of those."""
    found = []
    for part in text.upper().split(","):
        number = part.strip()
        scale = _SUFFIXES.get(number[-1:], 1)
        digits = number[:-1] if scale > 1 else number
        known = digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS
        if not known or int(digits) == 0:
            raise argparse.ArgumentTypeError(
                f"{part.strip()[:20]!r} is no context length such as 4096 or 128K"
            )
        found.append(int(digits) * scale)
    return tuple(found)


def show(ledger: Ledger, windows: tuple[Cost, ...] = ()) -> None:
    """Print for people."""
    print(_headline(ledger))
    for table in _tables(ledger):
        tables.show(table)
    if windows:
        tables.show(_persistence(windows))
    print("\n" + "\n".join(_notes(ledger)))
    if windows:
        print(_PERSISTENCE_NOTE)


def _headline(ledger: Ledger) -> str:
    page = ledger.page
    lines = [
        f"{ledger.model}: {ledger.layers} layers, pages of {page.page_tokens} tokens "
        f"(block {page.block_tokens}), tensor parallel {ledger.tensor_parallel}"
    ]
    if ledger.source:
        lines.append(f"config: {ledger.source}")
    return "\n".join(lines)


def _tables(ledger: Ledger) -> Iterator[Table]:
    lengths = tuple(_length(tokens) for tokens in ledger.contexts)
    yield Table(
        "Rows, on one rank",
        (
            "layer",
            "layers",
            "plane",
            "tier",
            "rows",
            "tokens/row",
            "content",
            "B/row",
            "B/token",
            "row",
        ),
        tuple(
            (
                line.kind,
                str(line.layers),
                line.plane,
                line.tier,
                f"{line.rows}/{'page' if line.tier == 'paged' else 'slot'}",
                str(line.tokens),
                f"{line.content_bytes:,}",
                f"{line.row_bytes:,}",
                _exact(line.bytes_per_token) if line.tier == "paged" else "",
                line.row,
            )
            for line in ledger.planes
        ),
        left=frozenset({0, 2, 3, 9}),
    )
    yield Table(
        "Layers, paged, on one rank; the context columns are all layers of the kind",
        ("layer", "layers", "content B/token", "stored B/token", "slot", *lengths),
        tuple(
            (
                line.kind,
                str(line.layers),
                _exact(line.content_bytes_per_token),
                _exact(line.bytes_per_token),
                _size(line.slot_bytes),
                *map(_size, line.context_bytes),
            )
            for line in ledger.kinds
        ),
    )
    yield Table(
        "Formats, the whole model, one copy",
        ("format", "what", "B/token/layer", "per token", *lengths, "smaller"),
        tuple(
            (
                line.key,
                line.label,
                "" if line.bytes_per_layer is None else _exact(line.bytes_per_layer),
                _size(line.bytes_per_token),
                *map(_size, line.context_bytes),
                f"{float(line.times_smaller):.1f}x" if line.times_smaller else "",
            )
            for line in ledger.formats
        ),
        left=frozenset({0, 1}),
    )
    yield Table(
        "In memory, from content to what is allocated",
        ("", *lengths),
        tuple(
            (("= " if line.total else "  ") + line.name, *map(_size, line.context_bytes))
            for line in ledger.corrections
        ),
    )
    if ledger.comparisons:
        yield Table(
            "Printed figures",
            ("of", "tokens", "printed", "exact", "", "where"),
            tuple(_comparison(line) for line in ledger.comparisons),
            left=frozenset({0, 5}),
        )


def _persistence(windows: tuple[Cost, ...]) -> Table:
    return Table(
        "Sliding-window persistence, on one rank",
        (
            "swa_persistence",
            "states every",
            "B/token",
            "of paged",
            "read per restore",
            "tokens recomputed, mean",
            "most",
        ),
        tuple(
            (
                cost.strategy,
                f"{cost.every_tokens:,} tokens" if cost.every_tokens else "never",
                f"{float(cost.bytes_per_token):,.2f}",
                "" if cost.times_paged is None else f"{float(cost.times_paged):.2f}x",
                _size(cost.restored_bytes),
                f"{float(cost.mean_tokens):,.0f}",
                f"{cost.most_tokens:,}",
            )
            for cost in windows
        ),
    )


_PERSISTENCE_NOTE = (
    "Sliding-window persistence: what is stored beside the pages so that a sequence can go on at a page "
    "boundary. Without it the last (window - 1) x (layers with a window) tokens are computed again. "
    "docs/tiers.md says why; no server uses these strategies yet."
)


def _comparison(line: Comparison) -> tuple[str, ...]:
    printed = line.printed
    sign = printed.unit.sign
    return (
        printed.of,
        _length(printed.tokens),
        f"{printed.figure} {sign}",
        f"{line.rounded} {sign}",
        "agrees" if line.agrees else "differs",
        printed.source,
    )


def _notes(ledger: Ledger) -> Iterator[str]:
    page = ledger.page
    yield (
        f"A page over all layers is {page.page_bytes:,} B: {page.content_bytes:,} content, "
        f"{page.scale_bytes:,} scales, {page.padding_bytes:,} padding "
        f"(metadata {float(page.metadata_share):.2%})."
    )
    if page.sglang_page_bytes is not None:
        more = Fraction(page.sglang_page_bytes, page.page_bytes) - 1
        yield (
            f"SGLang's own pool pads each layer's page of entries to a multiple of 576 B: "
            f"{page.sglang_page_bytes:,} B, {float(more):.1%} more."
        )
    if ledger.slot_bytes:
        yield (
            f"A request's slot in the arena is {ledger.slot_bytes:,} B on each rank; "
            f"{ledger.boundary_bytes:,} B of it are needed to go on from a block boundary."
        )
    for line in ledger.comparisons:
        if not line.agrees:
            yield _difference(line)
    yield (
        "A plane is one tensor of a layer, its row cut into regions. Paged planes grow with the "
        "context; a plane of the arena has a fixed number of rows for each request (its slot). "
        "A block is the smallest page that splits no row. The row table maps positions to slots on the "
        "device; the index is what finds pages by their tokens, on the host."
    )
    yield (
        "Smaller: against the first format listed. Rows and memory are those of the default format, or "
        "of --kv-dtype; SGLang may serve a model in another one. --tp shows what ranks replicate."
    )
    yield "K = 1,024 tokens. KiB, MiB, GiB, TiB are powers of 1,024 bytes; 1 GiB = 1.0737 GB."


def _difference(line: Comparison) -> str:
    printed, sign = line.printed, line.printed.unit.sign
    decimal = ""
    if printed.unit is Unit.GIB:
        decimal = f" ({float(line.exact * Unit.GIB.size / 10**9):.2f} GB)"
    reason = f"; {printed.remark}" if printed.remark else ""
    return (
        f"Note: {printed.of} is printed as {printed.figure} {sign}, exact arithmetic gives "
        f"{line.rounded} {sign}{decimal}{reason}."
    )


def _length(tokens: int) -> str:
    for suffix, scale in reversed(_SUFFIXES.items()):
        if tokens % scale == 0:
            return f"{tokens // scale}{suffix}"
    return f"{tokens:,}"


def _size(size: Fraction | int) -> str:
    """In binary units, to a hundredth, half upwards."""
    for scale, sign in _BINARY:
        if size >= scale:
            hundredths = math.floor(Fraction(size) / scale * 100 + Fraction(1, 2))
            return f"{hundredths / 100:,.2f} {sign}"
    return f"{_exact(size)} B" if size else "0"


def _exact(size: Fraction | int) -> str:
    """Bytes to a ten-thousandth, without trailing zeros; quotients of 128 are exact in seven digits."""
    return f"{float(size):,.7f}".rstrip("0").rstrip(".")


def _plain(value: object) -> object:
    """JSON for what the ledger holds: exact numbers as int where they are whole."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    assert isinstance(value, Enum)
    return value.sign if isinstance(value, Unit) else value.value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "model",
        metavar="CONFIG_OR_NAME",
        help="a config.json, a directory that holds one, or one of " + ", ".join(KNOWN),
    )
    parser.add_argument(
        "--context", type=contexts, default=CONTEXTS, help="context lengths (default %(default)s)"
    )
    parser.add_argument("--page-size", type=_positive, help="tokens (default: what fits the model)")
    parser.add_argument("--tp", type=_positive, default=1, help="tensor-parallel ranks")
    parser.add_argument("--kv-dtype", choices=_values(KvFormat), help="format of the cache")
    parser.add_argument("--index-dtype", choices=_values(IndexFormat), help="and of indexer keys")
    parser.add_argument(
        "--swa-checkpoint-tokens",
        type=_positive,
        help="tokens between stored window states (default: 2,048 in whole pages)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _values(formats: type[KvFormat] | type[IndexFormat]) -> Sequence[str]:
    return [member.value for member in formats]


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)
