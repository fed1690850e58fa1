"""Pages in a storage engine that servers share: found again, never believed, never waited for."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from tessera_sglang.config import ConfigError
from tessera_sglang.memory_pool.keys import Chain, Namespace
from tessera_sglang.memory_pool.lower import PageName, TierKey, Worth
from tessera_sglang.memory_pool.names import names_of
from tessera_sglang.remote import RemoteStore, record, staging

PAGE = 4  # tokens
PAGE_BYTES = 5000  # no whole number of blocks
MANIFEST = hashlib.sha256(b"manifest").digest()
SALT = "a salt that nobody may read"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)


def text(seed: int, pages: int, namespace: Namespace | None = None) -> list[PageName]:
    root = (namespace or Namespace("model")).root_key()
    tokens = [seed * 1000 + n for n in range(pages * PAGE)]
    return names_of(Chain(root, tokens, PAGE), 0, pages, None)


def content(names: list[PageName]) -> bytes:
    return b"".join(hashlib.shake_128(n.namespace + n.key).digest(PAGE_BYTES) for n in names)


def file_store(directory: Path, manifest: bytes = MANIFEST, **extra: Any) -> RemoteStore:
    return RemoteStore(
        "file",
        {"directory": str(directory), **extra},
        page_bytes=PAGE_BYTES,
        manifest_digest=manifest,
    )


def put(store: RemoteStore, names: list[PageName]) -> list[bool]:
    worth = [Worth(n * PAGE, False, 0) for n in range(len(names))]
    return store.write(names, memoryview(content(names)), worth)


def get(store: RemoteStore, names: list[PageName]) -> list[bool]:
    """Which pages landed; asserts that they are right, and that nothing else was written."""
    untouched = b"\xa5" * PAGE_BYTES
    into = bytearray(untouched * len(names))
    landed = store.read(names, memoryview(into))
    for number, (name, there) in enumerate(zip(names, landed, strict=True)):
        found = into[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
        assert found == (content([name]) if there else untouched)
    return landed


# --- the `file` backend --------------------------------------------------------------------------

WRITER = """
import json, sys
sys.path.insert(0, {tests!r})
import test_remote_store as t
store = t.{make}
print(json.dumps(t.put(store, t.text({seed}, {pages}))))
store.close()
"""


def write_in_another_process(make: str, seed: int, pages: int) -> list[bool]:
    program = WRITER.format(tests=str(Path(__file__).parent), make=make, seed=seed, pages=pages)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stored: list[bool] = json.loads(done.stdout.splitlines()[-1])
    return stored


def test_another_process_finds_what_one_wrote(tmp_path: Path) -> None:
    make = f"file_store(t.Path({str(tmp_path)!r}))"
    assert write_in_another_process(make, 1, 300) == [True] * 300
    store, names = file_store(tmp_path), text(1, 300)  # more than one call's worth
    assert store.contains([*names, *text(2, 3)]) == [True] * 300 + [False] * 3
    assert get(store, names) == [True] * 300
    assert put(store, names[:5]) == [True] * 5, "what is there is held"
    state = store.state()
    assert (state["read"], state["rejected"], state["failures"]) == (300, {}, {})
    assert store.damaged == store.evicted == 0


def test_values_have_one_size_and_names_without_salts(tmp_path: Path) -> None:
    namespace = Namespace("model", cache_salt=SALT)
    salted = text(1, 2, namespace)
    store = file_store(tmp_path)
    put(store, salted + text(1, 2))
    files = list(tmp_path.glob("*.bin"))
    assert len(files) == 4
    assert {f.stat().st_size for f in files} == {record.record_bytes(PAGE_BYTES)}
    for file in files:
        assert file.name.split("_")[0].isalnum()
        assert SALT.encode() not in file.read_bytes()
        assert SALT not in file.name
        assert SALT.encode().hex() not in file.name


def test_what_another_manifest_or_salt_stored_is_not_there(tmp_path: Path) -> None:
    names = text(1, 3)
    put(file_store(tmp_path), names)
    other = file_store(tmp_path, hashlib.sha256(b"other weights").digest())
    assert other.contains(names) == get(other, names) == [False] * 3
    store = file_store(tmp_path)
    salted = text(1, 3, Namespace("model", cache_salt=SALT))
    assert store.contains(salted) == get(store, salted) == [False] * 3
    assert store.damaged == 0


def test_keys_are_framed() -> None:
    """Neighbouring fields that run together give other keys."""
    name = PageName(b"ab", TierKey(b"p"), TierKey(b"c"), b"", b"")
    other = PageName(b"a", TierKey(b"p"), TierKey(b"bc"), b"", b"")
    assert record.key_text(MANIFEST, name) != record.key_text(MANIFEST, other)


def files_of(directory: Path, names: list[PageName]) -> list[Path]:
    keys = [record.key_text(MANIFEST, name) for name in names]
    return [next(directory.glob(f"{key}*.bin")) for key in keys]


def test_a_flipped_bit_anywhere_is_a_miss(tmp_path: Path) -> None:
    names, rng = text(1, 1), random.Random(1)
    put(file_store(tmp_path), names)
    (file,) = files_of(tmp_path, names)
    whole = file.read_bytes()
    header = [8 * n + rng.randrange(8) for n in range(250)]  # all of its fields
    bits = header + [rng.randrange(8 * len(whole)) for _ in range(150)]
    store = file_store(tmp_path)
    for number, bit in enumerate(bits, 1):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert get(store, names) == [False], f"bit {bit}"
        assert store.damaged == number
    rejected = store.state()["rejected"]
    assert isinstance(rejected, dict)
    assert set(rejected) == {"format", "checksum"}
    file.write_bytes(whole)
    assert get(store, names) == [True]


def test_damage_is_not_asked_for_again_and_hurts_no_other_page(tmp_path: Path) -> None:
    names = text(1, 6)
    put(file_store(tmp_path), names)
    files = files_of(tmp_path, names)
    files[1].write_bytes(files[1].read_bytes()[:100])  # cut off: the engine raises over a batch
    swapped = files[3].read_bytes()
    files[3].write_bytes(files[4].read_bytes())  # whole, but another page
    files[4].write_bytes(swapped)
    store = file_store(tmp_path)
    assert store.contains(names) == [True] * 6
    assert get(store, names) == [True, False, True, False, False, True]
    assert store.state()["rejected"] == {"unreadable": 1, "name": 2}
    assert store.damaged == 3
    assert store.contains(names) == [True, False, False, False, False, False], "the chain is broken"
    assert store.contains(names[2:3] + names[5:]) == [True, True]
    assert put(store, names) == [True, False, True, False, False, True], (
        "no engine replaces a value"
    )


def test_a_record_of_another_manifest_under_our_key_is_refused(tmp_path: Path) -> None:
    names = text(1, 1)
    put(file_store(tmp_path), names)
    (file,) = files_of(tmp_path, names)
    foreign = bytearray(file.stat().st_size)
    record.pack(names[0], memoryview(content(names)), manifest=bytes(32), into=memoryview(foreign))
    file.write_bytes(foreign)
    store = file_store(tmp_path)
    assert get(store, names) == [False]
    assert store.state()["rejected"] == {"manifest": 1}


def test_a_name_that_does_not_fit_is_not_stored(tmp_path: Path) -> None:
    name = text(1, 1)[0]
    long = PageName(name.namespace, name.parent, name.key, name.tokens, bytes(record.HEADER_BYTES))
    store = file_store(tmp_path)
    assert put(store, [long]) == [False]
    assert store.state()["oversized_names"] == 1
    assert not list(tmp_path.glob("*.bin"))


def test_a_directory_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    directory, names = tmp_path / "kv", text(1, 3)
    store = file_store(directory)
    put(store, names)
    shutil.rmtree(directory)
    assert store.contains(names) == get(store, names) == [False] * 3
    assert put(store, names) == [False] * 3
    assert store.state()["not_stored"] == 3


def test_many_threads_at_once(tmp_path: Path) -> None:
    store, wrong = file_store(tmp_path), []

    def work(seed: int) -> None:
        names = text(seed % 3, 20)  # threads write the same pages
        for _ in range(5):
            if put(store, names) != [True] * 20 or get(store, names) != [True] * 20:
                wrong.append(store.state())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.damaged == 0


# --- an engine that does wrong -------------------------------------------------------------------


class Unruly(HiCacheStorage):  # type: ignore[misc]
    """An engine in memory that is told what to do wrong."""

    made: Unruly

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        self.values: dict[str, bytes] = {}
        self.mode = "fine"
        self.go_on = threading.Event()
        self.closed = False
        Unruly.made = self
        if storage_config.extra_config.get("refuse"):
            raise ConnectionError("no route to the engine")

    def _misbehave(self) -> None:
        if self.mode == "raise":
            raise OSError("the engine is gone")
        if self.mode == "exit":
            raise SystemExit(1)
        if self.mode == "hang":
            self.go_on.wait()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        self._misbehave()
        if self.mode == "lie":
            return target_location  # says that it read
        value = self.values.get(key)
        if value is not None:
            memoryview(target_location.numpy())[:] = value
        return None if value is None else target_location

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        return [self.get(key, into) for key, into in zip(keys, target_locations, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        self._misbehave()
        self.values[key] = value.numpy().tobytes()
        return True

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    def exists(self, key: str) -> bool:
        self._misbehave()
        return key in self.values

    def close(self) -> None:
        self._misbehave()
        self.closed = True


def unruly(**extra: Any) -> tuple[RemoteStore, Unruly]:
    settings = {
        "backend_name": "unruly",
        "module_path": __name__,
        "class_name": "Unruly",
        "timeout_s": 30,
        "lookup_timeout_s": 30,
        **extra,
    }
    store = RemoteStore("dynamic", settings, page_bytes=PAGE_BYTES, manifest_digest=MANIFEST)
    return store, Unruly.made


@pytest.mark.parametrize("mode", ["raise", "exit"])
def test_an_engine_that_raises_is_a_miss(mode: str) -> None:
    store, engine = unruly()
    names = text(1, 4)
    put(store, names)
    engine.mode = mode
    assert store.contains(names) == get(store, names) == put(store, text(2, 4)) == [False] * 4
    state = store.state()
    assert state["failures"] == {"lookup_error": 1, "read_error": 1, "write_error": 1}
    assert store.damaged == 0
    engine.mode = "fine"
    assert get(store, names) == [True] * 4


def test_an_engine_that_only_says_that_it_read_is_not_believed() -> None:
    store, engine = unruly()
    names = text(1, 2)
    put(store, names)
    assert get(store, names) == [True] * 2, "the right bytes are in memory that reads share"
    engine.mode = "lie"
    assert get(store, names) == [False] * 2
    assert store.state()["rejected"] == {"format": 2}


def test_an_engine_that_hangs_keeps_nobody_and_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tessera_sglang.remote.calls.PAUSE_S", 0.0)
    store, engine = unruly(timeout_s=0.5, lookup_timeout_s=0.5)
    names = text(1, 3)
    put(store, names)
    engine.mode = "hang"
    began = time.monotonic()
    assert store.contains(names) == get(store, names) == put(store, text(2, 3)) == [False] * 3
    assert time.monotonic() - began < 10
    began = time.monotonic()
    for _ in range(50):
        assert store.contains(names) == get(store, names) == [False] * 3
    assert time.monotonic() - began < 10, "nobody queues up behind a call that hangs"
    failures = store.state()["failures"]
    assert failures == {
        **{"lookup_timeout": 1, "read_timeout": 1, "write_timeout": 1},
        **{"lookup_busy": 50, "read_busy": 50},
    }
    engine.mode = "fine"
    engine.go_on.set()  # the calls come back, and write to memory that nobody else has
    deadline = time.monotonic() + 10
    while get(store, names) != [True] * 3:
        assert time.monotonic() < deadline
    assert store.damaged == 0


def test_lookups_ask_no_page_behind_a_missing_one() -> None:
    store, engine = unruly()
    one, two = text(1, 50), text(2, 3)
    put(store, one[:10] + one[11:] + two)
    asked: list[str] = []
    exists = engine.exists
    engine.exists = lambda key: asked.append(key) or exists(key)  # type: ignore[method-assign,func-returns-value]
    assert store.contains(one + two) == [True] * 10 + [False] * 40 + [True] * 3
    assert len(asked) == 10 + 1 + 3


def test_close_reaches_the_engine_and_then_all_is_a_miss() -> None:
    store, engine = unruly()
    names = text(1, 2)
    put(store, names)
    store.close()
    store.close()
    assert engine.closed
    assert store.contains(names) == get(store, names) == put(store, names) == [False] * 2


# --- settings ------------------------------------------------------------------------------------


def refusal(name: str, extra: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        RemoteStore(name, extra, page_bytes=PAGE_BYTES, manifest_digest=MANIFEST)
    return str(caught.value)


@pytest.mark.parametrize("name", ["redis", "sim", "shm"])
def test_an_engine_that_is_none_is_refused_with_those_there_are(name: str) -> None:
    message = refusal(name, None)
    assert f"remote_tier {name!r}" in message
    assert "dynamic, eic, file," in message
    assert "mooncake, mori, nixl" in message


def test_an_engine_that_can_not_be_built_refuses_the_start() -> None:
    with pytest.raises(ConfigError, match="remote_tier 'dynamic' could not be built") as caught:
        unruly(refuse=True)
    assert "ConnectionError: no route to the engine" in str(caught.value)


def test_an_engine_whose_package_is_absent_refuses_the_start() -> None:
    absent = next(
        (
            n
            for n, m in (("hf3fs", "hf3fs_fuse"), ("nixl", "nixl"))
            if not importlib.util.find_spec(m)
        ),
        None,
    )
    if absent is None:
        pytest.skip("every engine's package is installed")
    assert "remote_tier_extra_config" in refusal(absent, None)


def test_a_directory_comes_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
    assert variable in refusal("file", None)
    monkeypatch.setenv(variable, str(tmp_path / "a"))
    RemoteStore("file", None, page_bytes=PAGE_BYTES, manifest_digest=MANIFEST)
    assert (tmp_path / "a").is_dir()
    assert variable in refusal("file", {"directory": str(tmp_path / "b")})
    monkeypatch.delenv(variable)
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"directory": str(tmp_path / "c"), "prefetch_threshold": 1}))
    RemoteStore("file", f"@{settings}", page_bytes=PAGE_BYTES, manifest_digest=MANIFEST)
    assert (tmp_path / "c").is_dir()


@pytest.mark.parametrize("extra", ["{", "@/nowhere.json", {"prefetch_threshold": "x"}])
def test_settings_that_can_not_be_read_are_refused(extra: Any) -> None:
    assert "remote_tier_extra_config" in refusal("file", extra)


@pytest.mark.parametrize("value", [0, -1, "1", True, None])
@pytest.mark.parametrize("key", ["timeout_s", "lookup_timeout_s"])
def test_time_outs_are_seconds(key: str, value: Any, tmp_path: Path) -> None:
    assert key in refusal("file", {"directory": str(tmp_path), key: value})


# --- staging memory, as engines see it -----------------------------------------------------------


def test_staging_slots_are_blocks_and_big_pages_get_few() -> None:
    pool = staging.StagingPool(record.record_bytes(PAGE_BYTES))
    assert pool.is_stride_page_aligned(4096)
    assert pool.slots == staging.MOST_SLOTS
    pointers, sizes = pool.get_page_buffer_meta(torch.arange(pool.slots, pool.slots + 2))
    assert pointers == [pool.get_data_page(pool.slots + n).data_ptr() for n in (0, 1)]
    assert sizes == [record.record_bytes(PAGE_BYTES)] * 2
    big = staging.StagingPool(record.record_bytes(20 << 20))
    assert big.slots == 3
    assert staging.StagingPool(record.record_bytes(70 << 20)).slots == 1


# --- Mooncake over TCP on loopback ---------------------------------------------------------------


def mooncake_store(master: str) -> RemoteStore:
    settings = {
        "master_server_address": master,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "local_hostname": "127.0.0.1",
        "global_segment_size": 64 << 20,
        "check_server": False,
    }
    return RemoteStore("mooncake", settings, page_bytes=PAGE_BYTES, manifest_digest=MANIFEST)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture
def mooncake_master(tmp_path: Path) -> Iterator[str]:
    module = pytest.importorskip(
        "mooncake.store",
        reason="Mooncake is not to be had; pip install mooncake-transfer-engine-non-cuda",
        exc_type=ImportError,  # also where libibverbs is absent
    )
    binary = Path(module.__file__).parent / "mooncake_master"
    binary.stat()
    port, metrics = free_ports(2)
    log = tmp_path / "master.log"
    command = [str(binary), "--rpc_port", str(port), "--metrics_port", str(metrics)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


READER = """
import json, sys
sys.path.insert(0, {tests!r})
import test_remote_store as t
store, names = t.mooncake_store({master!r}), t.text(1, 150)
print(json.dumps([store.contains(names + t.text(2, 2)), t.get(store, names), store.state()]))
"""


def test_mooncake_on_loopback(mooncake_master: str) -> None:
    """One process writes to memory that it lends the store, another one reads it over TCP."""
    store, names = mooncake_store(mooncake_master), text(1, 150)
    assert put(store, names) == [True] * 150
    assert put(store, names) == [True] * 150
    assert get(store, names) == [True] * 150
    assert store.contains([*names, *text(2, 2)]) == [True] * 150 + [False] * 2
    program = READER.format(tests=str(Path(__file__).parent), master=mooncake_master)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    there, landed, state = json.loads(done.stdout.splitlines()[-1])
    assert there == [True] * 150 + [False] * 2
    assert landed == [True] * 150
    assert state["rejected"] == state["failures"] == {}

    alien = text(3, 2)  # somebody else stored something under our keys
    engine = store._backend._engine
    size = record.record_bytes(PAGE_BYTES)
    for name, value in zip(alien, (b"x" * size, b"x"), strict=True):
        key = record.key_text(MANIFEST, name)
        assert engine.store.put(f"{engine.config_prefix}_{key}__k", value) == 0
    assert store.contains(alien) == [True] * 2
    assert get(store, alien) == [False] * 2
    assert store.damaged == 2
    store.close()
    engine.store.close()  # while its master still answers
