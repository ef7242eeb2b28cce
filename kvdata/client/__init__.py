"""Client of an LMCache multiprocess server: who it is, what it holds, KV in and out."""
