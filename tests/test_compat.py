"""An SGLang that is not the one we know refuses to start us, with the true reason."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

compat = pytest.importorskip("tessera_sglang.compat", exc_type=ImportError)

MODEL = Path(__file__).parent.parent / "examples" / "tiny-mla"


def run(program: str, **environment: str) -> Any:
    """What a program printed last, as JSON, in a process that has loaded no plugin yet."""
    result = subprocess.run(
        [sys.executable, "-c", program, str(MODEL)],
        env={**os.environ, "TESSERA_CONFIG": "", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


# --- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["0.5.22", "0.5.24", "0.5.23.post1", "0.6.0"])
def test_an_unknown_version_is_refused_with_the_reason(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", lambda name: found)
    with pytest.raises(compat.IncompatibleError) as caught:
        compat.check_version()
    message = str(caught.value)
    assert f"SGLang {found} is installed" in message
    assert f"install sglang=={compat.KNOWN_VERSIONS[-1]}" in message


@pytest.mark.parametrize("found", compat.KNOWN_VERSIONS)
def test_a_known_version_is_accepted(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", {"sglang": found}.__getitem__)
    assert compat.check_version() is None


def test_a_missing_sglang_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(compat, "version", missing)
    with pytest.raises(compat.IncompatibleError, match="not installed; install sglang=="):
        compat.check_version()


# --- hooks ---------------------------------------------------------------------------------------


def wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """As SGLang wraps: the hook in the closure, the original in ``__wrapped__``."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


def hook_one(*args: Any) -> None:
    """A hook."""


def hook_two(*args: Any) -> None:
    """Another."""


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module: Any = ModuleType("a_module_that_is_patched")
    module.Thing = SimpleNamespace(method=lambda: None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    thing: SimpleNamespace = module.Thing
    return thing


def verify(*functions: Callable[..., Any], name: str = "Thing.method") -> None:
    path = f"a_module_that_is_patched.{name}"
    compat.verify(tuple(compat.Hook(path, compat.HookType.AROUND, f) for f in functions))


def test_a_hook_that_landed_is_found_below_those_of_others(target: SimpleNamespace) -> None:
    target.method = wrapped(target.method, hook_one)
    verify(hook_one)
    target.method = wrapped(wrapped(target.method, hook_two), lambda *args: None)
    verify(hook_one, hook_two)


def test_a_hook_that_did_not_land_is_reported_by_name(target: SimpleNamespace) -> None:
    target.method = wrapped(target.method, hook_one)
    with pytest.raises(
        compat.IncompatibleError, match=r"hook on a_module_that_is_patched\.Thing\.method did not"
    ):
        verify(hook_one, hook_two)


def test_a_target_that_is_gone_is_reported_by_name(target: SimpleNamespace) -> None:
    with pytest.raises(compat.IncompatibleError, match=r"Thing\.other is gone from this SGLang"):
        verify(hook_one, name="Thing.other")


def test_every_hook_lands_in_the_installed_sglang() -> None:
    """Resolved and checked one by one, so that the first failure does not hide the rest."""
    outcome = run("""
import json
from sglang.srt.plugins import load_plugins
load_plugins()
from tessera_sglang import compat, wiring
problems = []
for hook in wiring.HOOKS:
    try:
        compat.verify((hook,))
    except compat.IncompatibleError as error:
        problems.append(str(error))
print(json.dumps({"hooks": len(wiring.HOOKS), "problems": problems}))
""")
    assert outcome["problems"] == []
    assert outcome["hooks"] > 5


# --- a plugin that can not work ------------------------------------------------------------------

_RESOLVE = """
import json, sys
{preparation}
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
outcome = {{}}
for backend in ("tessera", "torch_native"):
    flags = ["--model-path", sys.argv[1], "--device", "cpu", "--attention-backend", backend]
    try:
        prepare_server_args(flags).resolve_once()
        outcome[backend] = None
    except Exception as error:
        outcome[backend] = str(error)
print(json.dumps(outcome))
"""


@pytest.mark.parametrize(
    ("preparation", "reason"),
    [
        pytest.param(
            "from tessera_sglang import compat; compat.KNOWN_VERSIONS = ('9.9.9',)",
            "this version of Tessera knows 9.9.9",
            id="unknown version",
        ),
        pytest.param(
            "import sys; sys.modules['tessera_sglang.wiring'] = None",
            "tessera_sglang.wiring",
            id="a symbol that moved",
        ),
        pytest.param(
            "from tessera_sglang import compat; compat.install = lambda hooks: None",
            "did not land",
            id="hooks that did not land",
        ),
    ],
)
def test_a_failed_setup_refuses_tessera_with_the_reason_and_nothing_else(
    preparation: str, reason: str
) -> None:
    outcome = run(_RESOLVE.format(preparation=preparation))
    assert reason in outcome["tessera"]
    assert outcome["torch_native"] is None
