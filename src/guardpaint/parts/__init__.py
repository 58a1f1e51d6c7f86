"""What a guard is put together from: kinds of parts, presets, and how a guard is shared."""
