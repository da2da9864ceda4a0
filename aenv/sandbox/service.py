"""What the control plane asks of the sandbox life cycle: plain data and one protocol. No logic, no HTTP.

Times are aware UTC datetimes, sizes MiB, durations whole seconds. Errors are those of `aenv.errors`: a method raises
`NotFoundError` for a sandbox or template that does not exist (any more), `ConflictError` for a state that does not
allow the call, `LimitError` at a configured limit, `UnavailableError` when this host cannot do it, and `GuestError` or
`VmmError` when it was tried and failed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from aenv.errors import AenvError
from aenv.observe.logs import LogEntry, LogQuery
from aenv.observe.metrics import MetricPoint

ALL_IPV4 = "0.0.0.0/0"
ALL_IPV6 = "::/0"


class SandboxState(enum.StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    KILLING = "killing"
    GONE = "gone"
    FAILED = "failed"


class OnTimeout(enum.StrEnum):
    """What happens to a sandbox when its time is over."""

    KILL = "kill"
    PAUSE = "pause"


class PauseMode(enum.StrEnum):
    """What the last pause kept."""

    FULL = "full"  # memory and file system
    FILESYSTEM = "filesystem"  # file system only; resuming is a cold boot


@dataclass(frozen=True, slots=True)
class EgressProxy:
    """A SOCKS5 proxy that all TCP of a sandbox goes through. `address` is host:port."""

    address: str
    username: str = ""
    password: str = ""


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Who may talk to whom. The strings are validated and kept as the user wrote them.

    `allow_out` holds addresses, CIDRs, domains and `*.domain`; `deny_out` addresses and CIDRs (host bits may be set).
    `rules` maps a lower-case domain to headers for its requests. `dns_servers` is None for the default servers.
    """

    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    allow_internet_access: bool | None = None
    rules: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    egress_proxy: EgressProxy | None = None
    dns_servers: tuple[str, ...] | None = None
    allow_public_traffic: bool = True
    mask_request_host: str | None = None
    https_ports: tuple[int, ...] = ()

    @property
    def internet(self) -> bool:
        """False when only `allow_out` may be reached. Denying all of IPv4 means IPv6 too: E2B has no other word."""
        return self.allow_internet_access is not False and ALL_IPV4 not in self.deny_out


@dataclass(frozen=True, slots=True)
class CreateOptions:
    """Everything a client can say about a new sandbox. `template` is an id, a name or `name:tag`."""

    template: str
    timeout: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    secure: bool = True
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False
    pause_memory: bool = True  # False: an automatic pause keeps only the file system
    network: NetworkOptions = field(default_factory=NetworkOptions)


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox at one moment. `envd_token` is None when anyone who can reach the agent may use it; `traffic_token`
    is None when its ports are public; `domain` is None when the server has no domain of its own."""

    id: str
    template_id: str
    client_id: str
    envd_version: str
    started_at: datetime
    end_at: datetime
    state: SandboxState
    cpu_count: int
    memory_mib: int
    disk_mib: int
    alias: str | None = None
    envd_token: str | None = None
    traffic_token: str | None = None
    domain: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False
    pause_mode: PauseMode | None = None  # of a paused sandbox


class BuildStatus(enum.StrEnum):
    WAITING = "waiting"
    BUILDING = "building"
    READY = "ready"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """A template. `build_id` is the UUID of its last build; `names` are what `create` accepts beside the id."""

    id: str
    build_id: str
    names: tuple[str, ...]
    cpu_count: int
    memory_mib: int
    disk_mib: int
    created_at: datetime
    updated_at: datetime
    envd_version: str
    status: BuildStatus = BuildStatus.READY
    public: bool = False
    spawn_count: int = 0
    build_count: int = 1
    last_spawned_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot: state of a sandbox from which others are created. `names` are `name` or `name:tag`, like those of
    templates; `parent_id` is the template or snapshot it holds the changes to; `memory` is False when only the file
    system was kept, and a sandbox from it boots. Bytes are those of layers that no older template or snapshot has."""

    id: str
    names: tuple[str, ...]
    sandbox_id: str
    parent_id: str
    created_at: datetime
    cpu_count: int
    memory_mib: int
    disk_mib: int
    memory: bool
    memory_bytes: int
    disk_bytes: int


