"""``tessera-sglang verify``: its arithmetic against values worked out by hand, and its verdict."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from dataclasses import replace

import pytest

from tessera_sglang.config import load
from tessera_sglang.verify.figures import (
    PromptFigures,
    Summary,
    Worst,
    agreed_tokens,
    entropy_nats,
    kl_nats,
    mean_nll_nats,
    same_choices,
    summarize,
)
from tessera_sglang.verify.report import config_line
from tessera_sglang.verify.settings import (
    FULL,
    SERVER,
    OwnRoot,
    Setting,
    grid,
    parse_link_pages,
    parse_root_text,
    parse_roots,
)
from tessera_sglang.verify.verdict import CHOICE_MARGIN, judge, passes, short, unsure


def logs(**probabilities: float) -> dict[int, float]:
    """Log-probabilities of tokens named by letters."""
    return {ord(name): math.log(p) for name, p in probabilities.items()}


# --- divergence and entropy ----------------------------------------------------------------------


def test_kl_of_known_distributions() -> None:
    full, spans = logs(a=0.5, b=0.25), logs(a=0.25, b=0.25)
    # 0.5 ln(0.5/0.25) + 0.25 ln 1 + 0.25 ln(0.25/0.5) = 0.25 ln 2
    assert kl_nats(full, spans) == pytest.approx(0.25 * math.log(2))


def test_kl_of_complete_distributions_has_no_rest() -> None:
    full, spans = logs(a=0.9, b=0.1), logs(a=0.5, b=0.5)
    assert kl_nats(full, spans) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))


def test_kl_looks_only_at_the_tokens_that_full_attention_knows() -> None:
    full = logs(a=0.7)
    assert kl_nats(full, logs(a=0.7, z=0.2)) == 0
    assert kl_nats(full, logs(a=0.35)) == pytest.approx(
        0.7 * math.log(2) + 0.3 * math.log(0.3 / 0.65)
    )


def test_merging_tokens_never_raises_the_divergence() -> None:
    full, spans = logs(a=0.4, b=0.3, c=0.2, d=0.1), logs(a=0.1, b=0.2, c=0.3, d=0.4)
    exact = kl_nats(full, spans)
    bounds = [kl_nats(dict(list(full.items())[:known]), spans) for known in (1, 2, 3)]
    assert bounds == sorted(bounds)
    assert bounds[0] > 0
    assert bounds[-1] <= exact + 1e-12
    assert kl_nats(full, full) == 0


def test_rounding_beyond_one_is_no_probability() -> None:
    full = {1: math.log(0.6), 2: math.log(0.4000001)}
    assert kl_nats(full, full) == 0
    assert kl_nats({1: math.log(0.5)}, {1: math.log(1.0000001)}) == pytest.approx(
        0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-9), rel=1e-6
    )


def test_entropy_of_known_distributions() -> None:
    assert entropy_nats(logs(a=0.5, b=0.25)) == pytest.approx(1.5 * math.log(2))
    assert entropy_nats(logs(a=1.0)) == pytest.approx(0)
    uniform = {token: math.log(1 / 8) for token in range(8)}
    assert entropy_nats(uniform) == pytest.approx(math.log(8))
    assert entropy_nats(dict(list(uniform.items())[:4])) < math.log(8)


def test_likelihood_is_a_mean() -> None:
    assert mean_nll_nats([-1.0, -2.0, -6.0]) == 3.0


@pytest.mark.parametrize(
    ("reference", "other", "agreed"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1], [], 0),
    ],
)
def test_agreement_ends_at_the_first_difference(
    reference: list[int], other: list[int], agreed: int
) -> None:
    assert agreed_tokens(reference, other) == agreed


def test_choices_are_compared_position_by_position() -> None:
    positions = [logs(a=0.6, b=0.2), logs(a=0.3, b=0.4), logs(a=0.1, b=0.8)]
    assert same_choices([ord("a"), ord("a"), ord("b")], positions) == 2
    assert same_choices([ord("b"), ord("a"), ord("a")], positions) == 0


# --- summaries -----------------------------------------------------------------------------------

ONE = PromptFigures(
    where="a:1",
    kl_nats=(0.1, 0.3, 0.2),
    nll_nats=1.0,
    full_nll_nats=0.5,
    same_choices=2,
    agreed_tokens=1,
    reference_tokens=3,
    prompt_tokens=100,
    cold_computed_tokens=100,
    warm_computed_tokens=40,
)
OTHER = PromptFigures(
    where="a:2",
    kl_nats=(0.0,),
    nll_nats=3.0,
    full_nll_nats=1.5,
    same_choices=1,
    agreed_tokens=1,
    reference_tokens=1,
    prompt_tokens=300,
    cold_computed_tokens=290,
    warm_computed_tokens=60,
)


def test_a_summary_weighs_tokens_for_divergence_and_prompts_for_agreement() -> None:
    found = summarize([ONE, OTHER])
    assert found.mean_kl_nats == pytest.approx(0.6 / 4)
    assert found.worst == Worst(0.3, "a:1", 1)
    assert found.nll_nats == pytest.approx((3 * 1.0 + 3.0) / 4)
    assert found.full_nll_nats == pytest.approx((3 * 0.5 + 1.5) / 4)
    assert found.same_choice == pytest.approx(3 / 4)
    assert found.agreement == pytest.approx((1 / 3 + 1) / 2)
    assert (found.prompt_tokens, found.cold_computed_tokens) == (400, 390)
    assert found.saved == pytest.approx(0.75)


# --- the verdict ---------------------------------------------------------------------------------

BASE = Summary(
    mean_kl_nats=0.01,
    worst=Worst(0.5, "a:1", 0),
    nll_nats=0.4,
    full_nll_nats=0.3,
    same_choice=0.9,
    agreement=0.6,
    prompt_tokens=1000,
    cold_computed_tokens=1000,
    warm_computed_tokens=300,
)
SERVERS, FULLS = Setting(SERVER, None), Setting(FULL, None)


def test_both_bars_must_be_held() -> None:
    assert passes(replace(BASE, mean_kl_nats=0.05), 0.05, 0.9)
    assert not passes(replace(BASE, mean_kl_nats=0.0501), 0.05, 0.9)
    assert not passes(BASE, 0.05, 0.91)
    assert passes(replace(BASE, agreement=0.0), 0.05, 0.9), "chance decides about that"


def test_the_floor_is_what_full_attention_does_to_itself() -> None:
    floor = replace(BASE, same_choice=0.97)
    near = replace(BASE, same_choice=0.97 - CHOICE_MARGIN)
    found = judge({FULLS: floor, SERVERS: near}, 0.05)
    assert found.server_passes
    assert found.least_same_choice == pytest.approx(0.87)
    far = replace(BASE, same_choice=0.86)
    assert not judge({FULLS: floor, SERVERS: far}, 0.05).server_passes


def test_the_cheapest_that_passes_is_recommended() -> None:
    cheap, dear = Setting("none", 0), Setting("auto", 2)
    summaries = {
        FULLS: BASE,
        SERVERS: BASE,
        cheap: replace(BASE, warm_computed_tokens=90, mean_kl_nats=0.2),
        Setting("auto", 0): replace(BASE, warm_computed_tokens=100, mean_kl_nats=0.04),
        dear: replace(BASE, warm_computed_tokens=500, mean_kl_nats=0.001),
    }
    found = judge(summaries, 0.05)
    assert found.server_passes
    assert found.recommended == Setting("auto", 0)
    assert found.passing == ("server", "auto/0", "auto/2")
    assert judge(summaries, 0.3).recommended == cheap
    assert judge(summaries, 0.005).recommended == dear
    assert not judge(summaries, 0.005).server_passes


def test_of_equals_the_smaller_divergence_and_a_setting_with_a_name() -> None:
    none, auto = Setting("none", 1), Setting("auto", 1)
    summaries = {FULLS: BASE, SERVERS: BASE, none: replace(BASE, mean_kl_nats=0.02), auto: BASE}
    assert judge(summaries, 0.05).recommended == auto
    noise = {FULLS: BASE, SERVERS: BASE, auto: replace(BASE, mean_kl_nats=0.013)}
    assert judge(noise, 0.05).recommended == auto
    assert judge({FULLS: BASE, SERVERS: BASE}, 0.05).recommended == SERVERS


def test_where_nothing_passes_nothing_is_recommended() -> None:
    found = judge({FULLS: BASE, SERVERS: replace(BASE, same_choice=0.1)}, 0.05)
    assert found.recommended is None
    assert not found.server_passes
    assert found.passing == ()


def test_an_unsure_model_and_short_answers_are_warned_of() -> None:
    assert unsure(1.5, 3.0) is None
    assert "3.20 nats" in str(unsure(3.2, 2.0))
    assert "5.60 nats" in str(unsure(0.4, 5.6))
    assert short(24.0) is None
    assert "after 1.5 tokens" in str(short(1.5))


# --- settings ------------------------------------------------------------------------------------

OWN = OwnRoot("It's noon.", (1, 2, 3, 4))


def test_a_grid_begins_with_full_attention_and_what_the_server_has() -> None:
    full, *found = grid(("none", "own"), (0, 2), OWN)
    assert not full.declares_spans
    assert all(setting.declares_spans for setting in found)
    assert [setting.name for setting in found] == ["server", "none/0", "none/2", "own/0", "own/2"]
    assert found[0].overrides == {}
    assert found[2].overrides == {"link_pages": 2, "root": "none"}
    assert found[3].overrides == {"link_pages": 0, "root": [1, 2, 3, 4]}
    assert grid(("own",), (1,), None)[2].overrides == {"link_pages": 1}, "the server's root"


@pytest.mark.parametrize("own", [OWN, None])
@pytest.mark.parametrize("root", ["none", "auto", "own"])
def test_the_recommended_line_is_a_configuration(root: str, own: OwnRoot | None) -> None:
    line = config_line(Setting(root, 2, own if root == "own" else None))
    (word,) = shlex.split(line)
    name, _, value = word.partition("=")
    assert name == "TESSERA_CONFIG"
    config = load(value)
    assert config.link_pages == 2
    wanted = {"none": "none", "auto": "auto", "own": OWN.text if own else "auto"}[root]
    assert config.span_root == wanted
    assert ("span_root" in json.loads(value)) == (root != "own" or own is not None)


@pytest.mark.parametrize("text", ["", "1,", "-1", "1.5", "a", "1;2"])
def test_odd_link_pages_are_refused(text: str) -> None:
    assert parse_link_pages("2, 0,2") == (2, 0)
    with pytest.raises(argparse.ArgumentTypeError, match="whole numbers"):
        parse_link_pages(text)


@pytest.mark.parametrize("text", ["", "None", "auto,", "server"])
def test_odd_roots_are_refused(text: str) -> None:
    assert parse_roots("auto, none,auto") == ("auto", "none")
    with pytest.raises(argparse.ArgumentTypeError, match="none of none, auto, own"):
        parse_roots(text)


@pytest.mark.parametrize("text", ["", " ", "auto", "none", "@/no/such/file"])
def test_odd_root_texts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_root_text(text)
