"""Pages of KV in a storage engine that several servers share: SGLang's HiCache backends as a tier.

``store`` is what the tiers talk to; ``backend`` builds an engine and gives all of them one face;
``record`` is what a value holds; ``staging`` is the memory that engines read and write; ``calls`` keep
an engine that does not answer from keeping anybody.
"""

from __future__ import annotations

from .store import RemoteStore

__all__ = ["RemoteStore"]
