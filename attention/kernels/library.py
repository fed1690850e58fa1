"""Importing a kernel library, or saying why it can not be."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from .base import KernelUnavailableError

NEEDS_CUDA = "needs a CUDA device"


def import_library(name: str, remedy: str) -> Any:
    """A module of a library for CUDA that need not be there. ``remedy`` installs it.

    Raises:
        KernelUnavailableError: it is missing, has no device here, or is broken: which, and why.
    """
    library = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == library:
            raise KernelUnavailableError(f"{library} is missing: {remedy}") from error
        broken = f"{missing} is missing"
        raise KernelUnavailableError(
            f"{library} is installed but does not load: {broken}; {remedy}"
        ) from error
    except Exception as error:  # native libraries fail as they like: OSError, RuntimeError …
        if not torch.cuda.is_available():  # whatever it says: without a driver none can load
            raise KernelUnavailableError(f"{library} is installed; {NEEDS_CUDA}") from error
        reason = str(error).strip().partition("\n")[0]
        raise KernelUnavailableError(
            f"{library} is installed but does not load: {type(error).__name__}: {reason}"
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
