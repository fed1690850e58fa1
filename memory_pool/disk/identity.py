"""What the records of a server are of: everything that must agree before one may be read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from . import files
from .record import SCHEMA

_PERSON = b"tessera-store-1"  # blake2b's, so that no other digest of the same bytes is a manifest's


@dataclass(frozen=True, slots=True)
class Identity:
    """A manifest with what the store adds to it; another one of any of these reads other records."""

    layout: bytes  # JSON: regions and dtypes of a page
    page_bytes: int
    digest: bytes  # blake2b-256 of ``text``
    text: bytes  # canonical JSON, the content of manifests/DIGEST.json

    @classmethod
    def of(cls, manifest: bytes, page_bytes: int, layout: bytes) -> Identity:
        """Canonical whatever the order of keys. Raises ValueError where one of them is no JSON."""
        parts = {}
        for name, text in (("manifest", manifest), ("layout", layout)):
            try:
                parts[name] = json.loads(text)
            except ValueError as error:
                raise ValueError(f"the store's {name} must be JSON, got {text[:80]!r}") from error
        text = _canonical({**parts, "page_bytes": page_bytes, "schema": SCHEMA})
        digest = hashlib.blake2b(text, digest_size=32, person=_PERSON).digest()
        return cls(_canonical(parts["layout"]), page_bytes, digest, text)

    def save(self, directory: Path) -> None:
        """Write it beside the records, once. Raises OSError."""
        path = directory / f"{self.digest.hex()}.json"
        try:
            if path.read_bytes() == self.text:
                return
        except FileNotFoundError:
            pass
        files.replace_file(path, self.text)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
