"""TileLang's kernel against the oracle, in a process of its own: TileLang starts a C compiler, and a
process that has loaded all of SGLang, as other tests do in this one, may not survive the fork."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("tilelang_cases.py")


def test_parity_with_the_oracle() -> None:
    pytest.importorskip("tilelang")
    if not any(map(shutil.which, ("cc", "gcc"))):
        pytest.skip("TileLang's C target needs a C compiler")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=CASES.parent)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
    assert " passed" in ended.stdout or "[100%]" in ended.stdout
    assert "skipped" not in ended.stdout
