"""The control protocol: frames of a 32-bit little-endian length and one msgpack map.

A request is `{"op": …, "id": n, …arguments}`; its reply is `{"id": n, "ok": result}` or `{"id": n, "error": …}`.
Requests are pipelined: replies come in the order in which the work ends. The first request of a connection is
`hello`. Paths are absolute, sizes are bytes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from aenv import errors
from ublk.ranges import RemoteSpec

VERSION = 1
MAX_FRAME = 1 << 20  # bytes
MAX_LAYERS = 255


class Request(msgspec.Struct, tag_field="op", forbid_unknown_fields=True):
    """Base of all requests; `id` comes back in the reply."""

    id: int


class Hello(Request, tag="hello"):
    """Gives `{version, pid, front_ends, directory}`; refused if the version is not ours."""

    version: int


class Create(Request, tag="create"):
    """Make the files of an empty writable layer. Gives `{uuid}`."""

    data: str
    index: str
    size: int
    uuid: str | None = None
    parent_uuid: str = ""


class Open(Request, tag="open"):
    """Serve the layers (lowest first) and, with `data` and `index`, a writable layer on top, as file `image`.

    A layer is a path, or a map `{source: {kind: "file"|"http"|"s3", …}, size, digest, chunks?}` of one that is read on
    demand (`ublk.ranges` describes it). `cached` images keep their pages in the page cache (memory images); they must
    be read-only. `front_end` is `fuse` (a file), `ublk` (a block device), or `auto`: ublk for writable images where the
    kernel has it. `prefetch` is a file that `trace` wrote; `record`: so many first reads are recorded for `trace`.
    """

    image: str
    layers: list[str | RemoteSpec] = []
    data: str | None = None
    index: str | None = None
    cached: bool = False
    uid: int = 0
    gid: int = 0
    mode: int = 0o600
    prefetch: str | None = None
    record: int = 0
    front_end: str = "auto"


class Trace(Request, tag="trace"):
    """Stop recording, and write to `path` which chunks of the image's remote layers were read first.

    Gives `{chunks}`. Reads of other images through the same layers count, too.
    """

    image: str
    path: str


class Close(Request, tag="close"):
    """Flush and stop serving an image. Refused as long as somebody has it open."""

    image: str


class Restack(Request, tag="restack"):
    """Seal the writable layer of a served image and put a new, empty one on top, whose files are made here.

    Gives `{sealed: path}` as soon as the new layer takes the writes. The sealed layer can be opened by this server at
    once; it is on disk, complete and durable, when `seal` of it has returned.
    """

    image: str
    data: str
    index: str
    uuid: str | None = None


class Replace(Request, tag="replace"):
    """Serve a writable image from now on from these sealed layers (lowest first) below its writable one. They must have
    the content of those that it has, some of which were merged: the server cannot check that."""

    image: str
    layers: list[str]


class Seal(Request, tag="seal"):
    """Seal a writable layer in place, durably; no-op if it is sealed. `index` is the file that goes away."""

    data: str
    index: str


class Flush(Request, tag="flush"):
    image: str


class Stats(Request, tag="stats"):
    """Of one image, or of the server."""

    image: str | None = None


class List(Request, tag="list"):
    """All images, by name."""


class Resize(Request, tag="resize"):
    image: str
    size: int


class Shutdown(Request, tag="shutdown"):
    """Flush, unmount, end. Refused as long as an image is open, unless `force`."""

    force: bool = False


AnyRequest = Hello | Create | Open | Trace | Close | Restack | Replace | Seal | Flush | Stats | List | Resize | Shutdown
_decoder: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """One frame's body; None at the end of the stream. Raises InvalidInputError for a frame that is too long."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "little")
        if length > MAX_FRAME:
            raise errors.InvalidInputError("frame", f"{length} bytes are more than {MAX_FRAME}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def decode_request(body: bytes) -> AnyRequest:
    """Raises InvalidInputError naming the argument."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text, _, path = str(error).partition(" - at `$.")
        raise errors.InvalidInputError(path.rstrip("`") or "request", text) from error


def request_id(body: bytes) -> int | None:
    """The id of a request that is not valid otherwise."""
    try:
        value = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def encode_error(error: errors.AenvError) -> dict[str, Any]:
    field = error.field if isinstance(error, errors.InvalidInputError) else None
    message = error.message.removeprefix(f"{field}: ") if field is not None else error.message
    return {"kind": type(error).__name__, "message": message, "hint": error.hint, "field": field}


def decode_error(value: dict[str, Any]) -> errors.AenvError:
    """The error that `encode_error` got, as the same class."""
    kind, message, hint = value.get("kind"), str(value.get("message")), value.get("hint")
    if kind == "InvalidInputError":
        return errors.InvalidInputError(str(value.get("field")), message, hint=hint)
    if kind == "NotFoundError":
        return errors.NotFoundError(message, hint=hint)
    if kind == "ConflictError":
        return errors.ConflictError(message, hint=hint)
    return errors.UnavailableError(message, hint=hint)
