STEPS: tuple[str, ...]

def spawn(
    path: bytes,
    argv: list[bytes],
    envp: list[bytes],
    fds: list[tuple[int, int]],
    *,
    cwd: bytes | None = None,
    cgroups: list[int] = ...,
    oom_score_adj: int | None = None,
    limits: list[tuple[int, int, int]] = ...,
    user: tuple[int, int, tuple[int, ...]] | None = None,
    no_new_privs: bool = True,
    new_session: bool = True,
) -> tuple[int, int]: ...
