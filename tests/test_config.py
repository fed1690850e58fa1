"""``TESSERA_CONFIG``: what is understood, and what refuses the start naming key and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera_sglang.config import VARIABLE, Config, ConfigError, load

DEFAULTS = Config()


@pytest.mark.parametrize("text", ["", "  \n", "{}"])
def test_nothing_said_is_the_defaults(text: str) -> None:
    assert load(text) == DEFAULTS
    assert (DEFAULTS.index, DEFAULTS.kernel, DEFAULTS.link_pages) == ("content", "auto", 1)
    assert (DEFAULTS.span_root, DEFAULTS.verify) == ("auto", "tokens")


def test_every_key_is_understood() -> None:
    text = (
        '{"index": "radix", "kernel": "torch", "link_pages": 0, "span_root": "none", '
        '"verify": "tokens"}'
    )
    assert load(text) == Config(index="radix", kernel="torch", link_pages=0, span_root="none")


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ('{"span_root": "A quiet sentence."}', "A quiet sentence."),
        ('{"span_root": [1, 2, 3]}', [1, 2, 3]),
    ],
)
def test_a_root_is_a_text_or_token_ids(text: str, root: str | list[int]) -> None:
    assert load(text).span_root == root


def test_the_environment_is_read_when_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"link_pages": 3}')
    assert load().link_pages == 3
    monkeypatch.delenv(VARIABLE)
    assert load() == DEFAULTS


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tessera.json"
    path.write_text('{"index": "radix"}')
    assert load(f"@{path}").index == "radix"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json"):
        load(f"@{tmp_path}/absent.json")
    with pytest.raises(ConfigError, match="can not be read"):
        load(f"@{tmp_path}")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"binary\.json"):
        load(f"@{path}")


@pytest.mark.parametrize("text", ["{", "index=radix", "{'index': 'radix'}", '{"a": 1} {"b": 2}'])
def test_what_is_not_json_is_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE} is not JSON") as caught:
        load(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "1", '"radix"', "null", "true"])
def test_what_is_not_an_object_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r'must be a JSON object such as \{"index": "content"\}'):
        load(text)


def test_an_unknown_key_is_named_beside_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load('{"indx": "radix"}')
    message = str(caught.value)
    assert "unknown key 'indx'; remove it" in message
    for key in ("index", "kernel", "link_pages", "span_root", "verify"):
        assert key in message


@pytest.mark.parametrize(
    "key",
    [
        "swa_persistence",
        "swa_checkpoint_tokens",
        "require_salt",
        "private_spans",
    ],
)
@pytest.mark.parametrize("value", ["0", "true", '"x"', "null", "{}"])
def test_a_key_of_a_later_version_is_refused_not_ignored(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is not available in this version; remove"):
        load(f'{{"{key}": {value}}}')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"host_tier_bytes": -1}', "host_tier_bytes must be a whole number of bytes from 0 on"),
        ('{"host_tier_bytes": "1G"}', "host_tier_bytes must be a whole number of bytes"),
        ('{"disk_tier_path": "x"}', "disk_tier_path needs disk_tier_bytes beside it"),
        ('{"disk_tier_bytes": 5}', "disk_tier_bytes needs disk_tier_path beside it"),
        ('{"disk_tier_path": "x", "disk_tier_bytes": 0}', "disk_tier_bytes must be .* from 1 on"),
        ('{"disk_tier_path": " ", "disk_tier_bytes": 5}', "disk_tier_path must be a directory"),
        (
            '{"disk_tier_path": "x", "disk_tier_bytes": 5, "host_tier_bytes": 0}',
            "disk_tier_path with host_tier_bytes 0: .* drop host_tier_bytes",
        ),
        ('{"index": "radix", "host_tier_bytes": 5}', 'host_tier_bytes with index "radix"'),
        ('{"index": "radix", "remote_tier": "file"}', 'remote_tier with index "radix"'),
        ('{"remote_tier": "file", "host_tier_bytes": 0}', "remote_tier with host_tier_bytes 0"),
        ('{"remote_tier": 5}', "remote_tier must be the name of one of SGLang's"),
        ('{"remote_tier_extra_config": {}}', "remote_tier_extra_config needs remote_tier"),
        (
            '{"disk_tier_path": "x", "disk_tier_bytes": 5, "remote_tier": "file"}',
            "disk_tier_path with remote_tier: .* drop one",
        ),
    ],
)
def test_lower_tiers_that_can_not_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(text)


def test_a_disk_tier_brings_host_memory_to_pass_through() -> None:
    assert load("{}").host_bytes == 0
    assert load('{"disk_tier_path": "x", "disk_tier_bytes": 5}').host_bytes == 1 << 30
    both = load('{"disk_tier_path": "x", "disk_tier_bytes": 5, "host_tier_bytes": 7}')
    assert both.host_bytes == 7


@pytest.mark.parametrize(
    "kernel", ["auto", "flashmla", "flashinfer", "triton", "tilelang", "torch"]
)
def test_every_kernel_can_be_asked_for(kernel: str) -> None:
    assert load(f'{{"kernel": "{kernel}"}}').kernel == kernel


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("index", '"tree"', '"content" or "radix"'),
        ("index", '"Content"', '"content" or "radix"'),
        ("index", "null", '"content" or "radix"'),
        ("index", "1", '"content" or "radix"'),
        ("kernel", '"cuda"', '"tilelang" or "torch"'),
        ("kernel", '"FlashMLA"', '"auto", "flashmla"'),
        ("kernel", '["torch"]', '"auto", "flashmla"'),
        ("kernel", "null", '"auto", "flashmla"'),
        ("link_pages", "-1", "a whole number from 0 on"),
        ("link_pages", "1.5", "a whole number from 0 on"),
        ("link_pages", "1.0", "a whole number from 0 on"),
        ("link_pages", '"1"', "a whole number from 0 on"),
        ("link_pages", "true", "a whole number from 0 on"),
        ("link_pages", "null", "a whole number from 0 on"),
        ("span_root", "5", "a list of token ids"),
        ("span_root", '["a"]', "a list of token ids"),
        ("span_root", "[1.5]", "a list of token ids"),
        ("span_root", "[true]", "a list of token ids"),
        ("span_root", "null", "a list of token ids"),
        ("span_root", "[1, -1]", "token ids from 0 on"),
        ("verify", "true", '"tokens"'),
    ],
)
def test_a_wrong_value_is_shown_beside_what_the_key_takes(
    key: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f'{{"{key}": {value}}}')
    message = str(caught.value)
    assert message.startswith(f"{VARIABLE}: {key} must ")
    assert expected in message
    assert ", got " in message


@pytest.mark.parametrize("value", ["[]", '""'])
def test_an_empty_root_is_refused_with_the_word_for_none(value: str) -> None:
    with pytest.raises(ConfigError, match='span_root is empty; use "none"'):
        load(f'{{"span_root": {value}}}')


def test_a_good_key_does_not_hide_a_bad_one() -> None:
    with pytest.raises(ConfigError, match="link_pages"):
        load('{"index": "radix", "link_pages": "many"}')
