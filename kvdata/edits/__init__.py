"""Pure functions on caches `[2, L, T, D]` and token ids: rotation, selection, policies, addresses."""
