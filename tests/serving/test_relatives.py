"""Models whose keys can not be moved keep prefix reuse and refuse spans, with the reason (case 29).

A model with windows is in `test_start`. Sinks, several position axes and sparse attention need kernels
that a CPU does not have: what is decided for those is in `test_survey` and `test_admission`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from models import rewrite_config, write_llama, write_per_layer_rope_config
from prompts import PAGE, Writer
from server import RequestError, Server


def check_prefixes_without_spans(server: Server, reason: str) -> None:
    """Prefix reuse changes no token, a span is an HTTP 400 with the reason, which was logged too."""
    writer = Writer(1)
    prompt = writer.text(5 * PAGE)
    first = server.generate(prompt, steps=4)
    again = server.generate(prompt, steps=4)
    longer = server.generate(prompt + writer.text(40), steps=4)
    assert again.tokens == first.tokens
    assert again.cached >= 4 * PAGE
    assert longer.cached >= 4 * PAGE
    with pytest.raises(RequestError) as raised:
        server.generate(prompt, [[0, 3 * PAGE]], steps=4)
    assert raised.value.status == 400
    assert reason in raised.value.body
    assert server.alive()


@pytest.mark.slow
def test_a_rotary_table_per_kind_of_layer(tmp_path: Path) -> None:
    model = write_per_layer_rope_config(tmp_path / "per-layer")
    with Server(model, "--load-format", "dummy") as server:
        check_prefixes_without_spans(server, "sliding-window attention")
        assert "prefix reuse and without spans" in server.log()


def test_a_table_that_depends_on_the_length_served(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "dynamic")
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    rewrite_config(model, rope_parameters=dynamic)
    with Server(model) as server:
        check_prefixes_without_spans(
            server, "DynamicNTKScalingRotaryEmbedding can not be relocated"
        )
        assert "not checked: rotary table of type 'dynamic'" in server.log()


@pytest.mark.slow
def test_positions_of_several_axes(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "axes")
    axes = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    rewrite_config(model, rope_parameters=axes)
    with Server(model) as server:
        check_prefixes_without_spans(server, "mrope_section")
