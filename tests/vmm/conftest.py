from tests.vmm.guest import guest  # noqa: F401
