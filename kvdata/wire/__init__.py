"""The LMCache multiprocess protocol: messages, keys, tensor payloads, shared memory. Nothing else."""
