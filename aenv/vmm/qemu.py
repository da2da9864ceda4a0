"""QEMU as VMM: one `microvm` machine with a disk and a network card, with KVM or with software emulation.

Everything QEMU works on is opened here and handed over as a descriptor, so the process needs no rights to any path: it
runs as a uid that no other process has, under seccomp. The facts that shape this file are in docs/vmm.md.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aenv.errors import AenvError, ConflictError, InvalidInputError, LimitError, UnavailableError, VmmError
from aenv.vmm import mapper, qemu_command, qmp
from aenv.vmm.base import (
    MAX_EXTENTS,
    PAGE,
    Disk,
    Exit,
    Machine,
    MemoryMap,
    MemoryRegion,
    Nic,
    Vm,
    Vmm,
    VmmKind,
    VmState,
)
from aenv.vmm.qemu_command import DISK_SET, IMAGE_NODE, SERIAL_RING
from aenv.vmm.spawn import Process, User, exit_reason, find_binary, run, spawn

BINARY = "qemu-system-x86_64"
SOCKET_NAME = "qmp.sock"
LOG_NAME = "qemu.log"
STATE_MAGIC = b"QEVM"  # migration/qemu-file-types.h: the first word of every stream
STATE_LIMIT = 1 << 20  # bytes; what a pipe holds at most for an ordinary user. One vCPU needs 8 to 17 kB

# A uid for each machine, drawn at random from a range that systemd's uid table leaves unused. The first number of the
# range is their common group: it may read what QEMU opens anew by the descriptor it got.
UID_BASE = 0x7000_0000
UID_COUNT = 0x0FFF_FFFF
GROUP = UID_BASE

# Emulated: "fast string" instructions go byte by byte, and each access of the kernel to user memory ends a block of
# translated code because of SMAP. Without both, writing and reading 100 MiB in the guest takes 290 ms instead of 750.
TCG_CPU = "max,erms=off,fsrm=off,smap=off"
# Mappings that a process may have (vm.max_map_count, unless somebody has changed it), and what QEMU itself needs.
MAPPINGS_LIMIT = 65530
OWN_MAPPINGS = 1000
# A machine is idle when its process has used little CPU time from one look to the next. (The kernel adds up what
# running threads use at every tick only, of 4 ms or so; the timers of an idle guest take up to 1 ms at a time.)
QUIET_LOOK = 0.008  # seconds
QUIET_LOOKS = 6  # in a row: a program that waits for its disk is not at rest
QUIET_SHARE = 0.3  # of one CPU

_VERSION = re.compile(r"version (\d+\.\d+\.\d+)")
_HOST_ADDRESS = re.compile(r"^Host virtual address for 0x0 \(ram\) is (0x[0-9a-f]{1,16})\s*$")
_STATES = {
    "running": VmState.RUNNING,
    "paused": VmState.PAUSED,
    "prelaunch": VmState.PAUSED,
    "suspended": VmState.RUNNING,
    "io-error": VmState.IO_ERROR,
    "inmigrate": VmState.PREPARED,
}


def _new_user(kind: VmmKind) -> User | None:
    """An identity that no other process has; None when we are not root and cannot change ours."""
    if os.geteuid() != 0:
        return None
    groups = (os.stat("/dev/kvm").st_gid,) if kind is VmmKind.QEMU_KVM else ()
    return User(UID_BASE + 1 + secrets.randbelow(UID_COUNT - 1), GROUP, groups)


def _grant(fd: int, user: User | None, bits: int) -> None:
    """Let QEMU open the file behind `fd` again by `/proc/self/fd`, which checks the file's mode but no directory.

    `bits` are permission bits for "others" (4 read, 2 write); they are given to the machines' group.
    """
    status = os.fstat(fd)
    if user is None or status.st_mode & bits == bits:
        return
    if status.st_gid != user.gid:
        os.fchown(fd, -1, user.gid)
    if status.st_mode & (bits << 3) != bits << 3:
        os.fchmod(fd, (status.st_mode & 0o7777) | bits << 3)


class QemuVmm(Vmm):
    """Starts machines with the distribution's QEMU. Use `await QemuVmm.detect(kind)`."""

    def __init__(self, kind: VmmKind, *, version: str, binary: Path) -> None:
        if kind not in (VmmKind.QEMU_TCG, VmmKind.QEMU_KVM):
            raise InvalidInputError("kind", f"{kind} is not a kind of QEMU")
        self.kind = kind
        self.version = version
        self.binary = binary

    @classmethod
    async def detect(cls, kind: VmmKind) -> QemuVmm:
        """Find QEMU and ask what it can do. Raises UnavailableError when it is missing or too old."""
        binary = find_binary(BINARY)
        text = (await run([binary, "-version"])).stdout.decode(errors="replace")
        match = _VERSION.search(text)
        if match is None:
            raise UnavailableError(f"{binary} does not tell its version: {text[:200]!r}")
        version = match[1]
        if tuple(map(int, version.split("."))) < (7, 2, 0):
            raise UnavailableError(f"{binary} is version {version}", hint="7.2 or newer is needed")
        return cls(kind, version=version, binary=binary)

    @property
    def devices(self) -> str:
        return qemu_command.DEVICES

    @property
    def cpu_model(self) -> str:
        """What `-cpu` gets; a snapshot needs the same."""
        return TCG_CPU if self.kind is VmmKind.QEMU_TCG else "host"

    async def boot(self, machine: Machine, *, disk: Disk, nic: Nic | None, run_dir: Path) -> Vm:
        return await self._start(machine, disk, nic, run_dir)

    async def prepare(self, machine: Machine, *, nic: Nic | None, run_dir: Path) -> Vm:
        return await self._start(machine, None, nic, run_dir)

    async def adopt(self, pid: int, start_time: int, run_dir: Path) -> Vm:
        process = Process.adopt(pid, start_time)
        vm = QemuVm(self.kind, process, run_dir)
        try:
            await vm.connect()
            await vm.learn()
        except BaseException:
            await vm.detach()
            raise
        return vm

    async def _start(self, machine: Machine, disk: Disk | None, nic: Nic | None, run_dir: Path) -> QemuVm:
        """With a disk: cold boot. Without: wait for a device state."""
        user = _new_user(self.kind)
        size = machine.memory_mib << 20
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with ExitStack() as stack:
                inherited: dict[int, int] = {}

                def give(fd: int) -> int:
                    """The child sees it under the same number."""
                    inherited[fd] = fd
                    return fd

                def opened(path: Path) -> int:
                    fd = qemu_command.open_image(path, os.O_RDONLY)
                    stack.callback(os.close, fd)
                    return give(fd)

                monitor = stack.enter_context(qmp.bind(run_dir, SOCKET_NAME))
                maps = stack.enter_context(qmp.bind(run_dir, mapper.SOCKET_NAME, socket.SOCK_SEQPACKET))
                # The loader opens it by the descriptor: the machine's user need not reach its path.
                library = opened(mapper.LIBRARY)
                _grant(library, user, 4)
                environment = {
                    "LD_PRELOAD": f"/proc/self/fd/{library}",
                    mapper.VARIABLE: f"{give(maps.fileno())}:{library}",
                }
                arguments = qemu_command.machine_arguments(machine, self.kind, self.cpu_model, give(monitor.fileno()))
                if nic is not None:
                    arguments += qemu_command.nic_arguments(nic, give(nic.tap_fd))
                if disk is None:
                    arguments += qemu_command.waiting_arguments()
                else:
                    kernel, initrd = opened(machine.kernel), opened(machine.initrd)
                    for fd in (kernel, initrd):
                        _grant(fd, user, 4)
                    arguments += qemu_command.boot_arguments(machine, kernel, initrd)
                    (image,) = await _opened(lambda: [qemu_command.open_disk(disk)])
                    stack.callback(os.close, image)
                    arguments += qemu_command.disk_arguments(disk, give(image))
                process = spawn(
                    [self.binary, *arguments],
                    fds=inherited,
                    env=environment,
                    cwd=run_dir,
                    user=user,
                    log=run_dir / LOG_NAME,
                )
                vm = QemuVm(self.kind, process, run_dir)
            try:
                await vm.connect()
                await vm.find_memory(size)
                if disk is None:
                    await vm.expect_state()
                else:
                    vm.state = VmState.RUNNING
            except BaseException:
                await vm.kill()
                raise
        except BaseException:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
        return vm


