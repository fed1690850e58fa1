"""From texts with declared spans to token ids with offsets. Knows tokenizers, no engine."""
