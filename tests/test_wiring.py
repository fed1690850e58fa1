"""Which backend a runner gets, and whose kernels are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

wiring = pytest.importorskip("tessera_sglang.wiring", exc_type=ImportError)

from tessera_sglang.config import Config  # noqa: E402 # after the skip
from tessera_sglang.kernels import Stock, router_of  # noqa: E402
from tessera_sglang.stock import StockBackend  # noqa: E402
from tessera_sglang.survey import Survey  # noqa: E402

OURS = object()
INSIDE = ("fa3", "flashmla")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `make_backend` returns, the stock backend it built, and the runner."""

    def build(index: Any, names: tuple[str, str] | None, foreign: str | None = None) -> Any:
        inner = SimpleNamespace()
        for name, value in (
            ("verify", lambda hooks: None),
            ("register_forward_method", lambda: None),
            ("survey_of", lambda runner: Survey(foreign=foreign, refusal="none are served")),
            ("default_backend_name", lambda runner: "fa3"),
            ("load", lambda: Config(index=index)),
            ("make_router", lambda runner, wanted: "the router"),
            ("stock_of", lambda runner, router: Stock(names, "because")),
            ("build_stock", lambda runner, *names: StockBackend(inner, *names)),
            ("TesseraBackend", lambda *_: OURS),
        ):
            monkeypatch.setattr(wiring, name, value)
        runner = SimpleNamespace()
        return wiring.make_backend(runner), inner, runner

    return build


@pytest.mark.parametrize(
    ("index", "names"), [("content", INSIDE), ("content", None), ("radix", None)]
)
def test_what_our_backend_runs_is_counted(
    make: Any, index: str, names: tuple[str, str] | None
) -> None:
    backend, _, runner = make(index, names)
    assert backend is OURS
    assert router_of(runner) == "the router"


@pytest.mark.parametrize(
    ("index", "foreign"), [("radix", None), ("radix", "sinks"), ("content", "sinks")]
)
def test_nothing_is_counted_where_sglangs_own_backend_serves(
    make: Any, index: str, foreign: str | None
) -> None:
    backend, inner, runner = make(index, INSIDE, foreign)
    assert backend is inner
    assert router_of(runner) is None
