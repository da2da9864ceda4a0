"""Where everything lies on disk: one object that knows the paths of a node's home."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Home:
    """The layout of a home directory. Three kinds of state, never mixed:

    `staging/` is scratch of builders, deletable at any time. `templates/` is the committed repository: a directory
    counts when its manifest is there. `cache` is derived and rebuilt at will. `sandboxes/` belongs to the records in
    `aenv.db`. `images` holds links to layers that the block server shows. All but `cache` must be on one file system:
    layers are shared by hard links. Control sockets of VMMs lie under `run`, which is short because a Unix socket path
    has 107 bytes.
    """

    root: Path
    cache: Path

    @property
    def tag(self) -> str:
        """Short name of this home, unique on the machine; names namespaces and the run directory."""
        return hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:8]

    @property
    def database(self) -> Path:
        return self.root / "aenv.db"

    @property
    def api_key(self) -> Path:
        return self.root / "secrets/api-key"

    @property
    def node_secret(self) -> Path:
        return self.root / "secrets/node-secret"

    @property
    def templates(self) -> Path:
        return self.root / "templates"

    @property
    def sandboxes(self) -> Path:
        return self.root / "sandboxes"

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    @property
    def images(self) -> Path:
        """Links to the layers of open memory images."""
        return self.root / "images"

    @property
    def run(self) -> Path:
        """Control sockets; per boot of the machine."""
        base = Path("/run/aenv") if os.geteuid() == 0 else Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / "aenv"
        return base / self.tag

    @property
    def blocks(self) -> Path:
        """What belongs to the block server: its sockets, state, log and mount."""
        return self.run / "blocks"

    def create(self) -> None:
        """Make all directories; idempotent. They are private to the owner."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o711)
        self.cache.mkdir(parents=True, exist_ok=True, mode=0o711)
        for folder in (self.templates, self.sandboxes, self.staging, self.images):
            folder.mkdir(exist_ok=True, mode=0o711)
        (self.root / "secrets").mkdir(exist_ok=True, mode=0o700)
        self.run.mkdir(parents=True, exist_ok=True, mode=0o711)

    def forget_run(self) -> None:
        """Remove the run directory, unless a machine that could not be ended still has its socket there."""
        with suppress(OSError):
            self.run.rmdir()


def read_or_create_secret(path: Path, length: int = 32) -> bytes:
    """A random secret of `length` bytes kept in hex at `path` (mode 0600), made once and atomically.

    Raises InvalidInputError when the file holds something else.
    """
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(length) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # fails when another process was first: its secret is the one
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        text = path.read_text(errors="replace")
    if not re.fullmatch(f"[0-9a-f]{{{2 * length}}}", text.strip()):
        raise InvalidInputError(
            str(path), f"expected {2 * length} hexadecimal digits", hint="remove the file to get a new secret"
        )
    return bytes.fromhex(text.strip())
