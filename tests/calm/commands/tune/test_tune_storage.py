"""Studies that are kept in a database: to go on later, and by several workers at once."""

import json
import os
import pwd
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calm_helpers import ROOT, Calm
from tune_helpers import FakeRunner, glibc_space, knob, search

from calm import cli
from calm.commands.tune import study as studies
from calm.commands.tune.space import Setting
from calm.commands.tune.study import Study, open_storage
from calm.commands.tune.trial import Pair
from calm.core.errors import CalmError

IDENTITY = {"command": ["x", "y"], "time": "wall", "memory": "average", "allocators": ["glibc"]}
PASSWORD = "not-to-be-seen"


def open_study(url: str, name: str = "s", identity: dict[str, Any] | None = None) -> Study:
    return Study(
        glibc_space(),
        seed=1,
        storage=open_storage(url),
        name=name,
        identity=identity or IDENTITY,
        machine={"machine": "m"},
    )


def trimming(setting: Setting | None) -> tuple[float, float]:
    return (0.5 if knob(setting, "glibc.malloc.trim_threshold") is not None else 1.0), 1000


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'tune.db'}"
    first = search(FakeRunner(trimming), study=open_study(url), trials=4)
    assert len(first.tried) == 4
    again = open_study(url)
    assert list(again.tried().values()) == first.tried
    second = search(FakeRunner(trimming), study=again, trials=3)
    assert second.trials == 3
    assert len(second.tried) == 7
    assert {machine for each in second.tried for machine in each.machines} == {"m"}
    assert second.recommendation is not None


def test_a_stopped_trial_leaves_the_study_whole(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'tune.db'}"
    stopped = search(FakeRunner(trimming, stop_at=3), study=open_study(url), trials=4)
    assert stopped.interrupted_by
    again = search(FakeRunner(trimming), study=open_study(url), trials=3)
    assert again.interrupted_by is None
    assert len(again.tried) >= 3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("command", ["x", "z"], "of another command: x y, and not x z"),
        ("time", "cpu", "of another time: wall, and not cpu"),
        ("memory", "peak", "of another memory: average, and not peak"),
        ("allocators", ["glibc", "calmalloc"], "of another allocators: glibc, and not glibc calmalloc"),
    ],
)
def test_a_study_of_something_else_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    url = f"sqlite:///{tmp_path / 'tune.db'}"
    open_study(url)
    with pytest.raises(CalmError, match=message) as raised:
        open_study(url, identity={**IDENTITY, key: value})
    assert raised.value.exit_code == 2
    open_study(url, name="another", identity={**IDENTITY, key: value})


def test_a_study_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    import optuna

    url = f"sqlite:///{tmp_path / 'tune.db'}"
    optuna.create_study(storage=url, study_name="one")
    both = optuna.create_study(storage=url, study_name="two", directions=["minimize"] * 2)
    both.add_trial(
        optuna.trial.create_trial(
            params={"x": 1}, distributions={"x": optuna.distributions.IntDistribution(0, 2)}, values=[0, 0]
        )
    )
    for name in ("one", "two"):
        with pytest.raises(CalmError, match="is not one of calm tune"):
            open_study(url, name=name)


def test_what_this_machine_lacks_is_not_run_here(tmp_path: Path) -> None:
    """Another machine's glibc may know more tunables."""
    url = f"sqlite:///{tmp_path / 'tune.db'}"
    there = open_study(url)
    asked = there.ask()
    there.tell(asked, [Pair(0.1, 1.0)])
    few = {name: v for name, v in glibc_space()["glibc"].items() if name not in asked.setting.values}
    here = Study({"glibc": few}, seed=1, storage=open_storage(url), name="s", identity=IDENTITY)
    runner = FakeRunner(trimming)
    outcome = search(runner, study=here, trials=3)
    assert asked.setting in [each.setting for each in outcome.tried]
    assert here.parameters(asked.setting) is None
    assert asked.setting not in runner.log


