"""Ranges of S3 objects."""

from __future__ import annotations

import threading
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from ublk.ranges import Arrived, RangeError, S3Spec, absolute_path, check_deadline
from ublk.ranges_http import CONNECT_SECONDS, SILENCE_SECONDS, read_credentials

PIECE = 64 << 10  # bytes: boto3 waits for all of a piece, and only then is the clock looked at


class S3Clients:
    """Clients of boto3, which are large and slow to make, shared by all layers that can use the same one."""

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._lock = threading.Lock()
        self._known: dict[tuple[str | None, ...], Any] = {}

    def get(self, spec: S3Spec) -> Any:
        """Raises RangeError for credentials, ValueError for an address that is none."""
        keys: dict[str, str] = {}
        if spec.credentials is not None:
            keys = read_credentials(absolute_path("layers.source.credentials", spec.credentials))
        key = (spec.endpoint, spec.region, *(text for pair in sorted(keys.items()) for text in pair))
        with self._lock:
            if key not in self._known:
                self._known[key] = self._make(spec, keys)
            return self._known[key]

    def _make(self, spec: S3Spec, keys: dict[str, str]) -> Any:
        config = Config(
            connect_timeout=CONNECT_SECONDS, read_timeout=SILENCE_SECONDS, max_pool_connections=self._connections,
            retries={"total_max_attempts": 1},  # whoever fetches retries
            response_checksum_validation="when_required",  # they are of whole objects
            s3={"addressing_style": "path" if spec.endpoint else "auto"},
        )  # fmt: skip
        # A session of its own: the default one is global and not for several threads.
        session = boto3.session.Session(
            aws_access_key_id=keys.get("access_key"), aws_secret_access_key=keys.get("secret_key"),
            aws_session_token=keys.get("session_token"), region_name=spec.region,
        )  # fmt: skip
        return session.client("s3", endpoint_url=spec.endpoint, config=config)


class S3Ranges:
    def __init__(self, spec: S3Spec, size: int, clients: S3Clients) -> None:
        self._spec = spec
        self._size = size
        self._where = f"s3://{spec.bucket}/{spec.key}"
        self._client = clients.get(spec)

    def read_into(self, offset: int, view: memoryview, arrived: Arrived, deadline: float) -> None:
        try:
            self._read(offset, view, arrived, deadline)
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            again = status in (408, 429) or status >= 500
            raise RangeError(f"{self._where}: {error}", permanent=not again) from error
        except (BotoCoreError, HTTPClientError, OSError) as error:
            raise RangeError(f"{self._where}: {error}") from error

    def _read(self, offset: int, view: memoryview, arrived: Arrived, deadline: float) -> None:
        last = offset + len(view) - 1
        check_deadline(deadline)
        answer = self._client.get_object(Bucket=self._spec.bucket, Key=self._spec.key, Range=f"bytes={offset}-{last}")
        body = answer["Body"]
        try:
            given, wanted = answer.get("ContentRange"), f"bytes {offset}-{last}/{self._size}"
            if given != wanted:
                raise RangeError(f"{self._where}: {given!r} instead of {wanted!r}", permanent=True)
            done = 0
            while done < len(view):
                check_deadline(deadline)
                piece = body.read(min(PIECE, len(view) - done))
                if not piece:
                    raise RangeError(f"{self._where}: the answer ended at byte {offset + done}")
                view[done : done + len(piece)] = piece
                done += len(piece)
                arrived(done)
        finally:
            body.close()
