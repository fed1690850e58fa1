"""Importing a kernel library, or saying why it can not be."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .base import KernelUnavailableError


def import_library(name: str, remedy: str) -> Any:
    """A module of a library that need not be there.

    Raises:
        KernelUnavailableError: it is missing or broken: what went wrong, and the remedy.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise KernelUnavailableError(f"{missing} is not installed; {remedy}") from error
    except (
        Exception
    ) as error:  # native libraries fail in ways of their own: OSError, RuntimeError …
        first_line = str(error).partition("\n")[0]
        raise KernelUnavailableError(
            f"{name} does not load here ({type(error).__name__}: {first_line}); {remedy}"
        ) from error


def require(module: Any, name: str, remedy: str) -> Any:
    """A name that an adapter needs of a library.

    Raises:
        KernelUnavailableError: the library has none; another version is installed than is known.
    """
    found = getattr(module, name, None)
    if found is None:
        raise KernelUnavailableError(f"{module.__name__} has no {name}; {remedy}")
    return found
