"""The function surface of LMCache's KV cache SDK, on kvdata's client."""

from kvdata.errors import KVCacheSDKError
from kvdata.sdk.kvcache import LMCacheKVCacheContext, close, connect, retrieve, store

__all__ = ["KVCacheSDKError", "LMCacheKVCacheContext", "close", "connect", "retrieve", "store"]
