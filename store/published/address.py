"""Addresses of published runs: folders and buckets, opened through pyarrow with time limits.

    files, root = open_address("s3://lake/rankscope?endpoint_override=http://minio:9000")
    files.get_file_info(f"{root}/run.json")

`s3://` takes `endpoint_override` and `region`, by default AWS_ENDPOINT_URL and AWS_DEFAULT_REGION. Credentials come
from the sources that AWS's tools use, never from the address, because run.json contains the address.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["AddressError", "address_of", "check_address", "one_line", "open_address"]

SCHEMES = ("file", "s3")
CONNECT_S = 5.0
REQUEST_S = 10.0
_OPTIONS = {"file": (), "s3": ("endpoint_override", "region")}
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_PATH = re.compile(rf"({'|'.join(SCHEMES)}):/+(.*)", re.DOTALL)
_AWS_ERROR = re.compile(r"AWS Error (\w+)")
_ADVICE = {
    "NETWORK_CONNECTION": "check the network and the endpoint (endpoint_override=, AWS_ENDPOINT_URL)",
    "NO_SUCH_BUCKET": "check the bucket's name, and region= or AWS_DEFAULT_REGION",
    **dict.fromkeys(
        ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "INVALID_CLIENT_TOKEN_ID", "SIGNATURE_DOES_NOT_MATCH"),
        "check the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE) and their rights",
    ),
}
"""What to check after an error of S3, by the name that AWS's library gives it."""
_ENDPOINT = re.compile(r"\b(https?):/(?=[^/])")


class AddressError(ValueError):
    """An address cannot be opened; the message is one line."""


def address_of(path: Path) -> str | None:
    """Return the address if `path` is one that was parsed as a path, which turned `//` into `/`. None otherwise."""
    match = _PATH.fullmatch(str(path))
    if match is None:
        return None
    slash = "/" if match[1] == "file" else ""
    rest = _ENDPOINT.sub(r"\1://", match[2])
    return f"{match[1]}://{slash}{rest}"


def check_address(text: str) -> None:
    """Raise AddressError for an invalid address, or one that contains credentials. Opens nothing."""
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        options = parse_qs(parts.query, keep_blank_values=True)
    except ValueError:
        raise AddressError("the address cannot be read: choose file:///folder or s3://bucket/prefix") from None
    shown = f"{parts.scheme}://{host}{parts.path}"
    if parts.scheme not in SCHEMES:
        raise AddressError(f"{shown}: choose an address of {' or '.join(f'{scheme}://' for scheme in SCHEMES)}")
    if "@" in text:
        raise AddressError(f"{parts.scheme}://...: keys do not belong in an address: set AWS_ACCESS_KEY_ID instead")
    if parts.fragment or not text.isprintable():
        raise AddressError(f"{parts.scheme}://...: has a # or a control character")
    if unknown := sorted(options.keys() - set(_OPTIONS[parts.scheme])):
        takes = " and ".join(_OPTIONS[parts.scheme]) or "none"
        raise AddressError(f"{shown}: unknown option {unknown[0]}, {parts.scheme}:// takes {takes}")
    if (parts.scheme == "s3" and not host) or (parts.scheme == "file" and (host or not parts.path.strip("/"))):
        raise AddressError(f"{shown}: choose file:///folder or s3://bucket/prefix")


def open_address(text: str) -> tuple[Any, str]:
    """Return (pyarrow file system, path in it). Raises AddressError."""
    check_address(text)
    try:
        from pyarrow import fs
    except ImportError:
        raise AddressError(f"{text}: pyarrow is not installed: pip install pyarrow") from None
    parts = urlsplit(text)
    try:
        if parts.scheme == "file":
            return fs.LocalFileSystem(), unquote(parts.path).rstrip("/")
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            options.setdefault("endpoint_override", endpoint)
        files = fs.S3FileSystem(
            connect_timeout=CONNECT_S,
            request_timeout=REQUEST_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=2),
            allow_delayed_open=True,  # a small object takes one request instead of three
            **options,
        )
    except (OSError, ValueError) as error:
        raise AddressError(one_line(error)) from None
    return files, f"{parts.netloc}{parts.path}".rstrip("/")


def one_line(error: Exception) -> str:
    """First line of an error and what to check, without the AWS keys from the environment."""
    text = str(error).partition("\n")[0]
    match = _AWS_ERROR.search(text)
    if match:
        text = text[match.start() :]  # the text before it repeats the address
    text = text[:300]
    for name in _SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, "(redacted)")
    return f"{text}; {_ADVICE[match[1]]}" if match and match[1] in _ADVICE else text
