"""Plugin package, where Hydra searches for launchers; see spatialdl/submitting."""
