"""Bodies of the E2B control plane, with the exact JSON names.

Requests ignore unknown fields; a `null` means the same as leaving a field out. In answers a field that is None is left
out. Values are checked in `aenv.api.validate`; here are only the shapes.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec import Struct, field, json

from aenv.api.names import full_names, snapshot_id
from aenv.observe.logs import LogEntry
from aenv.observe.metrics import MetricPoint
from aenv.sandbox.service import NetworkOptions, SandboxInfo, SandboxState, SnapshotInfo, TemplateInfo, TreeNode

# --- requests ---------------------------------------------------------------------------------------------------------


class AutoResume(Struct):
    enabled: bool | None = None


class TransformBody(Struct):
    headers: dict[str, str] | None = None


class RuleBody(Struct, omit_defaults=True):
    transform: TransformBody | None = None


class ProxyTlsBody(Struct):
    enabled: bool


class EgressProxyBody(Struct, omit_defaults=True):
    address: str
    username: str | None = None
    password: str | None = None
    tls: ProxyTlsBody | None = None


class EgressBody(Struct, rename="camel", omit_defaults=True):
    """`PUT /sandboxes/{id}/network`, and the part of `network` at create that it may replace later."""

    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    rules: dict[str, list[RuleBody]] | None = None
    egress_proxy: EgressProxyBody | None = None
    dns_servers: list[str] | None = None


class NetworkUpdateBody(EgressBody, rename="camel"):
    allow_internet_access: bool | None = field(default=None, name="allow_internet_access")


class NetworkBody(EgressBody, rename="camel", omit_defaults=True):
    """`network` of a create request and of a sandbox's details."""

    allow_public_traffic: bool | None = None
    mask_request_host: str | None = None
    https_ports: list[int] | None = None

    @classmethod
    def of(cls, options: NetworkOptions) -> NetworkBody:
        """For an answer. The proxy's password is never told."""
        proxy = options.egress_proxy
        return cls(
            allow_out=list(options.allow_out) or None,
            deny_out=list(options.deny_out) or None,
            rules={name: [RuleBody(TransformBody(dict(headers)))] for name, headers in options.rules.items()} or None,
            egress_proxy=None if proxy is None else EgressProxyBody(proxy.address, proxy.username or None),
            dns_servers=None if options.dns_servers is None else list(options.dns_servers),
            allow_public_traffic=options.allow_public_traffic,
            mask_request_host=options.mask_request_host,
            https_ports=list(options.https_ports) or None,
        )


class IamToken(Struct, rename="camel"):
    audience: str
    token_type: str


class IamBody(Struct):
    tokens: dict[str, IamToken] | None = None


class VolumeMount(Struct):
    name: str
    path: str


class NewSandbox(Struct, rename="camel"):
    """`POST /sandboxes` and `POST /v2/sandboxes`."""

    template_id: str = field(name="templateID")
    timeout: int | None = None
    auto_pause: bool | None = None
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    secure: bool | None = None
    allow_internet_access: bool | None = field(default=None, name="allow_internet_access")
    network: NetworkBody | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: IamBody | None = None
    volume_mounts: list[VolumeMount] | None = None


class ConnectBody(Struct):
    """`timeout` may be left out in the second generation only."""

    timeout: int | None = None
    memory: bool | None = None


class ResumeBody(Struct, rename="camel"):
    timeout: int | None = None
    auto_pause: bool | None = None
    memory: bool | None = None


class PauseBody(Struct, rename="camel"):
    memory: bool | None = None
    require_healthy_guest: bool | None = None


class TimeoutBody(Struct):
    timeout: int


class RefreshBody(Struct):
    duration: int | None = None


class SnapshotRequest(Struct):
    name: str | None = None
    memory: bool | None = None


class ForkBody(Struct):
    timeout: int | None = None
    count: int | None = None


class RollbackBody(Struct):
    snapshot_id: str = field(name="snapshotID")


# --- answers ----------------------------------------------------------------------------------------------------------

# What a client sees of a state. While it is being paused or resumed a sandbox answers nobody, so it counts as paused;
# during a snapshot or a fork it stays reachable.
PUBLIC_STATE = {
    SandboxState.STARTING: "running",
    SandboxState.RUNNING: "running",
    SandboxState.SNAPSHOTTING: "running",
    SandboxState.FORKING: "running",
    SandboxState.PAUSING: "paused",
    SandboxState.PAUSED: "paused",
    SandboxState.RESUMING: "paused",
}


class ErrorBody(Struct, omit_defaults=True):
    code: int
    message: str
    error_code: str | None = None


