"""The name that `kvdata.sdk.stream` has in LMCache's SDK from 0.5.3 on."""

from kvdata.sdk.stream import (
    LMCacheSDKCacheKind,
    LMCacheStream,
    PostCompletion,
    TokenEvent,
    create_request,
)

LMCacheRequestStream = LMCacheStream

__all__ = [
    "LMCacheRequestStream",
    "LMCacheSDKCacheKind",
    "LMCacheStream",
    "PostCompletion",
    "TokenEvent",
    "create_request",
]
