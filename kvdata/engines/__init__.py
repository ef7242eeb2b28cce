"""Who computes and consumes KV caches."""
