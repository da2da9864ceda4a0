"""The data plane: from outside into guests."""
