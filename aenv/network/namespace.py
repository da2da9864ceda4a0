"""Network namespaces: make, remove, list, and enter them.

A namespace is kept alive by a bind mount of its `ns/net` file under `/run/netns`, as iproute2 does it (ip-netns(8)), so
`ip netns` lists ours and it survives the daemon. Entering is per thread (setns(2)): everything here that enters a
namespace is synchronous, because a task switch inside would run other tasks in the wrong network.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from aenv.errors import NotFoundError, UnavailableError

T = TypeVar("T")

NETNS_DIRECTORY = Path("/run/netns")
CURRENT = "/proc/thread-self/ns/net"

_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 4096, 16384, 1 << 20
_MNT_DETACH = 2
_TAG_DIGITS = 6

# PyDLL keeps the GIL: setns takes microseconds, and giving the GIL away could stretch a hop by a switch interval.
_libc = ctypes.PyDLL(None, use_errno=True)


def namespace_name(tag: str, index: int) -> str:
    return f"aenv-{tag}-{index}"


def list_indices(tag: str) -> list[int]:
    """Indices of this tag's namespaces that exist on the machine, also those an earlier daemon left."""
    pattern = re.compile(rf"aenv-{re.escape(tag)}-(0|[1-9][0-9]{{0,8}})")
    try:
        names = os.listdir(NETNS_DIRECTORY)
    except FileNotFoundError:
        return []
    return sorted(int(m[1]) for m in map(pattern.fullmatch, names) if m)


def create(name: str) -> None:
    """Make the namespace `name`. The calling thread is in its own namespace again when this returns.

    Raises UnavailableError (no permission, or the name is taken).
    """
    _share_directory()
    path = NETNS_DIRECTORY / name
    with ExitStack() as undo:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o444))
        except FileExistsError as error:
            raise UnavailableError(f"network namespace {name} exists already") from error
        undo.callback(path.unlink)
        with _returning():
            _call("unshare", _CLONE_NEWNET)
            _mount(CURRENT, path, _MS_BIND)
        undo.pop_all()


def delete(name: str) -> None:
    """Remove the name; the kernel frees the namespace once nothing uses it. No-op when there is no such name."""
    path = NETNS_DIRECTORY / name
    # EINVAL: a file without a mount, left by a daemon that died between the two steps of create().
    if _libc.umount2(os.fsencode(path), _MNT_DETACH) != 0 and ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
        raise _failure("umount2")
    path.unlink(missing_ok=True)


def open_handle(name: str) -> int:
    """A file descriptor of the namespace (the caller closes it). Raises NotFoundError.

    A plain file that is no namespace counts as not found: setns would refuse it.
    """
    path = NETNS_DIRECTORY / name
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no network namespace {name}") from error
    if not os.readlink(f"/proc/self/fd/{handle}").startswith(("net:", str(path))) or os.fstat(handle).st_size:
        os.close(handle)
        raise NotFoundError(f"{path} is not a network namespace")
    if not os.path.ismount(path) and os.fstat(handle).st_dev == os.stat(NETNS_DIRECTORY).st_dev:
        os.close(handle)
        raise NotFoundError(f"{path} is not a network namespace")
    return handle


def open_current() -> int:
    """A file descriptor of the calling thread's namespace (the caller closes it)."""
    return os.open(CURRENT, os.O_RDONLY | os.O_CLOEXEC)


def open_in(handle: int, action: Callable[[], T]) -> T:
    """Run `action` with the calling thread inside the namespace `handle`; meant for opening sockets and devices.

    Two setns calls, some microseconds. `action` must be short and must not await: other tasks of this thread would run
    in the sandbox's network. Raises OSError, and what `action` raises.
    """
    with entered(handle):
        return action()


@contextmanager
def entered(handle: int) -> Iterator[None]:
    """The calling thread is inside the namespace `handle` for the length of the block. Never await in the block."""
    with _returning():
        _call("setns", handle, _CLONE_NEWNET)
        yield


@contextmanager
def fresh() -> Iterator[None]:
    """The calling thread is inside a new namespace without a name, which is gone after the block. For trials."""
    with _returning():
        _call("unshare", _CLONE_NEWNET)
        yield


@contextmanager
def _returning() -> Iterator[None]:
    """Bring the thread back to the namespace it came from, whatever happens in the block."""
    home = open_current()
    try:
        yield
    finally:
        if _libc.setns(home, _CLONE_NEWNET) != 0:
            # Going on would be worse than dying: this thread would open the daemon's own sockets (API, registry,
            # other guests) inside a sandbox's network, where the guest can see and answer them. An exception could
            # be caught somewhere; abort cannot. VMs outlive the daemon, and the next start adopts them.
            os.write(2, b"aenv: cannot leave a sandbox's network namespace; aborting\n")
            os.abort()
        os.close(home)


def _share_directory() -> None:
    """Make `/run/netns` a shared mount, so a namespace removed here is also gone in other mount namespaces.

    Without it a mount namespace made in between keeps every namespace alive for ever (same steps as ip-netns(8)).
    """
    NETNS_DIRECTORY.mkdir(mode=0o755, parents=True, exist_ok=True)
    if _libc.mount(b"", os.fsencode(NETNS_DIRECTORY), b"none", _MS_SHARED | _MS_REC, None) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:  # EINVAL: not a mount point yet
        raise _failure("mount")
    _mount(str(NETNS_DIRECTORY), NETNS_DIRECTORY, _MS_BIND | _MS_REC)
    _mount("", NETNS_DIRECTORY, _MS_SHARED | _MS_REC)


def _mount(source: str, target: Path, flags: int) -> None:
    if _libc.mount(os.fsencode(source), os.fsencode(target), b"none", ctypes.c_ulong(flags), None) != 0:
        raise _failure("mount")


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise _failure(name)


def _failure(call: str) -> UnavailableError:
    number = ctypes.get_errno()
    hint = "network namespaces need root (CAP_SYS_ADMIN and CAP_NET_ADMIN)" if number == errno.EPERM else None
    return UnavailableError(f"network namespace: {call}: {os.strerror(number)}", hint=hint)