def test_a_database_that_goes_away_ends_the_search(tmp_path: Path) -> None:
    path = tmp_path / "tune.db"
    study = open_study(f"sqlite:///{path}")
    runner = FakeRunner(trimming)

    def lose(_: Setting | None) -> None:
        if len(runner.log) > 4:
            path.write_bytes(b"no database" * 1000)

    runner.fails = lose
    outcome = search(runner, study=study, trials=20)
    assert outcome.failure is not None
    assert re.match(r"--storage sqlite:///.*tune.db: ", outcome.failure)
    assert outcome.tried
    assert outcome.recommendation is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host/base", "postgresql://me:***@host/base"),
        (
            "postgresql+psycopg://me:secret@/base?host=/tmp/x",
            "postgresql+psycopg://me:***@/base?host=%2Ftmp%2Fx",
        ),
        ("postgresql://host/base?user=me&password=secret", "postgresql://host/base?user=me"),
        ("sqlite:///tune.db", "sqlite:///tune.db"),
        ("me:secret@host", "me:…"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert studies.redacted_url(url) == shown


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("nonsense", 2, "not the URL of a database"),
        (f"nosuch://me:{PASSWORD}@host/base", 2, "not the URL of a database"),
        ("sqlite:////no/such/folder/tune.db", 1, "unable to open database file"),
        (f"postgresql://me:{PASSWORD}@/base?host=/no/such/folder", 1, "/no/such/folder"),
        (f"postgresql://me@/base?host=/no/such/folder&password={PASSWORD}", 1, "/no/such/folder"),
        (f"mysql+nosuch://me:{PASSWORD}@host/base", 2, "not the URL of a database"),
    ],
)
def test_bad_storage_gets_one_line(
    url: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", "search", "--trials", "1", "--storage", url, "--study", "s", "--", "true"]
    monkeypatch.setattr(sys, "argv", ["calm", *arguments])
    assert cli.run(cli.cli, "calm") == code
    stdout, stderr = capfd.readouterr()
    assert message in stderr
    assert stderr.startswith("calm: --storage ")
    assert stderr.count("\n") == 1
    assert PASSWORD not in stderr + stdout


def test_a_missing_driver_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(CalmError, match=r"needs psycopg: pip install 'calmalloc\[fleet\]'") as raised:
        open_study(f"postgresql://me:{PASSWORD}@host/base")
    assert raised.value.exit_code == 2
    assert PASSWORD not in str(raised.value)


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A server of our own, on a socket alone. It refuses to run as root."""
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    prefix: list[str] = []
    # Short, as a socket's path must be.
    folder = Path(tempfile.mkdtemp(prefix="calm-pg-"))
    if os.geteuid() == 0:
        try:
            account = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("there is no user postgres, and PostgreSQL does not run as root")
        os.chown(folder, account.pw_uid, account.pw_gid)
        prefix = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", "--"]
    password = folder / "password"
    password.write_text(PASSWORD)
    password.chmod(0o644)

    def run(name: str, *arguments: str) -> None:
        subprocess.run(
            [*prefix, str(binaries / name), "-D", str(folder / "data"), *arguments],
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )

    try:
        run(
            *("initdb", "-U", "tuner", "--auth=scram-sha-256", f"--pwfile={password}"),
            *("--no-sync", "-E", "UTF8", "--locale=C"),
        )
        options = f"-k {folder} -c listen_addresses= -c fsync=off -c shared_buffers=8MB"
        run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://tuner:{PASSWORD}@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def test_two_workers_share_a_study(postgres: str, calm: Calm, tmp_path: Path) -> None:
    name = f"study-{secrets.token_hex(4)}"
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\ncase ${GLIBC_TUNABLES-} in *trim_threshold*) sleep 0.02;; *) sleep 0.06;; esac\n"
    )
    program.chmod(0o755)
    shared = [
        *("tune", "search", "-a", "glibc", "--time", "wall", "--memory", "peak"),
        *("--storage", postgres, "--study", name),
    ]
    reports = [tmp_path / f"{number}.json" for number in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "calm", *shared, "--trials", "5", "--json", report, "--", program],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for report in reports
    ]
    for worker, report in zip(workers, reports, strict=True):
        output, _ = worker.communicate()
        assert worker.returncode == 0, output
        assert "Traceback" not in output
        assert PASSWORD not in output + report.read_text()
        found = json.loads(report.read_text())
        assert found["trials"] == 5
        assert found["study"] == {"storage": found["study"]["storage"], "name": name}
        assert found["study"]["storage"].startswith("postgresql://tuner:***@/postgres")
        assert found["recommendation"] is not None
        assert "glibc.malloc.trim_threshold" in found["recommendation"]["setting"]["values"]

    import optuna

    study = optuna.load_study(study_name=name, storage=postgres.replace("postgresql:", "postgresql+psycopg:"))
    done = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    assert len(done) >= 10
    by = [trial.user_attrs["worker"] for trial in done]
    assert len(set(by)) == 2
    assert min(by.count(worker) for worker in set(by)) >= 5
    assert all(trial.user_attrs["machine"] and trial.user_attrs["cpu"] for trial in done)
    other = calm(*shared, "--trials", "1", "--", "sleep", "0.06")
    assert other.returncode == 2
    assert f"study '{name}' is of another command: {program}, and not sleep 0.06" in other.stderr
    assert PASSWORD not in other.stderr


def test_a_wrong_password_is_told_and_not_shown(postgres: str, calm: Calm) -> None:
    url = postgres.replace(PASSWORD, "also-secret")
    result = calm(
        *("tune", "search", "-a", "glibc", "--trials", "1", "--storage", url, "--study", "s"),
        *("--", "sleep", "0.06"),
    )
    assert result.returncode == 1
    assert "password authentication failed" in result.stderr
    assert "also-secret" not in result.stderr
    assert result.stderr.count("\n") == 1
