"""HTTP requests that end in time and in size, whatever answers: foreign errors become ours."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from kvdata.client.deadline import Deadline
from kvdata.errors import ProtocolError, ServerTimeout, ServerUnreachable

# A server's status grows with its registrations; this is room for thousands of them.
_LARGEST_ANSWER = 16 << 20


class _Stream(httpcore.NetworkStream):
    """A connection whose every read and write ends with the request that it is for."""

    def __init__(self, stream: httpcore.NetworkStream, request: _Current) -> None:
        self._stream, self._request = stream, request

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._request.seconds(httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._request.seconds(httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(*args, **kwargs), self._request)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Current(threading.local):
    """The deadline of the request that this thread has under way."""

    deadline: Deadline

    def seconds(self, error: type[Exception]) -> float:
        remaining = self.deadline.remaining()
        if not remaining:
            raise error("the whole answer took too long")
        return remaining


class _Backend(httpcore.SyncBackend):
    def __init__(self, request: _Current) -> None:
        self._request = request

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        seconds = self._request.seconds(httpcore.ConnectTimeout)
        return _Stream(super().connect_tcp(host, port, seconds, local_address, socket_options), self._request)


class _Transport(httpx.HTTPTransport):
    """httpx's own time-outs are for each piece of an answer; a server that drips would never run into one."""

    def __init__(self, request: _Current, secure: bool) -> None:
        super().__init__(verify=secure, trust_env=False)  # certificates take longer to load than a server to answer
        context = httpx.create_ssl_context(trust_env=False) if secure else None
        self._pool.close()
        self._pool = httpcore.ConnectionPool(ssl_context=context, network_backend=_Backend(request))


class Http:
    """The server's HTTP side, with foreign errors mapped to ours.

    Args:
        http_url: base URL.
        timeout: seconds for each request, from its first byte to its answer's last.
    """

    def __init__(self, http_url: str, timeout: float) -> None:
        self.url = http_url.rstrip("/")
        self.timeout = timeout
        self._current = _Current()
        # Proxy settings of the environment are meant for the internet, not for a cache server next door.
        transport = _Transport(self._current, self.url.startswith("https:"))
        self._client = httpx.Client(base_url=self.url, transport=transport, trust_env=False)

    def request(self, method: str, path: str, deadline: Deadline | None = None, **kwargs: Any) -> httpx.Response:
        """One request; `ServerUnreachable`, `ServerTimeout` or `ProtocolError` name the URL. Status codes are the
        caller's."""
        self._current.deadline = Deadline(self.timeout) if deadline is None else deadline.shorter(self.timeout)
        try:
            try:
                return self._whole(method, path, **kwargs)
            except (httpx.RemoteProtocolError, httpx.ReadError):
                if method != "GET":
                    raise
                # The server may have closed an idle connection just as it was used; asking again changes nothing.
                return self._whole(method, path, **kwargs)
        except httpx.TimeoutException as exc:
            raise ServerTimeout(
                f"{method} {self.url}{path}: no answer in time ({type(exc).__name__}); see the server's log"
            ) from exc
        except httpx.TransportError as exc:
            raise ServerUnreachable(
                f"{method} {self.url}{path}: {exc} (HTTP); is the server running, and is this the port of its "
                "--http-port option?"
            ) from exc
        except httpx.RequestError as exc:
            raise ProtocolError(f"{method} {self.url}{path}: {exc}; is this an LMCache server?") from exc

    def _whole(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """An answer with all of its body."""
        with self._client.stream(method, path, **kwargs) as response:
            parts: list[bytes] = []
            left = _LARGEST_ANSWER
            for part in response.iter_bytes():
                left -= len(part)
                if left < 0:
                    raise ProtocolError(
                        f"{method} {self.url}{path} answers more than {_LARGEST_ANSWER >> 20} MiB; is this an LMCache "
                        "server?"
                    )
                parts.append(part)
            headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() == "content-type"]
            return httpx.Response(response.status_code, headers=headers, content=b"".join(parts))

    def json(self, method: str, *paths: str, **kwargs: Any) -> Any:
        """JSON answer of the first path that exists; `ProtocolError` for anything else."""
        for path in paths:
            response = self.request(method, path, **kwargs)
            if response.status_code != 404 or path == paths[-1]:
                break
        if response.status_code != 200:
            raise ProtocolError(
                f"{method} {self.url}{path} answered {response.status_code}; is this an LMCache server?"
            )
        try:
            return response.json()
        except (ValueError, RecursionError) as exc:
            raise ProtocolError(f"{method} {self.url}{path} did not answer JSON; is this an LMCache server?") from exc

    def close(self) -> None:
        """Close pooled connections."""
        self._client.close()
