"""``tessera-sglang bench`` without a server: the workload, the order, the arithmetic, the arguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks import plain_traffic
from tessera_sglang import cli
from tessera_sglang.attention.layout import Span, lay_out
from tessera_sglang.bench import agents, client, command, report, rounds, sides
from tessera_sglang.bench.agents import Shape
from tessera_sglang.bench.metrics import Metrics, read
from tessera_sglang.bench.summary import CACHED, FIGURES, THROUGHPUT, Side, gain
from tessera_sglang.bench.workload import Workload
from tessera_sglang.claims import at_least
from tessera_sglang.config import ConfigError

ONE = Metrics(
    throughput_tokens_per_s=1000.0,
    output_tokens_per_s=10.0,
    ttft_p50_s=2.0,
    ttft_p99_s=3.0,
    itl_p50_s=0.01,
    tpot_p50_s=0.02,
    cached_share=0.0,
    requests=4,
    prompt_tokens=4000,
    output_tokens=40,
    duration_s=4.0,
)


def encode(text: str) -> list[int]:
    return list(text.encode())


def options(*arguments: str, rest: tuple[str, ...] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    found = parser.parse_args(arguments)
    found.client = rest
    return found


# --- agents --------------------------------------------------------------------------------------

SHAPE = Shape(agents=5, documents=3, document_tokens=200, output_tokens=7)


def test_every_agent_reads_every_document_whole() -> None:
    made = agents.requests(SHAPE, encode, seed=1)
    assert len(made) == 5
    bodies = [{request.input_ids[a:b] for a, b in request.spans} for request in made]
    assert len(bodies[0]) == 3, "documents differ"
    assert all(body == bodies[0] for body in bodies), "they are the same for all"
    assert {len(document) for document in bodies[0]} == {200}
    assert len({document[:64] for document in bodies[0]}) == 3, "from the first page on"
    assert {request.output_tokens for request in made} == {7}


def test_offsets_and_beginnings_differ_between_agents() -> None:
    made = agents.requests(Shape(agents=40, documents=2, document_tokens=100), encode, seed=1)
    assert len({request.spans for request in made}) > 20
    assert len({request.input_ids[:8] for request in made}) == 40
    orders = {
        tuple(request.input_ids[start : start + 64] for start, _ in request.spans)
        for request in made
    }
    assert len(orders) == 2, "in either order"


def test_spans_are_what_the_engine_takes() -> None:
    for request in agents.requests(SHAPE, encode, seed=2):
        laid = lay_out(
            [Span(*span) for span in request.spans],
            prompt_tokens=len(request.input_ids),
            page_size=64,
            root_tokens=64,
            linked_pages=1,
        )
        assert laid is not None
        assert laid.shared_tokens == 3 * 2 * 64, "three whole pages each, less the linked one"


def test_requests_follow_from_the_seed() -> None:
    first, again, other = (agents.requests(SHAPE, encode, seed=seed) for seed in (3, 3, 4))
    assert first == again
    documents = [{request.input_ids[a:b] for a, b in request.spans} for request in first + other]
    assert not documents[0] & documents[-1], "another round shares nothing"


def test_an_empty_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="documents must be at least 1, got 0"):
        Shape(documents=0)


def test_the_pool_holds_all_prompts() -> None:
    many = Workload("w", (), lambda seed: agents.requests(SHAPE, encode, seed))
    tokens = sum(len(request.input_ids) for request in agents.requests(SHAPE, encode, 1))
    assert many.pool_tokens(1, least=1) > tokens
    assert many.pool_tokens(1, least=1) % 4096 == 0
    assert many.pool_tokens(1, least=1 << 20) == 1 << 20
    assert Workload("w", ()).pool_tokens(1, least=5) == 5


# --- the client ----------------------------------------------------------------------------------


def namespace(**fields: Any) -> argparse.Namespace:
    defaults = {"backend": "sglang", "temperature": 0.0, "top_p": 1.0, "disable_ignore_eos": False}
    return argparse.Namespace(**{**defaults, **fields})


@pytest.mark.parametrize("declared", [True, False])
def test_rows_carry_their_own_spans(declared: bool) -> None:
    pytest.importorskip("sglang", exc_type=ImportError)
    made = agents.requests(SHAPE, encode, seed=1)
    rows = client.Requests(made, spans=declared).from_args(namespace(top_p=0.9)).load(None)
    for row, request in zip(rows, made, strict=True):
        assert tuple(row.prompt) == request.input_ids
        assert (row.prompt_len, row.output_len) == (len(request.input_ids), 7)
        sampling = row.extra_request_body["sampling_params"]
        wanted: dict[str, Any] = {
            "temperature": 0.0,
            "max_new_tokens": 7,
            "ignore_eos": True,
            "top_p": 0.9,
        }
        if declared:
            spans = [list(span) for span in request.spans]
            wanted["custom_params"] = {"tessera": {"spans": spans}}
        assert sampling == wanted


def test_spans_go_through_generate_only() -> None:
    with pytest.raises(client.UsageError, match="--backend vllm can not carry"):
        client.Requests([], spans=True).from_args(namespace(backend="vllm"))


def test_a_request_without_an_answer_is_an_error() -> None:
    client._complete({"completed": 2, "errors": ["", ""]}, "http://a")
    with pytest.raises(client.ClientError, match="1 of 2 requests were answered: full") as error:
        client._complete({"completed": 1, "errors": ["", "full"]}, "http://a")
    assert error.value.url == "http://a"
    with pytest.raises(client.ClientError, match="0 of 0"):
        client._complete({"completed": 0, "errors": []}, "http://a")


def test_a_server_that_reads_no_spans_is_not_measured_as_one_that_does() -> None:
    def said(state: dict[str, Any]) -> dict[str, Any]:
        return {"server_info": {"internal_states": [state]}}

    client._spans_are_read(said({"tessera": {"spans": {"refused": None}}}), "u")
    with pytest.raises(client.ClientError, match="does not run with --attention-backend tessera"):
        client._spans_are_read(said({}), "u")
    with pytest.raises(client.ClientError, match=r"reads no spans: windows\. .*--no-spans"):
        client._spans_are_read(said({"tessera": {"spans": {"refused": "windows"}}}), "u")


def test_a_result_is_read_in_seconds_and_shares() -> None:
    result = {
        "total_throughput": 100.0,
        "output_throughput": 10.0,
        "median_ttft_ms": 1500.0,
        "p99_ttft_ms": 2000.0,
        "median_itl_ms": 5.0,
        "median_tpot_ms": 4.0,
        "completed": 3,
        "total_input_tokens": 90,
        "total_output_tokens": 10,
        "duration": 1.0,
        "cache_report": {"total_prompt_tokens": 90, "total_cached_tokens": 45},
    }
    found = read(result)
    assert (found.ttft_p50_s, found.ttft_p99_s) == (1.5, 2.0)
    assert (found.itl_p50_s, found.tpot_p50_s, found.cached_share) == (0.005, 0.004, 0.5)
    assert read({**result, "cache_report": None}).cached_share is None


# --- rounds --------------------------------------------------------------------------------------


class Servers:
    """Openers that note who is up."""

    def __init__(self) -> None:
        self.up: set[str] = set()
        self.most = 0

    def opener(self, side: str) -> rounds.Opener:
        @contextmanager
        def opened() -> Iterator[sides.Running]:
            self.up.add(side)
            self.most = max(self.most, len(self.up))
            try:
                yield sides.Running(f"http://{side}")
            finally:
                self.up.remove(side)

        return opened


@pytest.mark.parametrize("one_by_one", [False, True])
def test_sides_take_turns_and_the_first_round_does_not_count(one_by_one: bool) -> None:
    servers, asked = Servers(), []

    def run(side: str, url: str, number: int) -> tuple[str, int]:
        assert url == f"http://{side}"
        assert side in servers.up
        asked.append((number, side))
        return side, number

    openers = {side: servers.opener(side) for side in ("a", "b")}
    found = rounds.in_turns(openers, 2, run, one_by_one=one_by_one)
    assert found == {"a": [("a", 0), ("a", 1)], "b": [("b", 0), ("b", 1)]}
    assert len(asked) == rounds.runs(2, 2)
    assert not servers.up
    if one_by_one:
        assert servers.most == 1
        assert asked == [(n, side) for side in "ab" for n in (-1, 0, 1)]
    else:
        assert servers.most == 2
        order = [(-1, "a"), (-1, "b"), (0, "b"), (0, "a"), (1, "a"), (1, "b")]
        assert asked == order, "the other side begins each time"


def test_servers_end_with_a_failed_run() -> None:
    servers = Servers()

    def run(side: str, url: str, number: int) -> None:
        raise client.ClientError("broken", url)

    with pytest.raises(client.ClientError):
        rounds.in_turns({side: servers.opener(side) for side in ("a", "b")}, 2, run)
    assert not servers.up
    assert servers.most == 2


# --- summary and report --------------------------------------------------------------------------

SLOW = Side(sides.STOCK, (ONE, dataclasses.replace(ONE, throughput_tokens_per_s=1500.0)))
FAST = Side(
    sides.TESSERA,
    tuple(
        dataclasses.replace(ONE, throughput_tokens_per_s=rate, ttft_p50_s=0.5, cached_share=0.75)
        for rate in (5000.0, 2500.0, 4000.0)
    ),
)


def test_medians_and_spread() -> None:
    assert (SLOW.median(THROUGHPUT), FAST.median(THROUGHPUT)) == (1250, 4000)
    assert FAST.spread(THROUGHPUT) == pytest.approx(1.0)
    assert Side("one", (ONE,)).spread(THROUGHPUT) is None
    unknown = Side("none", (dataclasses.replace(ONE, cached_share=None),))
    assert unknown.median(CACHED) is None


def test_a_gain_is_above_one_where_tessera_is_better() -> None:
    by_name = {figure.name: gain(SLOW, FAST, figure) for figure in FIGURES}
    assert by_name["throughput_tokens_per_s"] == pytest.approx(3.2)
    assert by_name["ttft_p50_s"] == pytest.approx(4.0), "less time"
    assert by_name["itl_p50_s"] == pytest.approx(1.0)
    assert by_name["cached_share"] is None


def test_one_table_shows_both_sides_and_the_gain(capsys: pytest.CaptureFixture[str]) -> None:
    both = report.Report("agents", (SLOW, FAST), {}, ("A note.",))
    assert both.emit(as_json=False) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["stock", "1,250", "10", "2.00", "s", "3.00", "s", "10.0", "ms"] in [
        line[:9] for line in lines
    ]
    assert [line[-1] for line in lines if line[:1] == ["tessera"]] == ["75.0%"]
    assert ["gain", "3.20x", "1.00x", "4.00x", "1.00x", "1.00x", "1.00x"] in lines
    assert ["A", "note."] in lines


def test_json_has_the_raw_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    both = report.Report("agents", (SLOW, FAST), {"rounds": 2})
    assert both.emit(as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["client"] == "sglang.benchmark.serving"
    assert len(found["sides"]["tessera"]["rounds"]) == 3
    assert found["sides"]["stock"]["median"]["throughput_tokens_per_s"] == 1250
    assert found["gain"]["ttft_p50_s"] == pytest.approx(4)
    assert found["ok"] is True


def test_a_claim_that_fails_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = options("--model-path", "m", "--ab", "--require-gain", "3.5")
    both = report.Report("agents", (SLOW, FAST), {})
    (check,) = command._checks(both, wanted)
    assert not check.holds
    assert dataclasses.replace(both, checks=(check,)).emit(as_json=False) == 1
    assert "FAILED  throughput, tessera / stock: 3.2 (claimed: >= 3.5)" in capsys.readouterr().out
    held = at_least("x", 3.6, 3.5)
    assert dataclasses.replace(both, checks=(held,)).emit(as_json=False) == 0


@pytest.mark.parametrize(("content", "holds"), [(1000.0, True), (980.0, False)])
def test_plain_traffic_holds_at_99_of_100(content: float, holds: bool) -> None:
    rates = {"content": content, "radix": 1000.0}
    measured = {
        name: [dataclasses.replace(ONE, throughput_tokens_per_s=rate)] * 3
        for name, rate in rates.items()
    }
    found = plain_traffic._report({"random": measured}, rounds=3)
    (check,) = found.checks
    assert (check.value, check.holds, found.holds) == (content / 1000, holds, holds)
    assert found.figures["tokens_per_s"] == {"random": {k: [v] * 3 for k, v in rates.items()}}
    assert f"{content / 1000:.3f}" in found.render()


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ((), "give --url URL of a server, or --model-path M"),
        (("--url", "u", "--ab"), "give --url and --stock-url"),
        (("--model-path", "m", "--ab", "--stock-url", "u"), "give --url and --stock-url"),
        (("--url", "u", "--stock-url", "u"), "--stock-url needs --ab"),
        (("--model-path", "m", "--stock-backend", "fa3"), "--stock-backend needs --ab"),
        (("--model-path", "m", "--require-gain", "2"), "--require-gain needs --ab"),
        (("--model-path", "m", "--one-by-one"), "--one-by-one needs --ab"),
        (("--url", "u", "--server-args", "--tp 2"), "servers that this command starts"),
        (("--url", "u", "--dataset-name", "random-ids", "--agents", "3"), "belong to"),
        (("--url", "u", "--dataset-name", "random-ids", "--no-spans"), "belong to"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    arguments: tuple[str, ...], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert remedy in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url", "u"),
        ("--model-path", "m"),
        ("--model-path", "m", "--ab", "--stock-backend", "fa3", "--one-by-one"),
        ("--url", "u", "--stock-url", "v", "--ab", "--require-gain", "1"),
        ("--url", "u", "--model-path", "m"),
    ],
)
def test_what_belongs_together_is_taken(arguments: tuple[str, ...]) -> None:
    found = options(*arguments, rest=("--num-prompts", "3"))
    command.refuse_contradictions(found)
    assert found.rounds == command.ROUNDS


@pytest.mark.parametrize("argument", client.OURS)
def test_arguments_that_we_set_are_refused_behind_the_dashes(argument: str) -> None:
    with pytest.raises(client.UsageError, match=f"{argument} behind -- would be overridden"):
        command.refuse_contradictions(options("--url", "u", rest=(f"{argument}=3",)))


# --- sides ---------------------------------------------------------------------------------------


def environment_of(side: str, **launch: Any) -> tuple[dict[str, str], list[str]]:
    server = sides.server_of(sides.Launch("some/model", 4096, **launch), side)
    server._scratch.cleanup()
    return server.environment, list(server.command)


def test_sides_differ_by_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CONFIG", '{"link_pages": 3}')
    found = {side: environment_of(side)[0] for side in (sides.STOCK, sides.TESSERA)}
    config = {side: json.loads(one["TESSERA_CONFIG"]) for side, one in found.items()}
    assert (config["stock"]["index"], config["tessera"]["index"]) == ("radix", "content")
    assert {one["link_pages"] for one in config.values()} == {3}, "all else as configured"


def test_a_configured_radix_index_is_not_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CONFIG", '{"index": "radix"}')
    with pytest.raises(ConfigError, match="remove the key"):
        environment_of(sides.TESSERA)


def test_stock_by_backend_is_sglang_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.delenv("TESSERA_CONFIG", raising=False)
    environment, called = environment_of(
        sides.STOCK, stock_backend="fa3", arguments=("--tp-size", "2")
    )
    assert "tessera" not in environment["SGLANG_PLUGINS"].split(",")
    assert environment["SGLANG_PLUGINS"], "an empty list would mean all"
    named = [called[at + 1] for at, word in enumerate(called) if word == "--attention-backend"]
    assert named[-1] == "fa3", "the last one counts"
    assert called[called.index("--tp-size") + 1] == "2"
    environment, called = environment_of(sides.TESSERA, stock_backend="fa3")
    assert "SGLANG_PLUGINS" not in environment
    assert "fa3" not in called
