"""Entry point of the group ``sglang.srt.plugins``: what is registered and hooked, nothing else.

SGLang runs :func:`load` early in each of its processes and logs whatever it raises. So a reason not
to work is kept and raised where it stops the start: in the resolution of server arguments, and again
when the attention backend is built.
"""

from __future__ import annotations

import logging
from typing import Any

from .config import BACKEND

logger = logging.getLogger(__name__)


def load() -> None:
    """Register the backend, the resolution steps and the hooks."""
    try:
        from . import compat, startup, wiring

        compat.check_version()
        compat.add_attention_backend_choices([BACKEND])
        compat.register_attention_backend(BACKEND)(wiring.make_backend)
        compat.register_resolution_hook("handle_missing_default_values")(startup.choose_defaults)
        compat.register_resolution_hook("handle_missing_default_values")(_verify_first)
        compat.register_resolution_hook("handle_speculative_decoding")(startup.place_drafts)
        compat.register_resolution_hook("handle_model_capability_adjustments")(
            startup.refuse_contradictions
        )
        compat.install(wiring.HOOKS)
    except Exception as error:
        logger.exception("tessera can not be used with this SGLang")
        _refuse(error)


def verify() -> None:
    """Raise unless every hook landed. Called when SGLang has applied them."""
    from . import compat, wiring

    compat.verify(wiring.HOOKS)


def _verify_first(server_args: Any, previous: Any) -> None:
    from . import startup

    if startup.selected(server_args):
        verify()
    previous(server_args)


def _refuse(reason: Exception) -> None:
    """Let the server parse our name and stop with the true reason."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    def step(server_args: Any, previous: Any) -> None:
        if BACKEND in (
            server_args.attention_backend,
            server_args.prefill_attention_backend,
            server_args.decode_attention_backend,
        ):
            raise RuntimeError(f"--attention-backend tessera can not be used: {reason}") from reason
        previous(server_args)

    def factory(runner: Any) -> Any:
        raise RuntimeError(f"--attention-backend tessera can not be used: {reason}") from reason

    add_attention_backend_choices([BACKEND])
    register_resolution_hook("handle_missing_default_values")(step)
    register_attention_backend(BACKEND)(factory)
