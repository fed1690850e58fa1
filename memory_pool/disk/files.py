"""Files as a store needs them: whole reads and writes, retries, locks, holes.

What may pass (EIO of a cable, ETIMEDOUT of a network) is tried again a little; what stays is raised.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

TRANSIENT = frozenset(
    {errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.ENOLINK}
)
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
ATTEMPTS = 3
_WAIT_S = 0.01  # doubled each time
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # linux/falloc.h
_T = TypeVar("_T")


class Short(Exception):
    """The file ends before what was asked for."""


def retried(operation: Callable[[], _T], on_retry: Callable[[], None]) -> _T:
    """Call it up to ``ATTEMPTS`` times while it fails for a reason that may pass.

    Raises:
        OSError: the last reason, or one that does not pass.
    """
    for attempt in range(ATTEMPTS):
        try:
            return operation()
        except OSError as error:
            if error.errno not in TRANSIENT or attempt == ATTEMPTS - 1:
                raise
        on_retry()
        threading.Event().wait(_WAIT_S * 2**attempt)
    raise AssertionError("unreachable")


def read_all(fd: int, into: Sequence[memoryview], offset: int) -> None:
    """Fill the buffers one after the other from there.

    Raises:
        Short: the file ends before.
        OSError: as of preadv.
    """
    wanted = sum(map(len, into))
    got = os.preadv(fd, into, offset)
    while got < wanted:
        more = os.preadv(fd, _behind(into, got), offset + got)
        if not more:
            raise Short
        got += more


def write_all(fd: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write all of the parts one after the other.

    Raises:
        OSError: as of pwritev; some of it may have been written.
    """
    wanted = sum(map(len, parts))
    done = os.pwritev(fd, parts, offset)
    while done < wanted:
        done += os.pwritev(fd, _behind(parts, done), offset + done)


def _behind(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts after ``done`` bytes."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left


def lock_now(fd: int) -> bool:
    """Lock a file for this open of it, if nobody else has; its end unlocks it, kill -9 too."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for a lock file, and hold it.

    Raises:
        OSError: it can not be created or locked.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def punch(fd: int, offset: int, size: int) -> None:
    """Give the blocks of a range back to the file system; it reads as zeros from then on.

    Raises:
        OSError: EOPNOTSUPP where the file system can not.
    """
    if _fallocate is None:
        raise OSError(errno.EOPNOTSUPP, "no fallocate here")
    mode = _KEEP_SIZE | _PUNCH_HOLE
    if _fallocate(fd, mode, ctypes.c_longlong(offset), ctypes.c_longlong(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def can_punch(directory: Path) -> bool:
    """Whether files there can have holes punched. Asks by an unnamed file that is gone at once."""
    try:
        path = directory / f".punch-{os.getpid()}-{threading.get_ident()}.tmp"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError:
        return True  # the directory can not be written, then nothing will be evicted
    try:
        os.unlink(path)
        os.pwrite(fd, b"\1" * 8192, 0)
        punch(fd, 0, 4096)
        return os.pread(fd, 1, 0) == b"\0"
    except OSError as error:
        return error.errno in FULL  # full is no reason to think so
    finally:
        os.close(fd)


def next_data(fd: int, offset: int) -> int | None:
    """The first offset from there on that is in no hole; None where nothing follows."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return offset  # a file system that does not tell
        raise


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(draft, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_directory(path.parent)


_fallocate: Callable[..., int] | None
try:
    _fallocate = ctypes.CDLL(None, use_errno=True).fallocate
except (OSError, AttributeError):  # macOS: whole segments are evicted there
    _fallocate = None
