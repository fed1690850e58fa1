"""What is asked of a running server: its span settings, greedy answers, and log-probabilities."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .figures import Logprobs
from .prompts import Spans

TIMEOUT_S = 1800


class ServerError(RuntimeError):
    """The server can not be asked, or answered with an error."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the server says of itself."""

    page_tokens: int
    link_pages: int
    root_tokens: int
    model: str
    tokenizer: str  # a path on the server's machine, or a name


@dataclass(frozen=True, slots=True)
class Reply:
    """A greedy answer. ``tokens`` hold what ended it."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were not cached."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities behind every position of a run of tokens, in nats."""

    chosen: tuple[float, ...]  # of each token of the run
    top: tuple[Logprobs, ...]  # the most probable tokens in its place; empty if none were asked for
    of: tuple[Logprobs, ...]  # the tokens that were asked for, in its place; likewise


@dataclass(frozen=True, slots=True)
class Declared:
    """The spans of a request, and what it overrides. Offsets are half-open."""

    spans: Spans
    overrides: Mapping[str, Any]


class Client:
    """One server. Safe to use from several threads."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        local = urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
        proxies = [urllib.request.ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(*proxies)

    def state(self) -> ServerState:
        """Raises ServerError where the server serves no spans."""
        internal = self._get("/server_info").get("internal_states") or [{}]
        tessera = internal[0].get("tessera")
        if tessera is None:
            raise ServerError(
                f"{self.url} is no Tessera server: start it with --attention-backend tessera"
            )
        said = tessera.get("spans") or {"refused": "it does not say how it serves them"}
        if said["refused"] is not None:
            raise ServerError(f"{self.url} serves no spans: {said['refused']}")
        model = self._get("/model_info")
        return ServerState(
            page_tokens=tessera["page_tokens"],
            link_pages=said["link_pages"],
            root_tokens=said["root_tokens"],
            model=model["model_path"],
            tokenizer=model.get("tokenizer_path") or model["model_path"],
        )

    def greedy(
        self, tokens: Sequence[int], declared: Declared | None, *, salt: str, new_tokens: int
    ) -> Reply:
        """At most ``new_tokens`` tokens, the most probable one each time."""
        answer = self._generate(tokens, declared, salt, new_tokens, {})
        meta = answer["meta_info"]
        return Reply(tuple(answer["output_ids"]), meta["prompt_tokens"], meta["cached_tokens"])

    def score(
        self,
        tokens: Sequence[int],
        declared: Declared | None,
        *,
        salt: str,
        start: int,
        top: int = 0,
        of: Sequence[int] = (),
    ) -> Scored:
        """Log-probabilities of ``tokens[start:]``, each given all before it; ``start`` from 1 on.

        ``top`` asks for that many most probable tokens of each position, ``of`` for these tokens.
        """
        wishes = {
            "return_logprob": True,
            # SGLang's first entry stands for the token that nothing was computed for
            "logprob_start_len": start - 1,
            "top_logprobs_num": top,
            **({"token_ids_logprob": list(of)} if of else {}),
        }
        meta = self._generate(tokens, declared, salt, 0, wishes)["meta_info"]
        return Scored(
            chosen=tuple(entry[0] for entry in meta["input_token_logprobs"][1:]),
            top=_by_token(meta["input_top_logprobs"]) if top else (),
            of=_by_token(meta["input_token_ids_logprobs"]) if of else (),
        )

    def _generate(
        self,
        tokens: Sequence[int],
        declared: Declared | None,
        salt: str,
        new_tokens: int,
        wishes: dict[str, Any],
    ) -> Any:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens}
        if declared is not None:
            spans = [list(span) for span in declared.spans]
            sampling["custom_params"] = {"tessera": {"spans": spans, **declared.overrides}}
        body = {
            "input_ids": list(tokens),
            "sampling_params": sampling,
            "cache_salt": salt,
            **wishes,
        }
        answer = self._ask("/generate", body)
        reason = answer["meta_info"]["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise ServerError(f"the server gave up the request: {reason.get('message')}")
        return answer

    def _get(self, path: str) -> Any:
        return self._ask(path, None)

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ServerError(f"HTTP {error.code}: {_said(error.read())}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"{self.url}{path} can not be asked: {reason}") from error


def _by_token(positions: Sequence[Sequence[Any] | None]) -> tuple[Logprobs, ...]:
    return tuple({token: logprob for logprob, token, _ in known or ()} for known in positions[1:])


def _said(body: bytes) -> str:
    """What an error response says, without its wrapping."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        return str(found["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return text[:500]