class QemuVm(Vm):
    """One QEMU process. It is ended by us only: `exited` is set when the process is gone."""

    def __init__(self, kind: VmmKind, process: Process, run_dir: Path) -> None:
        self.kind = kind
        self.pid = process.pid
        self.start_time = process.start_time
        self.run_dir = run_dir
        self.state = VmState.PREPARED
        self.on_io_error: Callable[[str], None] | None = None
        self.exited = asyncio.get_running_loop().create_future()
        self._process = process
        self._ram: MemoryRegion | None = None
        self._mapper = mapper.Mapper(run_dir)
        self._mappings = MAPPINGS_LIMIT  # at most; counted when that is too many
        self._io_errors = 0  # so far
        self._qmp: qmp.Qmp | None = None
        self._serial = bytearray()
        self._serial_end = 0  # bytes that the guest has written, as far as we have seen
        self._reason = ""  # why we end the process, when we do
        self._ending: asyncio.Task[None] | None = None
        self._migration: asyncio.Future[None] | None = None
        process.exited.add_done_callback(self._process_exited)

    # Connection

    async def connect(self) -> None:
        """Connect to the monitor; a process that ends meanwhile gives its log as the error."""
        try:
            self._qmp = await qmp.Qmp.connect(
                self.run_dir / SOCKET_NAME, on_event=self._on_event, on_close=self._monitor_closed
            )
        except VmmError as error:
            # A process that is dying closes its sockets a moment before it is gone; how it ended says more.
            await asyncio.wait({self._process.exited}, timeout=1)
            if self._process.exited.done():
                raise VmmError(f"QEMU {exit_reason(self._process.exited.result())}: {self._log_tail()}") from error
            raise

    async def learn(self) -> None:
        """After adopt: find out the state of a process that somebody else started, and where its RAM lies."""
        status = await self._command("query-status")
        name = status.get("status") if isinstance(status, dict) else None
        if name not in _STATES:
            raise VmmError(f"QEMU {self.pid} is in state {name!r}")
        self.state = _STATES[name]
        size = await self._command("qom-get", {"path": "/objects/ram", "property": "size"})
        if not isinstance(size, int):
            raise VmmError(f"QEMU {self.pid} has {size!r} bytes of memory: it is not one of ours")
        await self._locate(size)

    async def find_memory(self, size: int) -> None:
        """After the start: find out where RAM lies, and tell the mapper."""
        self._mappings = OWN_MAPPINGS
        ram = await self._locate(size)
        try:
            await self._mapper.tell_ram(ram.address, size)
        except VmmError as error:
            # The loader only prints that it could not load a library.
            raise VmmError(f"{error.message}; QEMU said: {self._log_tail() or 'nothing'}") from error

    async def _locate(self, size: int) -> MemoryRegion:
        # RAM is one block, which begins at guest address 0, also where a hole below 4 GiB divides it for the guest.
        text = await self._command("human-monitor-command", {"command-line": "gpa2hva 0"})
        match = _HOST_ADDRESS.search(text) if isinstance(text, str) else None
        if match is None or int(match[1], 16) % PAGE:
            raise VmmError(f"gpa2hva: unexpected answer {text!r}")
        self._ram = MemoryRegion(self.pid, int(match[1], 16), 0, size)
        return self._ram

    async def expect_state(self) -> None:
        """PREPARED: have the end of `load_state` reported by an event."""
        await self._command("migrate-set-capabilities", {"capabilities": [{"capability": "events", "state": True}]})

    async def _command(
        self, command: str, arguments: dict[str, Any] | None = None, *, fd: int = -1, timeout: float = 10
    ) -> Any:
        if self._qmp is None or self.state is VmState.EXITED:
            raise VmmError(f"{command}: the machine has ended")
        return await self._qmp.execute(command, arguments, fd=fd, timeout=timeout)

    def _require(self, *states: VmState) -> None:
        if self.state not in states:
            wanted = " or ".join(s.value for s in states)
            raise ConflictError(f"the machine is {self.state.value}, not {wanted}")

    # Events

    def _on_event(self, name: str, data: dict[str, Any]) -> None:
        match name:
            case "SHUTDOWN" if data.get("guest") is True:
                self._end(f"the guest shut down ({data.get('reason', 'unknown')})")
            case "GUEST_PANICKED":
                self._end("the guest kernel panicked")
            case "BLOCK_IO_ERROR" if data.get("action") == "stop":
                self._io_error(f"{data.get('operation', 'request')}: {data.get('reason', 'failed')}")
            case "MIGRATION" if self._migration is not None and not self._migration.done():
                if data.get("status") == "completed":
                    self._migration.set_result(None)
                elif data.get("status") == "failed":
                    self._migration.set_exception(VmmError("the device state does not fit this machine"))

    def _io_error(self, what: str) -> None:
        """QEMU stops the machine in the same moment, and keeps the request. It is told once for each failed request."""
        self._io_errors += 1
        if self.state is VmState.RUNNING:
            self.state = VmState.IO_ERROR
            if self.on_io_error is not None:
                self.on_io_error(what)

    def _monitor_closed(self) -> None:
        """Without a monitor a machine is out of control and is ended."""
        self._end("the monitor connection broke", patience=1)

    def _end(self, reason: str, patience: float = 0) -> None:
        if self._ending is None and self.state is not VmState.EXITED:
            self._ending = asyncio.get_running_loop().create_task(self._end_process(reason, patience))

    async def _end_process(self, reason: str, patience: float) -> None:
        """`patience` is for a process that is dying: its sockets close a moment before it is gone, and how it ended
        says more than `reason`."""
        with contextlib.suppress(AenvError):
            await self._read_serial()
        if patience:
            await asyncio.wait({self._process.exited}, timeout=patience)
        if self._process.alive:
            self._reason = self._reason or reason
        await self._process.kill()

    def _process_exited(self, exited: asyncio.Future[int | None]) -> None:
        if exited.cancelled():
            self.exited.cancel()
            return
        self.state = VmState.EXITED
        if self._qmp is not None:
            self._qmp.close("the VMM process has ended")
        reason = self._reason
        if not reason:
            log = self._log_tail()
            reason = f"QEMU {exit_reason(exited.result())}" + (f": {log}" if log else "")
        if self._migration is not None and not self._migration.done():
            self._migration.set_exception(VmmError(reason))
        if not self.exited.done():
            self.exited.set_result(Exit(reason, self._serial_text(4096)))

    def _log_tail(self) -> str:
        try:
            return (self.run_dir / LOG_NAME).read_bytes()[-1000:].decode(errors="replace").strip()
        except OSError:
            return ""

    # Life of a machine

    async def attach_disk(self, disk: Disk) -> None:
        self._require(VmState.PREPARED)
        if disk.read_only:
            raise InvalidInputError("disk.read_only", "a prepared machine takes a writable disk")
        (fd,) = await _opened(lambda: [qemu_command.open_disk(disk)])
        try:
            node = qemu_command.device_node(IMAGE_NODE)
            # Sent in one go: QEMU answers in order, so nothing is gained by waiting in between.
            await _together(
                self._command("add-fd", {"fdset-id": DISK_SET}, fd=fd),
                self._command("blockdev-add", {**qemu_command.disk_node(disk, fd), "node-name": IMAGE_NODE}),
                self._command("blockdev-reopen", {"options": [node]}),
            )
        finally:
            os.close(fd)

    async def map_memory(self, map: MemoryMap) -> None:
        self._require(VmState.PREPARED, VmState.PAUSED)
        map.check(self._memory().length)
        self._reserve_mappings(map.count)
        files = await _opened(lambda: _open_files(map.files))
        try:
            await self._mapper.map(files, map.extents, map.count)
        finally:
            _close(files)

    def _reserve_mappings(self, count: int) -> None:
        """An extent splits the mapping it falls into. Running into the kernel's limit would leave RAM half mapped."""
        fresh = 2 * count + OWN_MAPPINGS
        if self._mappings + fresh > MAPPINGS_LIMIT:
            self._mappings = self._proc("maps").count(b"\n")
            if self._mappings + fresh > MAPPINGS_LIMIT:
                raise LimitError(f"the machine has {self._mappings} mappings already: {count} extents are too many")
        self._mappings += 2 * count

    def _proc(self, name: str) -> bytes:
        try:
            return Path(f"/proc/{self.pid}/{name}").read_bytes()
        except OSError as error:
            raise VmmError(f"cannot read the {name} of QEMU {self.pid}: {error.strerror}") from error

    async def populate(self, ranges: Sequence[tuple[int, int]]) -> None:
        size = self._memory().length
        if len(ranges) > MAX_EXTENTS:
            raise InvalidInputError("ranges", f"{len(ranges)} are more than {MAX_EXTENTS}")
        for offset, length in ranges:
            if not (0 <= offset < offset + length <= size):
                raise InvalidInputError("ranges", f"{length} bytes at {offset} are not inside {size} bytes of RAM")
        await self._mapper.populate(ranges)

    async def load_state(self, state: Path) -> None:
        self._require(VmState.PREPARED)
        fd = _state_pipe(state)
        self._migration = asyncio.get_running_loop().create_future()
        try:
            await _together(
                self._command("getfd", {"fdname": "s"}, fd=fd),
                self._command("migrate-incoming", {"uri": "fd:s"}),
            )
            async with asyncio.timeout(20):
                await self._migration
        except TimeoutError:
            raise VmmError(f"QEMU did not load the device state {state} within 20 s") from None
        finally:
            os.close(fd)
            self._migration = None
        self.state = VmState.PAUSED

    async def quiet(self, patience: float) -> bool:
        loop = asyncio.get_running_loop()
        now, used, looks = loop.time(), self._process.cpu_time(), 0
        deadline = now + patience
        while looks < QUIET_LOOKS and now < deadline and self.state is VmState.RUNNING:
            # Nothing tells when a process has nothing to do, so we look at what CPU time it has used.
            await asyncio.sleep(QUIET_LOOK)
            began, before = now, used
            now, used = loop.time(), self._process.cpu_time()
            looks = looks + 1 if (used - before) / 1e9 < QUIET_SHARE * (now - began) else 0
        return looks == QUIET_LOOKS or self.state is not VmState.RUNNING

    async def pause(self) -> None:
        self._require(VmState.RUNNING, VmState.PAUSED, VmState.IO_ERROR)
        if self.state is not VmState.PAUSED:
            # Drains and flushes the disk: what the guest has written may have to reach a slow disk.
            await self._command("stop", timeout=120)
            self.state = VmState.PAUSED

    async def resume(self) -> None:
        self._require(VmState.PAUSED, VmState.RUNNING, VmState.IO_ERROR)
        before, errors = self.state, self._io_errors
        # Set before the command is sent: a disk that still fails may be told in the same breath as the answer.
        self.state = VmState.RUNNING
        try:
            await self._command("cont")
        except VmmError:
            if self.state is VmState.RUNNING and self._io_errors == errors:
                self.state = before
            raise

    async def save_state(self, state: Path) -> None:
        self._require(VmState.PAUSED)
        # QEMU's open of /dev/fdset/N takes only a descriptor of exactly the mode it asks for.
        fd = os.open(state, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            added = await self._command("add-fd", fd=fd)
            number = added.get("fdset-id") if isinstance(added, dict) else None
            if not isinstance(number, int):
                raise VmmError(f"add-fd: unexpected answer {added!r}")
            try:
                # live=false keeps the disk active: the machine may go on.
                await self._command(
                    "xen-save-devices-state", {"filename": f"/dev/fdset/{number}", "live": False}, timeout=60
                )
            finally:
                await self._command("remove-fd", {"fdset-id": number})
            if os.fstat(fd).st_size == 0:
                raise VmmError("QEMU saved an empty device state")
        except BaseException:
            state.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    async def memory_regions(self) -> list[MemoryRegion]:
        return [self._memory()]

    def _memory(self) -> MemoryRegion:
        if self._ram is None or self.state is VmState.EXITED:
            raise VmmError("the machine has ended")
        return self._ram

    async def _read_serial(self) -> None:
        """Move what the ring has into `_serial`: reading empties it."""
        if self._qmp is None:
            return
        arguments = {"device": "serial", "size": SERIAL_RING, "format": "base64"}
        text: str = await self._qmp.query("ringbuf-read", str, arguments)
        try:
            fresh = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise VmmError(f"ringbuf-read: {error}") from error
        self._serial += fresh
        self._serial_end += len(fresh)
        del self._serial[:-SERIAL_RING]

    def _serial_text(self, limit: int) -> str:
        return bytes(self._serial[-limit:]).decode(errors="replace") if limit > 0 else ""

    async def serial_tail(self, limit: int = 4096) -> str:
        if self.state is not VmState.EXITED:
            await self._read_serial()
        return self._serial_text(limit)

    async def serial_since(self, position: int) -> tuple[bytes, int]:
        if self._qmp is not None and self.state is not VmState.EXITED:
            await self._read_serial()
        kept = max(0, min(self._serial_end - position, len(self._serial)))
        return bytes(self._serial[len(self._serial) - kept :]), self._serial_end

    async def kill(self) -> None:
        if self._process.alive:
            self._reason = self._reason or "killed"
        await self._process.kill()
        if self._ending is not None:
            await self._ending
        shutil.rmtree(self.run_dir, ignore_errors=True)

    async def detach(self) -> None:
        if self._ending is not None:
            await self._ending
        if self._qmp is not None:
            self._qmp.close()
        if self._process.alive:
            self._process.detach()


def _state_pipe(state: Path) -> int:
    """The reading end of a pipe that holds a device state, and ends after it. (QEMU 9 and newer warn of files.)"""
    fd = qemu_command.open_image(state, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size > STATE_LIMIT:
            raise VmmError(f"{state} is larger than {STATE_LIMIT} bytes: it is no device state")
        content = os.read(fd, STATE_LIMIT)
    finally:
        os.close(fd)
    if not content.startswith(STATE_MAGIC):
        raise VmmError(f"{state} is no device state of QEMU")
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(writer, False)
        if len(content) > fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, len(content))
        written = os.write(writer, content)
    except OSError as error:
        os.close(reader)
        raise VmmError(f"cannot hand over {state}: {error.strerror}") from error
    finally:
        os.close(writer)
    if written != len(content):
        os.close(reader)
        raise VmmError(f"cannot hand over {state}: the pipe took {written} of {len(content)} bytes")
    return reader


async def _opened(opener: Callable[[], list[int]]) -> list[int]:
    """Run what opens files, in a thread of its own: it may wait for a server that waits for us, and must not hold up a
    shared one. What comes when nobody waits any more is closed."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[int]] = loop.create_future()

    def deliver(files: list[int], error: Exception | None) -> None:
        if future.cancelled():
            _close(files)
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(files)

    def work() -> None:
        files: list[int] = []
        error = None
        try:
            files = opener()
        except Exception as problem:
            error = problem
        try:
            loop.call_soon_threadsafe(deliver, files, error)
        except RuntimeError:  # the loop has been closed
            _close(files)

    threading.Thread(target=work, name="open", daemon=True).start()
    return await future


def _open_files(paths: Sequence[Path]) -> list[int]:
    files: list[int] = []
    try:
        for path in paths:
            files.append(qemu_command.open_image(path, os.O_RDONLY))
    except BaseException:
        _close(files)
        raise
    return files


def _close(files: Sequence[int]) -> None:
    for fd in files:
        os.close(fd)


async def _together(*commands: Any) -> None:
    """Run commands that were sent back to back; the first error in their order is raised when all have answered."""
    for result in await asyncio.gather(*commands, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
