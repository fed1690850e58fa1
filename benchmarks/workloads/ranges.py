"""What shapes have in common: counts, and ranges that are drawn from."""

from __future__ import annotations

Range = tuple[int, int]  # least and most, both included


def check_counts(shape: object, *names: str) -> None:
    """Raises ValueError for one below 1."""
    for name in names:
        if getattr(shape, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(shape, name)}")


def check_ranges(shape: object, *names: str) -> None:
    """Raises ValueError for one that is empty or begins below 1."""
    for name in names:
        least, most = getattr(shape, name)
        if not 1 <= least <= most:
            raise ValueError(f"{name} must ascend from 1 on, got {least} to {most}")
