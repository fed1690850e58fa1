"""Seeded random load with aborts, checked request by request against a reference run."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

from prompts import Writer, compose
from server import Answer, RequestError, Server


@dataclass(frozen=True)
class Item:
    """One request of the load."""

    prompt: list[int]
    spans: list[list[int]] | None
    steps: int


def make_items(seed: int, count: int, *, longest: int) -> list[Item]:
    """Requests with zero to three of eight documents; some generate nothing, some a lot."""
    writer = Writer(seed)
    rng = writer.random
    documents = [writer.text(rng.choice([64, 128, 200, 300, 330, 450])) for _ in range(8)]
    items: list[Item] = []
    while len(items) < count:
        pieces = [(writer.text(rng.randrange(0, 120)), False)]
        for document in rng.sample(documents, rng.choice([0, 1, 1, 2, 3])):
            pieces.append((document, True))
            if rng.random() < 0.5:
                pieces.append((writer.text(rng.randrange(1, 40)), False))
        pieces.append((writer.text(rng.randrange(1, 50)), False))
        prompt, spans = compose(*pieces)
        if len(prompt) <= longest:
            items.append(Item(prompt, spans or None, rng.choice([0, 1, 8, 24, 60])))
    return items


@dataclass
class Load:
    """Workers that ask at random for ``seconds``; a quarter of the requests is aborted on the way."""

    server: Server
    items: list[Item]
    reference: list[Answer]
    seed: int
    finished: int = 0
    aborted: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    stuck: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, seconds: float, *, workers: int = 12, patience_s: float = 120) -> None:
        """Run to the end; a worker that has not come back after ``patience_s`` is stuck."""
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._work, args=(number, end), daemon=True)
            for number in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0) + patience_s)
        self.stuck = sum(thread.is_alive() for thread in threads)

    def _work(self, worker: int, end: float) -> None:
        rng = random.Random(self.seed * 1000 + worker)
        asked = 0
        while time.monotonic() < end:
            number, rid = rng.randrange(len(self.items)), f"w{worker}-{asked}"
            asked += 1
            victim = rng.random() < 0.25
            if victim:
                threading.Timer(rng.random() * 0.6, self.server.abort, [rid]).start()
            self._ask(number, rid, victim)

    def _ask(self, number: int, rid: str, victim: bool) -> None:
        item, want = self.items[number], self.reference[number]
        try:
            answer = self.server.generate(item.prompt, item.spans, steps=item.steps, rid=rid)
        except RequestError as error:
            with self._lock:
                if victim:
                    self.aborted += 1
                else:
                    self.failed.append(f"request {number}: {error}")
            return
        except Exception as error:  # a dead server: nothing is hidden, the test reads the list
            with self._lock:
                self.failed.append(f"request {number}: {error!r}")
            return
        known = want.tokens[: len(answer.tokens)] if victim else want.tokens
        with self._lock:
            self.finished += 1
            if answer.tokens != known:
                self.wrong.append(f"request {number}: {answer.tokens} instead of {want.tokens}")


def settle(server: Server) -> dict[str, object]:
    """The state once nothing runs any more."""
    for _ in range(100):
        state = server.state()
        if not state["pages"]["locked"] and not state["pages"]["held"]:
            return state
        time.sleep(0.1)
    return state
