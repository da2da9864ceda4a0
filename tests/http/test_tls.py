"""TLS with a development certificate: names, versions, ALPN, files."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import InvalidInputError, NotFoundError
from aenv.http.devcert import DevCert, make_dev_cert
from aenv.http.message import HttpError, Request, Response, UpgradeResponse
from aenv.http.server import Limits, Server
from aenv.http.stream import Stream, StreamClosedError
from aenv.http.tls import server_context
from tests.http.support import Raw, run


@pytest.fixture(scope="module")
def cert(tmp_path_factory: pytest.TempPathFactory) -> DevCert:
    return make_dev_cert("e2b.test", tmp_path_factory.mktemp("cert"))


def client_context(cert: DevCert, *alpn: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(cert.ca))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


async def scheme(request: Request) -> Response:
    return Response(200, f"{request.scheme} {request.headers.get('host')} {len(await request.read(1 << 23))}".encode())


@pytest.mark.parametrize("name", ["e2b.test", "api.e2b.test", "49983-iabc.e2b.test", "localhost", "127.0.0.1", "::1"])
def test_names_of_the_certificate(both: Any, cert: DevCert, name: str) -> None:
    async def main() -> None:
        server = await Server.start(scheme, ssl=server_context(cert.cert, cert.key))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=client_context(cert, "h2", "http/1.1"), server_hostname=name
        )
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        raw = Raw(reader, writer)
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n" + bytes(3_000_000))
            assert (await raw.answer())[2] == b"https x 3000000"
        writer.close()
        await server.close(1)

    both(main())


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_a_stream_that_breaks_off_ends_with_a_reset(both: Any, cert: DevCert, secure: bool) -> None:
    """A client that only saw the end of the connection would blame the protocol, not the network."""

    async def main() -> None:
        seen = asyncio.Event()

        async def broken() -> AsyncIterator[bytes]:
            yield b"0123456789"
            await seen.wait()
            raise NotFoundError("the sandbox is gone")

        async def handler(_request: Request) -> Response:
            return Response(200, broken())

        server = await Server.start(handler, ssl=server_context(cert.cert, cert.key) if secure else None)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=client_context(cert) if secure else None
        )
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"0123456789")
        seen.set()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        await server.close(1)

    both(main())


@pytest.mark.parametrize("name", ["other.test", "a.b.e2b.test"])
def test_other_names_are_refused(cert: DevCert, name: str) -> None:
    async def main() -> None:
        server = await Server.start(scheme, ssl=server_context(cert.cert, cert.key))
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=client_context(cert), server_hostname=name)
        await server.close(1)

    run(main())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_and_other_protocols_are_refused(cert: DevCert) -> None:
    async def main() -> None:
        server = await Server.start(scheme, ssl=server_context(cert.cert, cert.key))
        old = client_context(cert)
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        for context in (old, client_context(cert, "h2")):
            try:
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", server.port, ssl=context, server_hostname="e2b.test"
                )
            except (ssl.SSLError, ConnectionError):
                continue
            assert context is not old
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # clear text on the TLS port
        assert b"HTTP" not in await reader.read()
        writer.close()
        await server.close(1)

    run(main())


async def tls_client(server: Server, cert: DevCert) -> Raw:
    return Raw(
        *await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=client_context(cert, "http/1.1"), server_hostname="e2b.test"
        )
    )


@pytest.mark.parametrize("how", ["client closes", "client aborts", "server returns"])
def test_upgrade_over_tls(both: Any, cert: DevCert, how: str) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def handler(request: Request) -> Response:
            return UpgradeResponse([], echo)

        async def echo(stream: Stream) -> None:
            try:
                while (data := await stream.read()) not in (b"", b"quit"):
                    stream.write(data)
                    await stream.drain()
            except StreamClosedError:
                pass
            ended.set()

        server = await Server.start(handler, ssl=server_context(cert.cert, cert.key))
        raw = await tls_client(server, cert)
        await raw.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: raw\r\n\r\nearly")
        assert (await raw.head())[0] == 101
        assert await raw.reader.readexactly(5) == b"early"
        if how == "server returns":
            await raw.send(b"quit")
            assert await raw.ends() == b""
        elif how == "client aborts":
            raw.writer.transport.abort()
        raw.writer.close()
        await ended.wait()
        await server.close(1)
        assert not server.connections

    both(main())


def test_refused_upload_over_tls_still_sees_the_answer(both: Any, cert: DevCert) -> None:
    async def refuse(request: Request) -> Response:
        raise HttpError(401, "no")

    async def main() -> None:
        server = await Server.start(refuse, ssl=server_context(cert.cert, cert.key), limits=Limits(linger_timeout=0.2))
        raw = await tls_client(server, cert)
        raw.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n" + bytes(1_000_000))
        assert (await raw.answer())[0] == 401
        assert await raw.ends() == b""
        raw.writer.close()
        await server.close(1)

    both(main())


def test_stream_over_tls_stops_when_the_client_goes(both: Any, cert: DevCert) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def forever() -> AsyncIterator[bytes]:
            try:
                yield b"first"
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def handler(request: Request) -> Response:
            return Response(200, forever())

        server = await Server.start(handler, ssl=server_context(cert.cert, cert.key))
        raw = await tls_client(server, cert)
        await raw.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await raw.reader.readuntil(b"first")
        raw.writer.close()
        await ended.wait()
        await server.close(1)

    both(main())


def test_files(tmp_path: Path) -> None:
    first = make_dev_cert("e2b.test", tmp_path / "new" / "dir")
    assert {p.name: p.stat().st_mode & 0o777 for p in first.ca.parent.iterdir()} == {
        "ca.pem": 0o644, "cert.pem": 0o644, "key.pem": 0o600
    }  # fmt: skip
    before = first.key.read_bytes()
    first.key.chmod(0o644)
    second = make_dev_cert("e2b.test", tmp_path / "new" / "dir")
    assert second.key.read_bytes() != before
    assert second.key.stat().st_mode & 0o777 == 0o600
    server_context(second.cert, second.key)


def test_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("keep")
    (tmp_path / "key.pem").symlink_to(tmp_path / "elsewhere")
    assert not make_dev_cert("e2b.test", tmp_path).key.is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "keep"


@pytest.mark.parametrize(
    "domain", ["", "E2B.test", "a..b", "-a.b", "a.b:8443", "*.a", "a/b", "a" * 64, "ab." * 90 + "c", "a\n"]
)
def test_bad_domains_are_refused(tmp_path: Path, domain: str) -> None:
    with pytest.raises(InvalidInputError, match="domain"):
        make_dev_cert(domain, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, cert: DevCert) -> None:
    other = make_dev_cert("other.test", tmp_path)
    (tmp_path / "junk").write_text("junk")
    junk, missing = tmp_path / "junk", tmp_path / "missing"
    for cert_file, key_file in ((cert.cert, other.key), (junk, other.key), (missing, other.key), (cert.cert, missing)):
        with pytest.raises(InvalidInputError):
            server_context(cert_file, key_file)
