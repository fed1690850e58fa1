"""``tessera-sglang layout``: what it prints, what it takes, and what it says when it can not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessera_sglang import tables
from tessera_sglang.cli import main
from tessera_sglang.memory_pool.known_models import KNOWN
from tessera_sglang.tables import Table

TINY_MLA = Path(__file__).parents[1] / "examples" / "tiny-mla"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["layout", *arguments]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    found = json.loads(printed(capsys, *arguments, "--json"))
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["layout", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    return err


def cells(text: str, start: str) -> list[str]:
    """The first line that begins with ``start``, in words."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return line.split()


# --- tables --------------------------------------------------------------------------------------


def test_deepseek_v2(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "deepseek-v2", "--context", "4096")
    assert "1,152  67.50 KiB  270.00 MiB    56.9x" in out
    assert "81,920   4.69 MiB   18.75 GiB     0.8x" in out
    assert cells(out, "expanded/bf16")[:7] == [
        "expanded/bf16",
        "4K",
        "71.1",
        "x",
        "71.1",
        "x",
        "agrees",
    ]


def test_deepseek_v3_says_where_printed_figures_differ(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "deepseek-v3")
    for figures in ("488.00 GiB", "8.58 GiB", "4.88 GiB", "56.9x", "99.9x"):
        assert figures in out
    assert (
        "Note: bf16 is printed as 8.68 GiB, exact arithmetic gives 8.58 GiB (9.21 GB); "
        "how it came about is not known; 8.578125 is exact." in out
    )
    assert "Note: mha/bf16 is printed as 56.2 x, exact arithmetic gives 56.9 x" in out
    assert (
        "Note: fp8-packed is printed as 4.84 GiB, exact arithmetic gives 4.88 GiB (5.24 GB)" in out
    )
    assert "1 GiB = 1.0737 GB" in out


def test_deepseek_v4(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "deepseek-v4-pro", "--context", "1M")
    assert "deepseek-v4-pro: 61 layers, pages of 128 tokens (block 128), tensor parallel 1" in out
    assert cells(out, "HCA        31              4.5")[2:4] == ["4.5", "4.5625"]
    assert cells(out, "CSA        30              160")[2:4] == ["160", "163"]
    assert "Note: HCA is printed as 4 B, exact arithmetic gives 4.5 B" in out
    assert "A page over all layers is 644,024 B: 632,256 content, 10,777 scales, 991 padding" in out
    assert "multiple of 576 B: 671,232 B, 4.2% more" in out
    assert "slot in the arena is 22,656,000 B on each rank; 5,174,272 B of it" in out


def test_windows_outlive_a_request_by_three_strategies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = printed(capsys, "deepseek-v4-flash")
    assert "Sliding-window persistence, on one rank" in out
    assert cells(out, "full   ") == ["full", "128", "tokens", "28,472.00", "8.10x"] + (
        ["3.48", "MiB", "0", "0"]
    )
    assert cells(out, "checkpoint") == ["checkpoint", "2,048", "tokens", "1,779.50", "0.51x"] + (
        ["3.48", "MiB", "960", "1,920"]
    )
    assert cells(out, "none") == ["none", "never", "0.00", "0.00x", "0", "5,461", "5,461"]
    pro = printed(capsys, "deepseek-v4-pro", "--swa-checkpoint-tokens", "4096")
    assert cells(pro, "full   ")[3:5] == ["40,424.00", "8.03x"]
    assert cells(pro, "checkpoint")[3:] == ["1,263.25", "0.25x", "4.93", "MiB", "1,984", "3,968"]
    assert cells(pro, "none")[-1] == "7,747"
    assert "persistence" not in printed(capsys, "deepseek-v3")


