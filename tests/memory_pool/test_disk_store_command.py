"""``tessera-sglang store`` over a real directory."""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import pytest
from disk_helpers import opened, segment_paths, write
from tier_helpers import PAGE_BYTES, content, document

from tessera_sglang import store_command

NAMES = document(1, 6)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Six records, of which two are of a span."""
    store = opened(tmp_path)
    write(store, NAMES[:4])
    write(store, NAMES[4:], shared=True)
    store.close()
    return tmp_path


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    store_command.add_arguments(parser)
    return store_command.run(parser.parse_args([str(each) for each in arguments]))


def damage(path: Path) -> None:
    (segment,) = segment_paths(path)
    with open(segment, "r+b") as file:
        file.seek(4096 + 4096 + 3)  # of the first payload
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_ls(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls", directory, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (group,) = found["groups"]
    assert (group["records"], group["shared"], group["tokens"], group["bytes"]) == (
        6,
        2,
        24,
        6 * 8192,
    )
    assert group["namespace"] == NAMES[0].namespace.hex()
    assert (found["segments"], found["quarantined"]) == (1, 0)
    assert run("ls", directory) == 0
    assert group["manifest"][:12] in capsys.readouterr().out


def test_verify_reports_and_puts_aside_when_asked(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", directory) == 0
    damage(directory)
    for options, again in (([], 1), (["--quarantine"], 1), ([], 0)):
        assert run("verify", directory, *options) == again
    assert len(list((directory / "quarantine").iterdir())) == 1
    assert "6 records, 1 damaged" in capsys.readouterr().out


def test_rebuild_and_gc(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "index.1.sqlite").unlink()
    assert run("rebuild", directory, "--json") == 0
    assert json.loads(capsys.readouterr().out)["records"] == 6
    (segment,) = segment_paths(directory)
    with open(segment, "ab") as file:
        file.write(b"torn" * 2000)
    assert run("gc", directory, "--json") == 0
    assert json.loads(capsys.readouterr().out)["torn_bytes"] == 8000
    assert run("verify", directory) == 0


def test_export_writes_safetensors_of_whole_records(directory: Path, tmp_path: Path) -> None:
    damage(directory)
    file = tmp_path / "pages.safetensors"
    assert run("export", directory, "--out", file) == 0
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    table = json.loads(raw[8 : 8 + size])
    about = table.pop("__metadata__")
    assert set(table) == {name.key.hex() for name in NAMES[1:]}
    for name in NAMES[1:]:
        entry = table[name.key.hex()]
        begin, end = entry["data_offsets"]
        assert (entry["dtype"], entry["shape"]) == ("U8", [PAGE_BYTES])
        assert raw[8 + size :][begin:end] == content(name)
        tokens = json.loads(about[name.key.hex()])["tokens"]
        assert b"".join(token.to_bytes(8, "little") for token in tokens) == name.tokens
    assert run("export", directory, "--out", file, "--key", NAMES[2].key.hex()[:10]) == 0
    assert NAMES[3].key.hex().encode() not in file.read_bytes()
    assert run("export", directory, "--out", file, "--key", "zz") == 1


def test_what_is_no_store_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls", tmp_path) == 1
    assert "holds no store" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
