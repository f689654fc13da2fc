"""The doctor on a broken machine: one check that fails keeps no other from speaking."""

import importlib.metadata

import pytest
from dflash_offline.doctor import examine


@pytest.mark.slow  # the other checks load torch and transformers
def test_a_check_that_fails_is_itself_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a broken installation raises; not only what an import may."""

    version = importlib.metadata.version

    def fail(name: str) -> str:
        if name == "awscrt":
            raise AttributeError("module 'half' has no\nattribute 'installed'")
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", fail)
    found = examine()
    assert not found.is_healthy
    told = "the check itself failed: AttributeError: module 'half' has no attribute 'installed'"
    assert ("fault", "packages", told) in found.lines
    subjects = [subject for _, subject, _ in found.lines]
    assert {"python", "memory", "disk", "shared memory", "attention"} <= set(subjects)