class SandboxBody(Struct, rename="camel", omit_defaults=True):
    """Answer to create, connect and resume."""

    template_id: str = field(name="templateID")
    sandbox_id: str = field(name="sandboxID")
    client_id: str = field(name="clientID")
    envd_version: str
    alias: str | None = None
    envd_access_token: str | None = None
    traffic_access_token: str | None = None
    domain: str | None = None

    @classmethod
    def of(cls, info: SandboxInfo) -> SandboxBody:
        return cls(
            template_id=info.template_id,
            sandbox_id=info.id,
            client_id=info.client_id,
            envd_version=info.envd_version,
            alias=info.alias,
            envd_access_token=info.envd_token,
            traffic_access_token=info.traffic_token,
            domain=info.domain,
        )


class ForkResult(Struct, omit_defaults=True):
    """One child of a fork: exactly one of the two."""

    sandbox: SandboxBody | None = None
    error: ErrorBody | None = None


class ListedSandbox(Struct, rename="camel", omit_defaults=True):
    template_id: str = field(name="templateID")
    sandbox_id: str = field(name="sandboxID")
    client_id: str = field(name="clientID")
    started_at: datetime
    end_at: datetime
    cpu_count: int
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    state: str
    envd_version: str
    metadata: dict[str, str]
    alias: str | None = None

    @classmethod
    def of(cls, info: SandboxInfo) -> ListedSandbox:
        return cls(
            template_id=info.template_id,
            sandbox_id=info.id,
            client_id=info.client_id,
            started_at=info.started_at,
            end_at=info.end_at,
            cpu_count=info.cpu_count,
            memory_mb=info.memory_mib,
            disk_size_mb=info.disk_mib,
            state=PUBLIC_STATE[info.state],
            envd_version=info.envd_version,
            metadata=dict(info.metadata),
            alias=info.alias,
        )


class LifecycleBody(Struct, rename="camel"):
    auto_resume: bool
    on_timeout: str


class SandboxDetail(Struct, rename="camel", omit_defaults=True):
    template_id: str = field(name="templateID")
    sandbox_id: str = field(name="sandboxID")
    client_id: str = field(name="clientID")
    started_at: datetime
    end_at: datetime
    envd_version: str
    cpu_count: int
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    state: str
    metadata: dict[str, str]
    network: NetworkBody
    lifecycle: LifecycleBody
    alias: str | None = None
    envd_access_token: str | None = None
    allow_internet_access: bool | None = None
    domain: str | None = None
    pause_mode: str | None = None

    @classmethod
    def of(cls, info: SandboxInfo) -> SandboxDetail:
        paused = info.state is SandboxState.PAUSED
        return cls(
            template_id=info.template_id,
            sandbox_id=info.id,
            client_id=info.client_id,
            started_at=info.started_at,
            end_at=info.end_at,
            envd_version=info.envd_version,
            cpu_count=info.cpu_count,
            memory_mb=info.memory_mib,
            disk_size_mb=info.disk_mib,
            state=PUBLIC_STATE[info.state],
            metadata=dict(info.metadata),
            network=NetworkBody.of(info.network),
            lifecycle=LifecycleBody(auto_resume=info.auto_resume, on_timeout=info.on_timeout.value),
            alias=info.alias,
            envd_access_token=info.envd_token,
            allow_internet_access=info.network.allow_internet_access,
            domain=info.domain,
            pause_mode=info.pause_mode.value if paused and info.pause_mode is not None else None,
        )


class MetricBody(Struct, rename="camel"):
    timestamp: datetime
    timestamp_unix: int
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int

    @classmethod
    def of(cls, point: MetricPoint) -> MetricBody:
        return cls(
            timestamp=point.timestamp,
            timestamp_unix=int(point.timestamp.timestamp()),
            cpu_count=point.cpu_count,
            cpu_used_pct=point.cpu_used_pct,
            mem_used=point.mem_used,
            mem_total=point.mem_total,
            mem_cache=point.mem_cache,
            disk_used=point.disk_used,
            disk_total=point.disk_total,
        )


class MetricsBySandbox(Struct):
    sandboxes: dict[str, MetricBody]


class LogLine(Struct):
    """`line` is itself a JSON object: E2B's command line parses it and needs `level` and `logger` in there."""

    timestamp: datetime
    line: str

    @classmethod
    def of(cls, entry: LogEntry) -> LogLine:
        fields = dict(entry.fields)
        logger = fields.pop("source", "")
        line = fields | {"logger": logger, "level": entry.level.value, "message": entry.message}
        return cls(entry.timestamp, json.encode(line).decode())


