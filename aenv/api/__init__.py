"""The E2B control plane over HTTP."""
