"""``tessera-sglang demo``: agents over one document, on SGLang's own prefix tree and on Tessera."""
