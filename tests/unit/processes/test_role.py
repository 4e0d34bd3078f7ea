"""What a role announces, and what others read of it."""

from __future__ import annotations

import pytest

from polyturn.processes.role import Role, read_address, read_control


@pytest.fixture
def role(tmp_path) -> Role:
    (tmp_path / "roles").mkdir()
    return Role(name="engine-1", folder=tmp_path)


def test_nobody_serves_before_it_says_so(role):
    assert read_address(role.folder, "engine-1") is None
    assert read_control(role.folder, "engine-1") is None


@pytest.mark.parametrize("control", [None, "http://127.0.0.1:2"])
def test_an_address_and_where_orders_are_taken(role, control):
    role.announce("http://127.0.0.1:1", control=control)
    assert read_address(role.folder, "engine-1") == "http://127.0.0.1:1"
    assert read_control(role.folder, "engine-1") == control