def test_windows_of_a_model_that_is_given_by_its_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Windows in turn with whole contexts, over two ranks."""
    config = {**LLAMA, "model_type": "gpt_oss", "sliding_window": 128, "num_hidden_layers": 4}
    config["layer_types"] = ["sliding_attention", "full_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = as_json(capsys, str(tmp_path), "--tp", "2")["swa_persistence"]
    row = 2 * 4 * 128 * 2  # key and value, half of 8 heads, BF16
    assert lines == [
        {
            "strategy": strategy,
            "every_tokens": every,
            "bytes_per_token": size,
            "times_paged": size / (2 * row),
            "restored_bytes": read,
            "most_tokens": most,
            "mean_tokens": mean,
        }
        for strategy, every, size, read, most, mean in (
            ("full", 64, 2 * row, 2 * 128 * row, 0, 0),
            (
                "checkpoint",
                2048,
                2 * row // 16,
                2 * 128 * row,
                254,
                (0 + 64 + 128 + 192 + 28 * 254) / 32,
            ),
            ("none", 0, 0, 0, 254, 254),
        )
    ]


def test_ranks_hold_copies_of_latents(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys, "deepseek-v3", "--tp", "8", "--context", "128K", "--kv-dtype", "fp8-packed"
    )
    assert cells(out, "= one rank")[3:] == ["4.88", "GiB"]
    assert cells(out, "= all 8 ranks")[4:] == ["39.08", "GiB"]
    assert cells(out, "of these, copies")[3:] == ["34.19", "GiB"]
    assert "of these" not in printed(capsys, "deepseek-v3")


def test_nothing_printed_is_cut_or_trailing(capsys: pytest.CaptureFixture[str]) -> None:
    for name in KNOWN:
        out = printed(capsys, name)
        assert KNOWN[name].source in out
        assert not [line for line in out.splitlines() if line != line.rstrip()]


# --- JSON ----------------------------------------------------------------------------------------


def test_json_is_one_object_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "deepseek-v3", "--context", "128K")
    assert found["contexts"] == [131072]
    formats = {line["key"]: line for line in found["formats"]}  # type: ignore[attr-defined]
    assert formats["mha"]["context_bytes"] == [488 << 30]
    assert formats["bf16"]["context_bytes"] == [70_272 * 131072]
    assert formats["bf16"]["times_smaller"] == pytest.approx(65_536 / 1152)
    differing = [c["printed"]["of"] for c in found["comparisons"] if not c["agrees"]]  # type: ignore[attr-defined]
    assert differing == ["bf16", "mha/bf16", "fp8-packed"]


def test_json_keeps_half_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "deepseek-v4-flash")
    hca = next(line for line in found["kinds"] if line["kind"] == "HCA")  # type: ignore[attr-defined]
    assert (hca["content_bytes_per_token"], hca["bytes_per_token"]) == (4.5, 4.5625)
    assert found["page"]["page_bytes"] == 449_824  # type: ignore[index]
    assert found["comparisons"][0]["printed"]["unit"] == "B"  # type: ignore[index]
    strategies = [line["strategy"] for line in found["swa_persistence"]]  # type: ignore[attr-defined]
    assert strategies == ["full", "checkpoint", "none"]
    assert as_json(capsys, "deepseek-v3")["swa_persistence"] == []


# --- what it takes -------------------------------------------------------------------------------


def test_a_config_a_directory_and_a_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    of_directory = as_json(capsys, str(TINY_MLA))
    assert of_directory["model"] == "tiny-mla"
    assert as_json(capsys, str(TINY_MLA / "config.json")) == of_directory
    params = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "dim": 32}
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert as_json(capsys, str(tmp_path))["page"]["page_bytes"] == 64 * 2 * 64  # type: ignore[index]
    by_repository = as_json(capsys, "deepseek-ai/DeepSeek-V3")
    assert by_repository == as_json(capsys, "deepseek-v3")


def test_page_size_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "deepseek-v4-flash", "--page-size", "256", "--context", "300, 2k,1M")
    assert found["contexts"] == [300, 2048, 1 << 20]
    assert found["page"]["page_tokens"] == 256  # type: ignore[index]


def test_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "gpt-2")
    assert "gpt-2: neither a config file nor a directory, and no known name" in err
    assert all(name in err for name in KNOWN)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "config.json: "),
        ("[]", "wanted a JSON object, found list"),
        ('{"model_type": "rwkv"}', "no geometry is known for model_type 'rwkv'"),
        ('{"model_type": "llama"}', "num_attention_heads as a whole number"),
    ],
)
def test_unusable_configs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, complaint: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert complaint in refused(capsys, str(tmp_path))


LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000 + "]" * 200_000, "recursion"),
        ('{"text_config":' * 500 + "{}" + "}" * 500, "model_type"),
        (json.dumps({**LLAMA, "num_hidden_layers": 10**12}), "num_hidden_layers"),
        (json.dumps({**LLAMA, "head_dim": 10**400}), "head_dim"),
    ],
    ids=["deep", "nested", "many layers", "wide"],
)
def test_hostile_configs_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    message = refused(capsys, str(path))
    assert words in message
    assert message.count("\n") == 1
    assert len(message) < 400


def test_a_name_too_long_for_a_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(refused(capsys, "x" * 5000)) < 200


def test_a_reader_that_stops_reading_is_no_error() -> None:
    command = f"{sys.executable} -m tessera_sglang.cli layout deepseek-v3 | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("deepseek-v3")
    assert not done.stderr


def test_a_directory_without_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "holds no config.json and no params.json" in refused(capsys, str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("deepseek-v4-pro", "--page-size", "64"), "page of 64 tokens .* block of 128"),
        (("llama-3.1-8b", "--tp", "3"), "8 KV heads can not be dealt out to 3"),
        (("llama-3.1-8b", "--kv-dtype", "fp8-packed"), "no fp8-packed format"),
        (("deepseek-v3", "--index-dtype", "fp4"), "no indexer to keep in fp4"),
        (
            ("deepseek-v4-pro", "--swa-checkpoint-tokens", "200"),
            "swa_checkpoint_tokens 200: .* page of 128 tokens .* use 256",
        ),
    ],
)
def test_settings_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    assert re.search(complaint, refused(capsys, *arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--context", "8X"),
        ("--context", "0"),
        ("--context", "-1"),
        ("--context", "K"),
        ("--context", "1,,2"),
        ("--context", "²K"),
        ("--page-size", "0"),
        ("--tp", "two"),
        ("--kv-dtype", "int4"),
    ],
)
def test_malformed_arguments(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["layout", "deepseek-v3", *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_it_needs_neither_sglang_nor_torch() -> None:
    script = (
        "import sys; from tessera_sglang.cli import main; main(['layout', 'deepseek-v4-pro']);"
        "print(sorted({'sglang', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


# --- on a terminal -------------------------------------------------------------------------------


def on_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> str:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    tables.show(Table("Title", ("name", "figure"), (("one", "1"), ("hundred", "100"))))
    return capsys.readouterr().out


def test_rules_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    assert "┃" in on_terminal(monkeypatch, capsys, 80)


def test_plain_text_on_a_narrow_terminal_and_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = "\nTitle\nname     figure\n───────────────\none           1\nhundred     100\n"
    assert on_terminal(monkeypatch, capsys, 10) == plain
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert on_terminal(monkeypatch, capsys, 80) == plain
