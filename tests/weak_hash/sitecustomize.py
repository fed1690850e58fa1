"""Put on PYTHONPATH of a server: page keys of one byte, so that pages collide all the time."""

from tessera_sglang.memory_pool import keys

_strong = keys.xxh3_128


def _weak(data: bytes) -> bytes:
    return _strong(data)[:1]


keys.xxh3_128 = _weak
