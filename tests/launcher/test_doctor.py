from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import doctor
from launcher.doctor import Finding, Level


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_taken_port_fails_and_names_the_option(taken_port: int) -> None:
    finding = doctor.check_port("--grpc-port", taken_port)
    assert finding.level == Level.FAIL
    assert "--grpc-port" in finding.remedy


@pytest.mark.parametrize("port", [-4, 65536, 99999])
def test_impossible_port_fails_with_the_range(port: int) -> None:
    finding = doctor.check_port("--http-port", port)
    assert finding.level == Level.FAIL
    assert "0 .. 65535" in finding.remedy


def test_address_of_another_machine_is_not_blamed_on_a_program() -> None:
    finding = doctor.check_port("--http-port", 0, "192.0.2.1")
    assert finding.level == Level.FAIL
    assert "--host" in finding.remedy and "ss -ltnp" not in finding.remedy


def test_free_port_is_ok(taken_port: int) -> None:
    assert doctor.check_port("--http-port", 0).level == Level.OK


@pytest.mark.parametrize(("value", "level"), [(9, Level.FAIL), (10, Level.WARN), (19, Level.WARN), (20, Level.OK)])
def test_grades(value: int, level: Level) -> None:
    assert doctor.graded("x", value, least=10, good=20, unit="things", remedy="r").level == level


def test_a_grade_below_good_carries_its_remedy_and_ok_carries_none() -> None:
    assert doctor.graded("x", 1, least=10, good=20, unit="things", remedy="r").remedy == "r"
    assert doctor.graded("x", 20, least=10, good=20, unit="things", remedy="r").remedy == ""


def test_every_finding_that_is_not_ok_has_a_remedy(taken_port: int) -> None:
    findings = doctor.examine({"--grpc-port": taken_port, "--http-port": 0})
    assert {finding.what for finding in findings} >= {"Python", "packages", "memory", "/dev/shm", "disk", "GPU"}
    assert all(finding.remedy for finding in findings if finding.level != Level.OK)


def test_missing_package_fails_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES_BY_EXTRA", {"segue-package-that-is-absent": "worker"})
    finding = doctor.check_packages()
    assert finding.level == Level.FAIL
    assert "segue[worker]" in finding.remedy


def test_missing_shared_memory_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "absent")
    assert doctor.check_shared_memory().level == Level.FAIL


def test_brackets_in_a_detail_are_not_markup() -> None:
    assert "segue\\[ray]" in doctor.render(Finding(Level.WARN, "packages", "segue[ray]", "r"))