class NodeKind(enum.StrEnum):
    TEMPLATE = "template"
    SNAPSHOT = "snapshot"
    SANDBOX = "sandbox"


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One node of the family tree. `parent_id` is None for templates. `memory_bytes` and `disk_bytes` are the
    layers that no node before it has; `resident_bytes` is the PSS of a running sandbox's VMM and `private_bytes` what
    its guest has written of its RAM since it was mapped, None for everything that does not run."""

    kind: NodeKind
    id: str
    parent_id: str | None
    names: tuple[str, ...]
    created_at: datetime
    state: SandboxState | None  # of a sandbox
    memory_bytes: int
    disk_bytes: int
    resident_bytes: int | None = None
    private_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ForkFailure:
    """Why one child of a fork was not started."""

    error: AenvError


class SandboxService(Protocol):
    """The life cycle of sandboxes, as the API and the command line see it.

    An operation that has begun runs to its end even when the caller is cancelled.
    """

    async def create(self, options: CreateOptions) -> SandboxInfo:
        """Start a sandbox and wait until its agent is initialised. Raises `NotFoundError` for an unknown template,
        `InvalidInputError` for network options this host cannot enforce."""
        ...

    async def get(self, sandbox_id: str) -> SandboxInfo: ...

    async def sandboxes(self) -> Sequence[SandboxInfo]:
        """All that are not gone, in any order."""
        ...

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox in whatever state it is, paused ones too, and wait until it is gone."""
        ...

    async def pause(self, sandbox_id: str, *, memory: bool = True, require_healthy: bool = False) -> None:
        """Raises `ConflictError` when it is paused already, `UnavailableError` when `require_healthy` and the guest's
        agent does not answer."""
        ...

    async def connect(self, sandbox_id: str, timeout: int, *, memory: bool = True) -> tuple[SandboxInfo, bool]:
        """Resume if paused (waiting for a pause under way) and make the time left at least `timeout`. The flag says
        whether it was resumed. `memory=False` boots from the disk."""
        ...

    async def resume(
        self, sandbox_id: str, timeout: int, *, on_timeout: OnTimeout | None = None, memory: bool = True
    ) -> SandboxInfo:
        """Raises `ConflictError` when it is running. `on_timeout=None` keeps what was set."""
        ...

    async def set_timeout(self, sandbox_id: str, timeout: int) -> None:
        """Let the time end `timeout` seconds from now: shorter or longer; 0 is at once."""
        ...

    async def refresh(self, sandbox_id: str, duration: int) -> None:
        """Make the time left at least `duration`; never shorter than it is."""
        ...

    async def set_network(self, sandbox_id: str, network: NetworkOptions) -> None:
        """Replace the egress rules in one step (`allow_out`, `deny_out`, `allow_internet_access`, `rules`,
        `egress_proxy`, `dns_servers`); the other fields of `network` are to be ignored."""
        ...

    async def metrics(self, sandbox_id: str, start: datetime | None, end: datetime | None) -> Sequence[MetricPoint]:
        """Samples in a window, both ends inclusive, oldest first."""
        ...

    async def latest_metric(self, sandbox_id: str) -> MetricPoint | None: ...

    async def logs(self, sandbox_id: str, query: LogQuery) -> Sequence[LogEntry]: ...

    async def templates(self) -> Sequence[TemplateInfo]: ...

    async def template(self, name: str) -> TemplateInfo:
        """By id, name or `name:tag`."""
        ...

    async def delete_template(self, name: str) -> None:
        """Raises `ConflictError` while something still needs it."""
        ...

    async def snapshot(self, sandbox_id: str, *, name: str | None = None, memory: bool = True) -> SnapshotInfo:
        """Capture a running sandbox, which goes on. `name` may have a tag; a name that is taken leads to the new
        snapshot from now on, unless a template has it (ConflictError). A paused sandbox gives its pause as a snapshot.
        `memory=False` keeps the file system only."""
        ...

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        """All snapshots, newest first. They are deleted by `delete_template`."""
        ...

    async def fork(self, sandbox_id: str, count: int, timeout: int) -> Sequence[SandboxInfo | ForkFailure]:
        """Capture a running sandbox once and start `count` children from it, each with `timeout` seconds and the
        source's options. Raises LimitError above the configured limit, ConflictError when it is paused, and what a
        capture raises; a child that fails is an entry of the answer."""
        ...

    async def rollback(self, sandbox_id: str, snapshot: str) -> SandboxInfo:
        """Take a running or paused sandbox back to a snapshot that was made of it, or that it was made from: same id,
        token and address. `snapshot` is an id or a name. What has happened since is lost. Raises ConflictError for a
        snapshot of another sandbox."""
        ...

    async def tree(self) -> Sequence[TreeNode]:
        """Templates, snapshots and sandboxes, with what each costs; parents before children."""
        ...