class LogEntryBody(Struct):
    timestamp: datetime
    message: str
    level: str
    fields: dict[str, str]

    @classmethod
    def of(cls, entry: LogEntry) -> LogEntryBody:
        return cls(entry.timestamp, entry.message, entry.level.value, dict(entry.fields))


class LogsBody(Struct, rename="camel"):
    """First generation: the same lines twice, as text and with their fields."""

    logs: list[LogLine]
    log_entries: list[LogEntryBody]


class LogsV2Body(Struct):
    logs: list[LogEntryBody]


class TemplateBody(Struct, rename="camel", kw_only=True):
    """All fields are required by the SDKs' parsers; `createdBy` and `lastSpawnedAt` may be null."""

    template_id: str = field(name="templateID")
    build_id: str = field(name="buildID")
    cpu_count: int
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    public: bool
    aliases: list[str]
    names: list[str]
    created_at: datetime
    updated_at: datetime
    created_by: None = None
    last_spawned_at: datetime | None
    spawn_count: int
    build_count: int
    envd_version: str
    build_status: str

    @classmethod
    def of(cls, info: TemplateInfo) -> TemplateBody:
        return cls(**_template_fields(info))


class BuildBody(Struct, rename="camel"):
    build_id: str = field(name="buildID")
    status: str
    created_at: datetime
    updated_at: datetime
    cpu_count: int
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    envd_version: str


class TemplateWithBuilds(TemplateBody, rename="camel", kw_only=True):
    builds: list[BuildBody]

    @classmethod
    def of(cls, info: TemplateInfo) -> TemplateWithBuilds:
        build = BuildBody(
            build_id=info.build_id,
            status=info.status.value,
            created_at=info.created_at,
            updated_at=info.updated_at,
            cpu_count=info.cpu_count,
            memory_mb=info.memory_mib,
            disk_size_mb=info.disk_mib,
            envd_version=info.envd_version,
        )
        return cls(**_template_fields(info), builds=[build])


class SnapshotBody(Struct, rename="camel", omit_defaults=True):
    """The first two fields are E2B's; both have the tag, the default one too. The others are ours."""

    snapshot_id: str = field(name="snapshotID")
    names: list[str]
    template_id: str = field(name="templateID")
    sandbox_id: str = field(name="sandboxID")
    parent_id: str = field(name="parentID")
    created_at: datetime
    cpu_count: int
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    memory: bool
    memory_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, info: SnapshotInfo) -> SnapshotBody:
        return cls(
            snapshot_id=snapshot_id(info),
            names=full_names(info),
            template_id=info.id,
            sandbox_id=info.sandbox_id,
            parent_id=info.parent_id,
            created_at=info.created_at,
            cpu_count=info.cpu_count,
            memory_mb=info.memory_mib,
            disk_size_mb=info.disk_mib,
            memory=info.memory,
            memory_bytes=info.memory_bytes,
            disk_bytes=info.disk_bytes,
        )


class TreeNodeBody(Struct, rename="camel", omit_defaults=True):
    """A node of `GET /tree`. Sizes in bytes."""

    kind: str
    id: str
    names: list[str]
    created_at: datetime
    memory_bytes: int
    disk_bytes: int
    parent_id: str | None = field(default=None, name="parentID")
    state: str | None = None
    resident_bytes: int | None = None
    private_bytes: int | None = None

    @classmethod
    def of(cls, node: TreeNode) -> TreeNodeBody:
        return cls(
            kind=node.kind.value,
            id=node.id,
            names=list(node.names),
            created_at=node.created_at,
            memory_bytes=node.memory_bytes,
            disk_bytes=node.disk_bytes,
            parent_id=node.parent_id,
            state=None if node.state is None else PUBLIC_STATE[node.state],
            resident_bytes=node.resident_bytes,
            private_bytes=node.private_bytes,
        )


class TemplateAlias(Struct, rename="camel"):
    template_id: str = field(name="templateID")
    public: bool


def _template_fields(info: TemplateInfo) -> dict[str, Any]:
    return {
        "template_id": info.id,
        "build_id": info.build_id,
        "cpu_count": info.cpu_count,
        "memory_mb": info.memory_mib,
        "disk_size_mb": info.disk_mib,
        "public": info.public,
        "aliases": list(info.names),
        "names": list(info.names),
        "created_at": info.created_at,
        "updated_at": info.updated_at,
        "last_spawned_at": info.last_spawned_at,
        "spawn_count": info.spawn_count,
        "build_count": info.build_count,
        "envd_version": info.envd_version,
        "build_status": info.status.value,
    }
