"""A small LMCache-compatible server inside this process: test double, demo, and cache without an engine."""

try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as exc:
    raise ImportError("the embedded server needs starlette and uvicorn: pip install 'kvdata[server]'") from exc

from kvdata.server.app import EmbeddedServer

__all__ = ["EmbeddedServer"]
