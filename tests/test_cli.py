"""The command line as a whole: help, exit codes, what is missing, terminals and pipes."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessera_sglang import cli
from tessera_sglang.claims import at_least
from tessera_sglang.demo import report
from tessera_sglang.demo.agents import MLA, Prompt
from tessera_sglang.demo.client import Answer
from tessera_sglang.demo.measure import PHASES, Measurement, Phase

TINY_MLA = Path(__file__).parents[1] / "examples" / "tiny-mla"
COMMANDS = ("bench", "demo", "doctor", "layout", "store", "verify")
ESCAPE = re.compile(rb"\x1b\[([0-9;]*)m")


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Exit status, output and errors of a command that argparse ends."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def without(package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command on a machine that lacks ``package``."""
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from tessera_sglang.cli import main; sys.exit(main({list(arguments)!r}))"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def on_a_terminal(environment: dict[str, str], *arguments: str) -> bytes:
    """What a command writes to a terminal that is wide enough."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tessera_sglang.cli", *arguments]
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
    kept |= {"TERM": "xterm-256color", "COLUMNS": "200", **environment}
    process = subprocess.Popen(command, env=kept, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    written = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not more:
            break
        written += more
    os.close(ours)
    assert process.wait(60) == 0, written
    return written


# --- the demo's report ---------------------------------------------------------------------------


def measurement(index: str, phase: Phase, cached: int) -> Measurement:
    answers = tuple(Answer(1000, cached, 0.5, "yes\nno") for _ in range(2))
    return Measurement(index, phase, answers, 2.0, 64, 2048, 10 * 2, 640)


def test_the_demo_prints_text_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    measured = [
        measurement(index, phase, cached)
        for index, cached in (("radix", 0), ("content", 500))
        for phase in PHASES
    ]
    asked = [Prompt("Clerk: short", "Why?", tuple(range(1000)), (100, 740))] * 2
    failed = at_least("a claim", 1.0, 2.0)
    report.show(measured, [failed], asked, dataclasses.replace(MLA, answers_mean_something=True))
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "tessera 2,000 1,000 1,000 2,048 2.00 0.50 s 2.00 s" in lines
    assert "stock / tessera 2.0x 1.0x 1.0x 1.0x 1.0x" in lines
    sides = "stock 2,000 2,000 0 2,048 2.00 0.50 s 2.00 s"
    assert [line for line in lines if line.endswith(sides)] == [
        f"together {sides}",
        f"one by one {sides}",
    ]
    assert "FAILED  a claim: 1 (claimed: >= 2)" in out
    assert "Clerk: Why?\n  stock    yes no\n  tessera  yes no" in out


# --- help and usage ------------------------------------------------------------------------------


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from tessera_sglang import __version__

    status, out, _ = ended(capsys, "--version")
    assert status == 0
    assert out.startswith(f"tessera-sglang {__version__}, sglang ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_and_says_its_exit_codes(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    status, out, _ = ended(capsys, command, "--help")
    assert status == 0
    assert cli.EXIT_CODES in out
    actions = ("ls", "verify", "rebuild", "gc", "export") if command == "store" else ()
    for words in [(command, action) for action in actions] or [(command,)]:
        assert "--json" in ended(capsys, *words, "--help")[1]


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ended(capsys, "--help")
    listed = [line.split()[0] for line in out.splitlines() if re.match(r"    [a-z]", line)]
    assert (status, sorted(listed)) == (0, sorted(COMMANDS))
    assert cli.EXIT_CODES in out


@pytest.mark.parametrize(
    "arguments",
    [(), ("nothing",), ("demo", "--agents", "1"), ("layout",), ("bench", "--rounds", "0")],
)
def test_bad_usage_exits_with_two(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    status, out, err = ended(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "tessera-sglang" in err


def test_arguments_that_nobody_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = ended(capsys, "layout", "deepseek-v3", "--", "--num-prompts", "3")
    assert status == 2
    assert "arguments behind --" in err


# --- what is missing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [("bench", "--model-path", str(TINY_MLA)), ("demo", "--agents", "2")],
)
def test_without_sglang_a_command_says_what_to_install(arguments: tuple[str, ...]) -> None:
    package = "sglang" if arguments[0] == "bench" else "tqdm"
    done = without(package, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{package} is missing: pip install 'tessera-sglang[sglang]'\n"


def test_without_sglang_the_doctor_still_looks() -> None:
    done = without("sglang", "doctor", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (1, False)
    failed = {one["name"]: one["found"] for one in found["findings"] if not one["ok"]}
    assert "sglang" in failed["plugin"]


def test_layout_and_help_need_no_sglang() -> None:
    assert without("sglang", "layout", "deepseek-v3").returncode == 0
    assert without("sglang", "--help").returncode == 0
    assert without("tqdm", "bench", "--help").returncode == 0


def test_without_rich_tables_are_text() -> None:
    done = without("rich", "layout", str(TINY_MLA), "--context", "4096")
    assert done.returncode == 0
    assert "───" in done.stdout


def test_a_module_that_another_version_lacks_is_named() -> None:
    found = cli._missing(ModuleNotFoundError(name="json.nothing"))
    assert found.startswith("the installed json has no json.nothing; a version that works: pip")


def test_our_own_missing_module_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError, match="ours"):
        cli._missing(ModuleNotFoundError("ours", name="tessera_sglang.nothing"))


# --- interrupts ----------------------------------------------------------------------------------


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tessera_sglang.layout.run", interrupted)
    assert cli.main(["layout", "deepseek-v3"]) == 130


# --- terminals and pipes -------------------------------------------------------------------------


def test_a_terminal_gets_ruled_tables_and_no_color_no_colour() -> None:
    plain = on_a_terminal({"NO_COLOR": "1"}, "layout", str(TINY_MLA), "--context", "4096")
    ruled = on_a_terminal({}, "layout", str(TINY_MLA), "--context", "4096")
    assert "┃".encode() in ruled
    assert ESCAPE.search(ruled), "titles are bold"
    colours = [int(code) for found in ESCAPE.findall(plain) for code in found.split(b";") if code]
    assert not [code for code in colours if code >= 30], "attributes at most"


def test_a_pipe_gets_text_only() -> None:
    command = [sys.executable, "-m", "tessera_sglang.cli", "layout", str(TINY_MLA)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0
    assert not ESCAPE.search(done.stdout)
    assert "┃".encode() not in done.stdout
    assert not done.stderr


def test_json_is_one_object_and_nothing_else() -> None:
    command = [sys.executable, "-m", "tessera_sglang.cli", "layout", str(TINY_MLA), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert isinstance(json.loads(done.stdout), dict)
    assert not done.stderr
