"""Fetch what an http or https URL names, within limits."""

from __future__ import annotations

import time
import urllib.request as request
from urllib.parse import urlsplit

CHUNK = 2**16


def download(url: str, max_bytes: int, timeout: float) -> bytes:
    """The bytes behind a URL; `ValueError` if they are too many or come too slowly."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("is not an http or https URL")
    # Put together by hand: the default opener would follow a redirection to ftp.
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPRedirectHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    deadline = time.monotonic() + timeout
    body = bytearray()
    with opener.open(url, timeout=timeout) as answer:
        while chunk := answer.read1(CHUNK):
            body += chunk
            if len(body) > max_bytes:
                raise ValueError(f"has more than {max_bytes} bytes")
            if time.monotonic() > deadline:
                raise ValueError(f"was not downloaded within {timeout:g} s")
        if answer.length:
            raise ValueError(f"ended {answer.length} bytes before its announced length")
    if not body:
        raise ValueError("is empty: the answer has no bytes")
    return bytes(body)
