"""Tessera for SGLang: a content-addressed KV cache for multi-agent serving."""

from .program import SpannedText, span, text_part

__all__ = ["SpannedText", "span", "text_part"]
__version__ = "0.1.0"
