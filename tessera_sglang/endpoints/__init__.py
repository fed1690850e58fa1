"""Spans in what people send, turned into ``input_ids`` and ``custom_params.tessera.spans``."""
