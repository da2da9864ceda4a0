"""AgentENV: agent environments in Linux micro-VMs, with the E2B API."""

__version__ = "0.1.0"
