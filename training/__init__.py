"""Recipes: LightningModules that train KV compressors from live caches, and the demo that runs one end to end."""
