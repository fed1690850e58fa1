"""Tessera for SGLang: a content-addressed KV cache for multi-agent serving."""

__version__ = "0.1.0"
