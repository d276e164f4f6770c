"""bench/abis: what the guest is told to do, and what becomes of what it says; without any machine."""

import importlib.machinery
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import lab_qemu
import pytest
from calm_helpers import ROOT

from calm.core import measure
from calm.core.errors import CalmError
from calm.core.progress import Bar
from research.lab import machine, payload, session
from research.lab.guest import Run
from research.lab.machine import TCG, Qemu, Topology
from research.lab.packages import Parts
from research.lab.payload import Payload
from research.lab.session import Outcome, Plan

sys.path.insert(0, str(ROOT / "bench"))

from lib import (
    abis_apache,
    abis_guest,
    abis_machine,
    abis_packages,
    abis_pbzip2,
    abis_results,
    abis_table,
    abis_workloads,
)
from lib.abis_guest import PageTables
from lib.abis_machine import ABIS, BASELINE, TLBINS, VARIANTS, Build, Settings
from lib.abis_workloads import WORKLOADS, Workload
from lib.results import compact

# As the kernel writes it: objects of 1 KiB, 8 of them in each slab of 2 pages, and 40 slabs.
SLABS = (
    "abis_spt 301 320 1024 8 2 : tunables    0    0    0 : slabdata     40     40      0",
    "abis_spt 100 104 1024 8 2 : tunables    0    0    0 : slabdata     13     13      0",
)
SAMPLES = (f"nr_page_table_pages 300 {SLABS[0]}", f"nr_page_table_pages 200 {SLABS[1]}")


def said(
    sent: tuple[int, int] = (100, 4100),
    received: tuple[int, int] = (10, 8010),
    samples: Sequence[str] = SAMPLES,
    more: Sequence[str] = (),
) -> str:
    """What a script says, with what the workload itself prints in between."""
    lines = []
    for at, word in enumerate(("before", "after")):
        lines += [
            f"%% {word} nr_tlb_remote_flush {sent[at]}",
            f"%% {word} nr_tlb_remote_flush_received {received[at]}",
            f"%% {word} abis_avoided_private {at * 7}",
            f"%% {word} TLB:  {at}  {2 * at}   TLB shootdowns",
        ]
        if word == "before":
            lines += ["wrote 5 pages", '{"workload": "cow-mt", "pages": 5}']
    return "\n".join([*lines, *(f"%% sample {sample}" for sample in samples), *more]) + "\n"


def test_counters_are_what_the_workload_added() -> None:
    found = abis_guest.counts(said())
    assert (found.deltas[abis_guest.SENT], found.deltas[abis_guest.RECEIVED]) == (4000, 8000)
    assert found.deltas["tlb_row"] == 3
    assert found.deltas["abis_avoided_private"] == 7
    lines = abis_guest.rest(said())
    assert lines == ["wrote 5 pages", '{"workload": "cow-mt", "pages": 5}']
    assert abis_guest.reported(lines) == {"workload": "cow-mt", "pages": 5}
    assert abis_guest.reported(lines[:1]) == {}


def test_page_tables_are_taken_where_they_are_most() -> None:
    tables = abis_guest.counts(said(samples=reversed(SAMPLES))).page_tables  # type: ignore[arg-type]
    assert tables == PageTables(300, 40 * 2 * 4096)
    assert tables.ratio == 1 + 80 / 300
    # A kernel without records, and a workload that was over at once.
    assert abis_guest.counts(said(samples=["nr_page_table_pages 7 "])).page_tables == PageTables(7, 0)
    assert abis_guest.counts(said(samples=[])).page_tables is None


@pytest.mark.parametrize("name", ["nr_tlb_remote_flush", "nr_tlb_remote_flush_received", "TLB:"])
@pytest.mark.parametrize("word", ["before", "after"])
def test_a_counter_that_is_not_there_is_no_zero(name: str, word: str) -> None:
    lines = [line for line in said().splitlines() if not line.startswith(f"%% {word} {name} ")]
    with pytest.raises(CalmError, match="does not count"):
        abis_guest.counts("\n".join(lines))


@pytest.mark.parametrize(
    "torn", ["nr_tlb_remote_flush 41OO", "nr_tlb_remote_flush", "", "TLB:  1  2   TLB sh"]
)
def test_a_counter_that_is_torn_is_none(torn: str) -> None:
    with pytest.raises(CalmError, match="of a counter"):
        abis_guest.counts(said(more=[f"%% after {torn}"]))


def test_a_kernel_that_complains_has_counted_nothing() -> None:
    with pytest.raises(CalmError, match=r"reports: .*BUG: Bad rss"):
        abis_guest.counts(said(more=["%% complaint [   3.1] BUG: Bad rss-counter state"]))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that are none, in place of Debian's packages; and of build/release."""
    folder = tmp_path / "cache"
    for name in (
        "apache2-bin/usr/sbin/apache2",
        *(
            f"apache2-bin/usr/lib/apache2/modules/mod_{name}.so"
            for name in ("mpm_event", "authz_core", "dir")
        ),
        "wrk/usr/bin/wrk",
        "pbzip2/usr/bin/pbzip2",
        "e2fsprogs/sbin/mkfs.ext4",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("/bin/true", path)
    release = tmp_path / "release"
    release.mkdir()
    for name in {workload.program for workload in WORKLOADS.values() if workload.program}:
        shutil.copy("/bin/true", release / name)
    for name in {workload.library for workload in WORKLOADS.values() if workload.library}:
        shutil.copy("/bin/true", release / f"lib{name}.so")
    build = tmp_path / "build"
    for name in (machine.QEMU, "firmware", "baseline/bzImage", "abis/bzImage", "debug/bzImage"):
        (build / name).parent.mkdir(parents=True, exist_ok=True)
        (build / name).write_text(name)
    monkeypatch.setattr(abis_packages, "CACHE", folder)
    monkeypatch.setattr(abis_packages, "fetch", lambda *_: None)
    for module in (abis_machine, abis_workloads):
        monkeypatch.setattr(module, "RELEASE", release)
    monkeypatch.setattr(abis_pbzip2, "INPUT_MIB", 1)
    return tmp_path


def settings(folder: Path, rounds: int = 1) -> Settings:
    return Settings(Build(folder / "build"), rounds, 60)


def plan_of(name: str, variant: str, cpus: int, folder: Path) -> Plan:
    workload = WORKLOADS[name]
    return abis_machine.plan_of(VARIANTS[variant], cpus, workload.group, [workload], settings(folder))


@pytest.mark.parametrize("cpus", [2, 16])
@pytest.mark.parametrize("name", WORKLOADS)
def test_each_script_is_one_and_counts_one_program(name: str, cpus: int, cache: Path) -> None:
    plan = plan_of(name, ABIS, cpus, cache)
    (turn,) = plan.turns
    text = plan.payload.entries[turn.command[0]].content.decode()
    sources = [text, *(content.decode() for content in abis_guest.files().values())]
    for source in sources:
        done = subprocess.run(["sh", "-n"], input=source, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert sum(line.startswith("count ") for line in text.splitlines()) == 1
    # What the script names is in the guest.
    for word in text.split():
        if word.startswith(str(cache)):
            assert str(Path(word).resolve()) in plan.payload.entries


def test_what_is_counted_lies_between_two_looks(tmp_path: Path) -> None:
    """The functions themselves, with a /proc that is a folder, and tools that do nothing."""
    tools = tmp_path / "tools"
    tools.mkdir()
    flushes = tmp_path / "proc/vmstat"
    flushes.parent.mkdir()
    flushes.write_text("nr_free_pages 5\nnr_tlb_remote_flush 10\nnr_tlb_remote_flush_received 20\n")
    (tmp_path / "proc/interrupts").write_text("  0:  9  timer\nTLB:   1   2   TLB shootdowns\n")
    (tmp_path / "proc/slabinfo").write_text("task_struct 1 1 1 1 1 : x\n")
    scripts = {
        "nproc": "echo 4",
        "dmesg": '[ "$*" = -c ] || echo "[ 1.0] WARNING: CPU: 0 at mm/abis.c:1"',
        "taskset": 'if [ "$1" = -p ]; then exit; fi\necho "on $2"\nshift 2\nexec "$@"',
        "work": f"sed -i 's/flush 10/flush 15/' {flushes}\necho 'I work'\nexit 3",
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    functions = abis_guest.files()[f"{abis_guest.FOLDER}/counting"].decode()
    functions = functions.replace("/proc/", "proc/").replace("/tmp/", "")
    body = f"{functions}\nsampled=false\ncpus=0-2\ncount work || echo ended with $?\n"
    done = subprocess.run(
        ["sh", "-c", body],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PATH": f"{tools}:/usr/bin:/bin"},
    )
    assert done.stdout.splitlines() == [
        "%% before nr_tlb_remote_flush 10",
        "%% before nr_tlb_remote_flush_received 20",
        "%% before TLB:   1   2   TLB shootdowns",
        "on 0-2",
        "I work",
        "%% after nr_tlb_remote_flush 15",
        "%% after nr_tlb_remote_flush_received 20",
        "%% after TLB:   1   2   TLB shootdowns",
        "%% complaint [ 1.0] WARNING: CPU: 0 at mm/abis.c:1",
        "ended with 3",
    ]


def test_apache_and_what_asks_it_have_cpus_of_their_own(cache: Path) -> None:
    text = abis_apache.script(servers=12, generators=4)
    assert "taskset -c 0-11 " in text
    assert "cpus=12-15\n" in text
    assert "-t 4 " in text
    files = Payload({})
    abis_apache.add(files)
    configuration = files.entries[f"{abis_guest.FOLDER}/apache.conf"].content.decode()
    for line in ("EnableMMAP On", "EnableSendfile Off", "BufferedLogs On", "LoadModule mpm_event_module "):
        assert line in configuration
    assert files.entries["/srv/www/index.html"].size == 10_701
    # Whose children are named by number has to be known by it.
    assert ":33:33:" in files.entries["/etc/passwd"].content.decode()


def test_requests_are_what_was_answered() -> None:
    lines = ["Running 10s test @ http://127.0.0.1:8080/", "  1234 requests in 10.02s, 13.20MB read"]
    assert abis_apache.requests(lines) == 1234
    # A server that is busy closes connections that it kept.
    closed = "  Socket errors: connect 0, read 56, write 0, timeout 0"
    assert abis_apache.requests([*lines, closed]) == 1234
    for line in (
        "  Non-2xx or 3xx responses: 7",
        "  Socket errors: connect 1, read 0, write 0, timeout 0",
        "  Socket errors: connect 0, read 0, write 0, timeout 9",
    ):
        with pytest.raises(CalmError, match=line.strip()):
            abis_apache.requests([*lines, line])
    for words in (["  0 requests in 10.02s, 0B read"], ["unable to connect"], []):
        with pytest.raises(CalmError, match="no request was answered"):
            abis_apache.requests(words)


def test_what_is_compressed_is_no_archive_by_name(cache: Path) -> None:
    plan = plan_of("pbzip2", ABIS, 8, cache)
    (path,) = (path for path, entry in plan.payload.entries.items() if entry.size == 1 << 20)
    assert Path(path).name == "made-text-1-MiB"
    assert f"cp {path} /disk/made-text\n" in abis_pbzip2.script(8)


def test_what_is_compressed_is_always_the_same() -> None:
    size = 700_000
    first, second = (b"".join(abis_pbzip2.pieces(size)) for _ in range(2))
    assert first == second
    assert len(first) == size
    assert first[257:].find(b"ustar") >= 0
    # Like text, and not like one page again and again.
    pages = {first[at : at + 4096] for at in range(0, size, 4096)}
    assert len(pages) == -(-size // 4096)


def test_a_machine_is_emulated_as_its_variant_and_workload_ask(cache: Path) -> None:
    qemu = Qemu("q", "v")

    def words(plan: Plan) -> list[str]:
        paths = (Path("k"), Path("i"), Path("c"))
        return machine.command(qemu, plan.topology, 1 << 30, plan.accelerator, *paths, plan.qemu_options)

    plan = plan_of("cow-mt", "version", 16, cache)
    command = words(plan)
    assert command[command.index("-L") + 1] == str(cache / "build/firmware")
    assert command[command.index("-accel") + 1] == "tcg,thread=single,tlb-size=256,tlb-victim-sets=256"
    assert command[command.index("-cpu") + 1] == "max"
    assert command[command.index("-append") + 1].endswith("tsc=unstable zram.num_devices=2 abis=version")
    assert "16,sockets=4,cores=4,threads=1" in command
    assert plan.kernel == cache / "build/abis/bzImage"
    assert plan.qemu == cache / "build" / machine.QEMU
    assert plan_of("cow-mt", BASELINE, 8, cache).kernel == cache / "build/baseline/bzImage"
    assert plan_of("cow-mt", BASELINE, 8, cache).topology == Topology(8, 2)

    command = words(plan_of("instructions", TLBINS, 16, cache))
    assert command[command.index("-accel") + 1] == "tcg,thread=single,tlb-size=256,tlb-victim-sets=256"
    assert command[command.index("-icount") + 1] == "shift=0"
    assert command[command.index("-cpu") + 1] == "max,tlbins=on"
    assert "1,sockets=1,cores=1,threads=1" in command


def test_a_usual_machine_is_as_it_was() -> None:
    paths = (Path("k"), Path("i"), Path("c"))
    arguments = (Qemu("q", "v"), Topology(2, 1), 1 << 30)
    command = machine.command(*arguments, TCG, *paths)
    assert command[command.index("-accel") + 1] == "tcg,thread=multi"
    assert command[command.index("-cpu") + 1] == "max"
    assert "-L" not in command
    command = machine.command(*arguments, machine.KVM, *paths)
    assert command[command.index("-accel") + 1] == "kvm"
    assert command[command.index("-cpu") + 1] == "host"


def test_another_qemu_is_taken_where_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "qemu"
    with pytest.raises(CalmError, match="does not run"):
        machine.find_qemu(path)
    path.write_text("#!/bin/sh\necho emulator 1\n")
    path.chmod(0o755)
    assert machine.find_qemu(path) == Qemu(str(path), "emulator 1")


@pytest.mark.parametrize("name", ["abis/bzImage", "qemu-system-x86_64", "firmware"])
def test_what_is_not_built_is_named(name: str, cache: Path) -> None:
    (cache / "build" / name).unlink()
    with pytest.raises(CalmError, match=r"missing: run make abis"):
        plan_of("cow-mt", ABIS, 8, cache)


def test_a_workload_that_is_not_built_is_named(cache: Path) -> None:
    (cache / "release/migrate").unlink()
    with pytest.raises(CalmError, match="migrate is not built"):
        plan_of("migrate", ABIS, 8, cache)


Ran = Callable[..., list[Plan]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Ran:
    """In place of the machine: each run says the same, or the boot fails as it is told to."""

    def prepare(printed: str = "", errors: str = "", code: int = 0, **changes: Any) -> list[Plan]:
        plans = []

        def run(plan: Plan, _: Bar) -> Outcome:
            plans.append(plan)
            if "raises" in changes:
                raise CalmError(changes["raises"])
            found = Outcome(plan, Qemu("/q/qemu", "9"), Parts(Path("/k"), "k", Path("/b")), TCG, "no", 1)
            measured = measure.parse(json.loads(lab_qemu.report(0, code)))
            for number in range(plan.rounds):
                for turn in plan.turns:
                    found.runs.append((number, Run(turn.label, measured, printed or said(), errors)))
            for name, value in changes.items():
                setattr(found, name, value)
            return found

        monkeypatch.setattr(session, "run", run)
        return plans

    return prepare


def entries_of(name: str, cache: Path, rounds: int = 2) -> list[dict[str, Any]]:
    workload = WORKLOADS[name]
    return abis_machine.measure(ABIS, 8, workload.group, [workload], settings(cache, rounds))


def test_each_round_is_kept(ran: Ran, cache: Path) -> None:
    plans = ran()
    (entry,) = entries_of("cow-mt", cache, rounds=3)
    assert plans[0].rounds == 3
    assert (entry["workload"], entry["variant"], entry["cpus"], entry["failure"]) == ("cow-mt", ABIS, 8, None)
    assert [run["nr_tlb_remote_flush"] for run in entry["runs"]] == [4000] * 3
    assert entry["runs"][0]["printed"]["pages"] == 5
    assert entry["runs"][0]["page_table_pages"] == 300


def test_a_boot_that_fails_shows_its_console(
    ran: Ran, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = tmp_path / "console.log"
    console.write_text("\n".join(f"line {number}" for number in range(100)))
    reason = f"the guest's kernel panicked: Oops; its console is in {console}"
    for how in ({"raises": reason}, {"failures": {"cow-mt": reason}, "runs": []}):
        ran(**how)
        (entry,) = entries_of("cow-mt", cache)
        assert (entry["runs"], entry["failure"]) == ([], reason)
        told = capsys.readouterr().err
        assert "panicked: Oops" in told
        assert "    line 99\n" in told
        assert "line 50" not in told


def test_runs_that_cannot_be_read_are_failures(
    ran: Ran, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(printed="%% before nr_tlb_remote_flush 1\n", errors="cannot open the file\n")
    (entry,) = entries_of("cow-mt", cache)
    assert entry["runs"] == []
    assert "does not count" in str(entry["failure"])
    assert "    cannot open the file" in capsys.readouterr().err
    # A library that was not there would be measured as glibc.
    ran()
    (entry,) = entries_of("listing1:calmalloc", cache)
    assert "libcalmalloc.so was not active" in str(entry["failure"])
    # So would a page that nobody got.
    (entry,) = entries_of("apache", cache)
    assert "no request was answered" in str(entry["failure"])


@pytest.mark.parametrize(
    ("name", "printed", "errors", "reason"),
    [
        ("cow-mt", '{"workload": "cow-mt", "pag', "", "its line of JSON is torn"),
        ("listing1:calmalloc", "", '{"allocator": "calmalloc", "act', "report of libcalmalloc.so is torn"),
        ("instructions", "", "", "it ended without its line of JSON"),
        ("instructions", '{"pages": 4}', "", "its line of JSON lacks ns_per_fault"),
        ("instructions", '{"ns_per_fault": null}', "", "its line of JSON.ns_per_fault is None"),
        ("stale-reads", "it is well", "", "it ended without its line of JSON"),
        ("stale-reads", '{"seconds": 6.1, "stale": 0, "operations": {"cow": {"count": 1}}}', "", "cow lacks"),
    ],
)
def test_a_workload_that_does_not_say_what_it_did_has_failed(
    name: str,
    printed: str,
    errors: str,
    reason: str,
    ran: Ran,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counters = "".join(f"{line}\n" for line in said().splitlines() if line.startswith("%%"))
    ran(printed=f"{counters}{printed}\n", errors=errors)
    (entry,) = entries_of(name, cache)
    assert entry["runs"] == []
    assert reason in str(entry["failure"])
    assert f"bench/abis: {name} under abis on " in capsys.readouterr().err


def test_a_program_that_fails_is_a_failure(ran: Ran, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(code=3, errors="migrate: there is one memory node here\n", failures={"migrate": "exit code 3"})
    (entry,) = entries_of("migrate", cache)
    assert (entry["runs"], entry["failure"]) == ([], "exit code 3")
    assert "    migrate: there is one memory node here" in capsys.readouterr().err


def test_an_interrupt_ends_it(ran: Ran, cache: Path) -> None:
    ran(interrupted_by=15)
    with pytest.raises(SystemExit) as ended:
        entries_of("cow-mt", cache)
    assert ended.value.code == 143


def test_names_stand_for_all_that_begin_with_them() -> None:
    assert [each.name for each in abis_workloads.expand(["listing1", "apache"])] == [
        "listing1",
        "listing1:ptlbmalloc2",
        "listing1:calmalloc",
        "apache",
    ]
    assert len(abis_workloads.expand(["parsec"])) == 6
    assert [each.name for each in abis_workloads.expand(["parsec:dedup"])] == ["parsec:dedup"]
    assert abis_workloads.expand(list(WORKLOADS)) == list(WORKLOADS.values())


def entry(workload: str, variant: str, sent: Sequence[int], cpus: int = 16, **more: Any) -> dict[str, Any]:
    """With twice as many received as sent; as it is in a file."""
    runs = [
        {"nr_tlb_remote_flush": count, "nr_tlb_remote_flush_received": 2 * count, **more} for count in sent
    ]
    found = {
        "workload": workload,
        "variant": variant,
        "cpus": cpus,
        "files": "f",
        "kernel": "6.1.0",
        "failure": None if runs else "it hung",
        "runs": runs,
    }
    kept: dict[str, Any] = compact(abis_results.summarized(found))
    return kept


def rows(entries: Sequence[dict[str, Any]]) -> Mapping[str, list[str]]:
    """The cells of the first table, by workload."""
    lines = abis_table.counts(abis_results.Results(entries), ABIS)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row[1:] for row in cells}


def test_ratios_are_of_medians_and_judged_by_the_paper() -> None:
    entries = [
        entry("cow-mt", BASELINE, [1000, 2000, 3000]),
        entry("cow-mt", ABIS, [20, 40, 80]),
        entry("migrate", BASELINE, [1000]),
        entry("migrate", ABIS, [300]),
    ]
    found = rows(entries)
    assert found["cow-mt"] == [
        *("16", "2,000", "40", "0.02 (0.00667 to 0.08)", "0.02 (0.00667 to 0.08)", "2", "2"),
        "sent 0.03: met",
    ]
    assert found["migrate"][-1] == "sent 0.08: not met"


def test_a_ratio_to_few_is_none() -> None:
    found = rows([entry("cow-mt", BASELINE, [abis_results.FEW - 1]), entry("cow-mt", ABIS, [1])])
    assert found["cow-mt"][3:5] == ["few", "few"]
    assert found["cow-mt"][-1] == ""
    found = rows([entry("cow-mt", BASELINE, [abis_results.FEW]), entry("cow-mt", ABIS, [1])])
    assert found["cow-mt"][3] == "0.02"
    # Nor is there one to a round that had none.
    found = rows([entry("cow-mt", BASELINE, [0, 100, 100]), entry("cow-mt", ABIS, [1] * 3)])
    assert found["cow-mt"][3:5] == ["few", "few"]


def test_servers_are_counted_by_request() -> None:
    found = rows(
        [entry("apache", BASELINE, [2000], requests=1000), entry("apache", ABIS, [800], requests=4000)]
    )
    assert found["apache, each request"][1:4] == ["2", "0.20", "0.1"]
    assert found["apache, each request"][-1] == "sent 0.10: met; received 0.10: met"


def test_the_mean_is_over_programs_that_have_enough() -> None:
    entries = [
        *(entry(f"parsec:{name}", BASELINE, [1000]) for name in ("dedup", "canneal")),
        entry("parsec:dedup", ABIS, [60]),
        entry("parsec:canneal", ABIS, [10]),
        entry("parsec:swaptions", BASELINE, [3]),
        entry("parsec:swaptions", ABIS, [3]),
    ]
    found = rows(entries)
    assert found["parsec, mean of 2 of 6"][3] == "0.035"
    assert found["parsec, mean of 2 of 6"][-1] == "sent 0.04: met"


def test_what_the_mean_is_without_is_told() -> None:
    entries = [
        *(entry(f"parsec:{name}", BASELINE, [1000]) for name in ("dedup", "canneal", "fluidanimate")),
        *(entry(f"parsec:{name}", ABIS, [60]) for name in ("dedup", "streamcluster", "swaptions")),
        entry("parsec:swaptions", BASELINE, [3]),
        entry("parsec:canneal", ABIS, []),
        entry("parsec:streamcluster", BASELINE, []),
    ]
    found = rows(entries)
    assert found["parsec:streamcluster"][3:5] == ["baseline failed"] * 2
    assert found["parsec:swaptions"][3:5] == ["few"] * 2
    (told,) = abis_table.left_out(abis_results.Results(entries), ABIS)
    assert told.startswith("- parsec on 16 CPUs: the mean excludes ")
    for reason in (
        *("canneal (abis failed)", "streamcluster (baseline failed)", "swaptions (few)"),
        *("fluidanimate (abis was not run)", "bodytrack (abis was not run)"),
    ):
        assert reason in told
    assert "dedup" not in told
    assert told in abis_table.text({"entries": entries, "qemu": "QEMU 7"})
    # Nobody asks for a mean where none of them was run.
    assert abis_table.left_out(abis_results.Results([entry("cow-mt", ABIS, [1])]), ABIS) == []


def test_a_table_without_rows_is_none() -> None:
    entries = [entry("cow-mt", ABIS, []), entry("stale-reads", "debug", [], 8)]
    failed = [
        "- cow-mt under abis on 16 CPUs failed: it hung",
        "- stale-reads under debug on 8 CPUs failed: it hung",
    ]
    text = abis_table.text({"entries": entries, "qemu": "QEMU 7"})
    assert text.splitlines() == [*failed, "", "Linux 6.1.0, QEMU 7."]
    for each in entries:
        del each["kernel"]
    assert abis_table.text({"entries": entries, "qemu": "QEMU 7"}).endswith("\nQEMU 7.\n")
    # Of few shootdowns no ratios are shown by variant.
    few = [entry("cow-mt", variant, [1]) for variant in (BASELINE, ABIS, TLBINS)]
    assert "Sent, by variant" not in abis_table.text({"entries": few, "qemu": "QEMU 7"})


@pytest.mark.parametrize(("rounds", "said"), [(1, "one round"), (3, "medians of up to 3 rounds")])
def test_rounds_are_counted_in_words(rounds: int, said: str) -> None:
    text = abis_table.text({"entries": [entry("cow-mt", ABIS, [9] * rounds)], "qemu": "QEMU 7"})
    assert text.endswith(f"\nLinux 6.1.0, QEMU 7; {said}.\n")


def test_the_text_has_all_that_is_known() -> None:
    tables = {"page_table_pages": 4000, "page_table_records_bytes": 1000 * 4096}
    entries = [
        entry("cow-mt", BASELINE, [1000]),
        entry("cow-mt", ABIS, [20], abis_avoided_private=980),
        entry("cow-mt", TLBINS, [10]),
        entry("cow-mt", "version", [500]),
        entry("anon-r-seq", ABIS, [0], **tables),
        entry("instructions", BASELINE, [0], cpus=1, printed={"ns_per_fault": 990.0}),
        entry("instructions", ABIS, [0], cpus=1, printed={"ns_per_fault": 1298.4}),
        entry("instructions", TLBINS, [0], cpus=1, printed={"ns_per_fault": 1239.0}),
        entry("apache", ABIS, []),
    ]
    text = abis_table.text({"entries": entries, "qemu": "QEMU 7"})
    assert "| workload | CPUs | abis | tlbins | version |" in text
    assert "| cow-mt | 16 | 0.02 | 0.01 | 0.5 |" in text
    assert "| cow-mt | 16 | 980 |  |  |  |  |  |" in text
    assert "1.250 times the memory of 4,000 page tables alone (goal: at most 1.25: met)" in text
    assert "| abis: with the series | 1,298 | +308 |" in text
    assert "| baseline: the kernel without the series | 990 |  |" in text
    assert "- apache under abis on 16 CPUs failed: it hung" in text
    assert "Linux 6.1.0, QEMU 7; one round." in text


@pytest.mark.parametrize("name", ["stale-reads", "stale-reads:moving"])
def test_the_stress_test_runs_once_under_a_kernel_that_watches_itself(name: str, cache: Path) -> None:
    workload = WORKLOADS[name]
    assert abis_machine.usual_variants(workload.group) == ("debug",)
    variant = VARIANTS["debug"]
    plan = abis_machine.plan_of(variant, 8, workload.group, [workload], settings(cache, rounds=3))
    assert (plan.rounds, plan.timeout_s) == (1, 1200)
    assert plan.kernel == cache / "build/debug/bzImage"
    # Threads of their own, so that CPUs are at work at the same time.
    assert ",thread=multi," in plan.qemu_options["-accel"]
    assert "page_poison=1" in plan.qemu_options["-append"]
    assert ("--migrate-threads" in workload.body(8)) == name.endswith(":moving")
    assert "--seconds 600 --threads 8 " in workload.body(8)


def test_what_the_stress_test_did_is_told_and_is_no_row_of_the_table() -> None:
    def operation(number: int) -> dict[str, int]:
        return {"count": number, "pages": 2 * number, "reads": 1000 * number, "writes": 10 * number}

    printed = {"seconds": 600.2, "stale": 0, "operations": {"munmap": operation(3), "cow": operation(4)}}
    found = [
        *(entry("cow-mt", variant, [sent]) for variant, sent in (("baseline", 100), ("abis", 5))),
        entry("stale-reads", "debug", [77], 8, printed=printed),
    ]
    text = abis_table.text({"entries": found, "qemu": "Q"})
    assert (
        "- stale-reads, 600 s on 8 CPUs, debug: **0** stale of 7,070 reads and writes, "
        "while mappings were changed 7 times in 2 ways (14 pages)"
    ) in text
    assert "| stale-reads" not in text
    assert "debug:" not in text.replace("CPUs, debug:", "")


def file_of(entries: Sequence[dict[str, Any]], builds: Mapping[str, str]) -> dict[str, Any]:
    return {"qemu": "QEMU 7", "builds": builds, "tlb_sets": 256, "entries": entries}


def test_results_of_another_machine_do_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "abis.json"

    def known(builds: Mapping[str, str], sets: int = 256) -> tuple[list[dict[str, Any]], dict[str, str]]:
        return abis_results.known(path, builds, sets, lambda *_: "f")

    assert known({"qemu": "a"}) == ([], {"qemu": "a"})
    old = [entry("cow-mt", BASELINE, [1]), entry("migrate", BASELINE, [1])]
    path.write_text(json.dumps(file_of(old, {"qemu": "a", "baseline": "b"})))
    entries, builds = known({"qemu": "a", "abis": "c"})
    assert (entries, builds) == (old, {"qemu": "a", "baseline": "b", "abis": "c"})
    assert known({"qemu": "a", "baseline": "other"}) == ([], {"qemu": "a", "baseline": "other"})
    assert known({"qemu": "a"}, sets=512) == ([], {"qemu": "a"})
    new = entry("cow-mt", BASELINE, [2])
    assert abis_results.merge(entries, [new]) == [new, old[1]]
    assert len(abis_results.merge(entries, [entry("cow-mt", ABIS, [2])])) == 3


def test_results_of_other_programs_do_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "abis.json"
    names = ("cow-mt", "migrate", "apache", "gone")
    path.write_text(json.dumps(file_of([entry(name, BASELINE, [1]) for name in names], {})))

    def digest(workload: Workload, cpus: int) -> str:
        assert cpus == 16
        if workload.name == "apache":
            raise CalmError("not fetched")
        return {"cow-mt": "f", "migrate": "another"}[workload.name]

    entries, _ = abis_results.known(path, {}, 256, digest)
    assert [entry["workload"] for entry in entries] == ["cow-mt"]


def test_a_digest_is_of_all_that_the_guest_gets(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digests() -> list[str]:
        names = ("listing1", "listing1:calmalloc", "cow-mt", "mmap-read", "apache")
        return [abis_machine.digest_of(WORKLOADS[name], 8) for name in names]

    before = digests()

    def changed() -> list[bool]:
        now = digests()
        found = [one != other for one, other in zip(before, now, strict=True)]
        before[:] = now
        return found

    assert len(set(before)) == len(before)
    assert changed() == [False] * 5
    assert abis_machine.digest_of(WORKLOADS["cow-mt"], 16) != before[2], "its script has the CPUs"
    shutil.copy("/bin/false", cache / "release/libcalmalloc.so")
    assert changed() == [False, True, False, False, False]
    shutil.copy("/bin/false", cache / "release/cow-mt")
    assert changed() == [False, False, True, False, False]
    shutil.copy("/bin/false", cache / "cache/e2fsprogs/sbin/mkfs.ext4")
    # They share a boot, and so what that has.
    assert changed() == [True, True, True, True, False]
    shutil.copy("/bin/false", cache / "cache/wrk/usr/bin/wrk")
    assert changed() == [False, False, False, False, True]
    monkeypatch.setattr(abis_guest, "_LIMITED", "other")
    assert changed() == [True] * 5
    library = cache / "libneeded.so"
    library.write_text("1")
    monkeypatch.setattr(payload, "needed", lambda *_: {library})
    assert changed() == [True] * 5
    library.write_text("2")
    assert changed() == [True] * 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: "[1, 2", "it is no JSON"),
        (lambda file: b"\xff\xfe", "it is no JSON"),
        (lambda file: [file], "it is no object"),
        (lambda file: {key: file[key] for key in ("qemu", "builds", "entries")}, "it lacks tlb_sets"),
        (lambda file: file | {"builds": ["a"]}, "it.builds is no object"),
        (lambda file: file | {"builds": {"qemu": 1}}, "it.builds.qemu is 1"),
        (lambda file: file | {"entries": {}}, "it.entries is no list"),
        (lambda file: file | {"entries": [{"workload": "cow-mt"}]}, r"it.entries\[0\] lacks variant"),
        (
            lambda file: file | {"entries": [entry("cow-mt", ABIS, [1]) | {"median": {"sent": 1}}]},
            "cow-mt.median lacks received",
        ),
        (
            lambda file: file | {"entries": [entry("cow-mt", ABIS, [1]) | {"workload": "stale-reads"}]},
            "stale-reads lacks stress",
        ),
    ],
)
def test_a_file_that_is_no_file_of_results_is_named(
    change: Callable[[dict[str, Any]], Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "abis.json"
    whole = file_of([entry("cow-mt", ABIS, [1]), entry("gone", ABIS, [1])], {"qemu": "a"})
    path.write_text(json.dumps(whole))
    assert abis_results.load(path) == whole
    found = change(whole)
    text = found if isinstance(found, str | bytes) else json.dumps(found)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CalmError, match=rf"abis.json is no file of results: {reason}; remove it"):
        abis_results.load(path)


def test_a_file_stays_whole_where_the_new_one_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new/abis.json"
    abis_results.save(path, {"n": 1})
    with path.open() as reader:
        abis_results.save(path, {"n": 3})
        assert json.load(reader) == {"n": 1}, "it was written into"
    write = Path.write_text

    def cut(self: Path, text: str) -> int:
        write(self, text[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="No space"):
        abis_results.save(path, {"n": 2})
    assert json.loads(path.read_text()) == {"n": 3}
    assert list(path.parent.iterdir()) == [path]


def test_each_workload_has_a_place_of_its_own() -> None:
    groups = {workload.group.name: workload.group for workload in WORKLOADS.values()}
    assert groups["instructions"].machines([2, 16]) == (1,), "its clock needs a machine of one CPU"
    assert groups["programs"].machines(None) == (16,)
    assert groups["programs"].machines([2, 8]) == [2, 8]
    assert isinstance(WORKLOADS["cow-mt"], Workload)


@pytest.fixture
def bench(cache: Path) -> ModuleType:
    """The command itself, and an emulator that says what it is."""
    emulator = cache / "build" / machine.QEMU
    emulator.write_text("#!/bin/sh\necho QEMU emulator version 7\n")
    emulator.chmod(0o755)
    loader = importlib.machinery.SourceFileLoader("bench_abis", str(ROOT / "bench/abis"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


Main = Callable[..., int]


@pytest.fixture
def main(bench: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Main:
    """With files of results and builds that are the test's."""

    def run(*words: str) -> int:
        where = ["--build", str(cache / "build"), "--json", str(cache / "abis.json")]
        monkeypatch.setattr(sys, "argv", ["bench/abis", *where, *words])
        return int(bench.main())

    return run


def saved(cache: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((cache / "abis.json").read_text())
    return result


def test_each_group_is_booted_under_each_variant_on_each_machine(bench: ModuleType) -> None:
    def planned(names: Sequence[str], *how: Any) -> list[tuple[str, int, str, list[str]]]:
        boots = bench.boots(abis_workloads.expand(names), *how)
        return [
            (boot.group.name, boot.cpus, boot.variant, [w.name for w in boot.workloads]) for boot in boots
        ]

    both = ["migrate", "cow-mt"]
    assert planned([*both, "apache"], None, [BASELINE, ABIS]) == [
        *(("programs", 16, variant, both) for variant in (BASELINE, ABIS)),
        *(("apache", cpus, variant, ["apache"]) for cpus in (4, 16) for variant in (BASELINE, ABIS)),
    ]
    assert planned(["cow-mt", "instructions", "stale-reads"], [2, 8], None) == [
        *(("programs", cpus, name, ["cow-mt"]) for cpus in (2, 8) for name in (BASELINE, ABIS, TLBINS)),
        *(("instructions", 1, name, ["instructions"]) for name in (BASELINE, ABIS, TLBINS)),
        *(("stress", cpus, "debug", ["stale-reads", "stale-reads:moving"]) for cpus in (2, 8)),
    ]


def test_what_is_measured_is_in_the_file_and_in_the_tables(
    ran: Ran, main: Main, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = ran()
    assert main("--workload", "cow-mt", "--cpus", "4", "--tlb-sets", "512", "-n", "2") == 0
    assert [plan.kernel for plan in plans] == [
        cache / f"build/{name}/bzImage" for name in ("baseline", "abis", "abis")
    ]
    assert all("tlb-victim-sets=512" in plan.qemu_options["-accel"] for plan in plans)
    result = saved(cache)
    assert (result["qemu"], result["tlb_sets"]) == ("QEMU emulator version 7", 512)
    assert set(result["builds"]) == {"qemu", "baseline", "abis"}
    counted = [*((BASELINE, 2), (ABIS, 2), (TLBINS, 2))]
    assert [(each["variant"], each["n"]) for each in result["entries"]] == counted
    assert not any("runs" in each for each in result["entries"])
    whole = json.loads((cache / "runs/abis.json").read_text())["entries"]
    assert [(each["variant"], len(each["runs"])) for each in whole] == counted
    printed = capsys.readouterr().out
    assert "| cow-mt | 4 | 4,000 | 4,000 | 1 (1 to 1) |" in printed
    assert main("--table") == 0
    assert capsys.readouterr().out == printed
    assert len(plans) == 3


def test_what_was_measured_before_stays_while_it_holds(ran: Ran, main: Main, cache: Path) -> None:
    ran()

    def measured(*words: str) -> list[str]:
        assert main("--variant", ABIS, "--cpus", "4", "-n", "1", "--workload", *words) == 0
        return [each["workload"] for each in saved(cache)["entries"]]

    assert measured("cow-mt") == ["cow-mt"]
    assert measured("migrate") == ["cow-mt", "migrate"]
    assert measured("msync-mt") == ["cow-mt", "migrate", "msync-mt"]
    shutil.copy("/bin/false", cache / "release/migrate")
    assert measured("msync-mt") == ["cow-mt", "msync-mt"]
    assert measured("msync-mt", "--tlb-sets", "0") == ["msync-mt"]
    (cache / "build/abis/bzImage").write_text("another")
    assert measured("cow-mt", "--tlb-sets", "0") == ["cow-mt"]


def test_the_status_is_of_what_is_measured_now(
    ran: Ran, main: Main, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(raises="QEMU: it is broken")
    one = ("--cpus", "4", "--variant", ABIS, "-n", "1", "--workload")
    assert main(*one, "cow-mt") == 1
    ran()
    assert main(*one, "migrate") == 0
    assert [each.get("failure") for each in saved(cache)["entries"]] == ["QEMU: it is broken", None]
    assert "- cow-mt under abis on 4 CPUs failed: QEMU: it is broken" in capsys.readouterr().out
    assert main("--table") == 0
    assert main(*one, "stale-reads") == 1, "it says nothing here"
    assert main(*one, "cow-mt") == 0


@pytest.mark.parametrize("words", [["--table"], ["--workload", "cow-mt"]])
def test_a_torn_file_is_told_and_kept(
    words: Sequence[str], ran: Ran, main: Main, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = ran()
    (cache / "abis.json").write_text('{"entries": [')
    assert main(*words) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"bench/abis: {cache / 'abis.json'} is no file of results: it is no JSON; ")
    assert told.count("\n") == 1
    assert (plans, (cache / "abis.json").read_text()) == ([], '{"entries": [')


def test_a_tlb_may_have_no_second_level(bench: ModuleType, cache: Path) -> None:
    def accelerator(text: str) -> str:
        sets = Settings(Build(cache / "build"), 1, 60, bench.sets_of(text))
        cow_mt = WORKLOADS["cow-mt"]
        plan = abis_machine.plan_of(VARIANTS[ABIS], 4, cow_mt.group, [cow_mt], sets)
        return plan.qemu_options["-accel"].removeprefix("tcg,thread=single,")

    assert accelerator("0") == "tlb-size=256,tlb-victim-sets=1"
    # QEMU wants no more sets than entries before them.
    assert accelerator("512") == "tlb-size=512,tlb-victim-sets=512"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--cpus", "3"], "'3' is neither an even number from 2 to 14 nor a multiple of 4 from 16 to 64"),
        (["--cpus", "18"], "'18' is neither"),
        (["--cpus", "68"], "'68' is neither"),
        (["--cpus", "many"], "'many' is neither"),
        (["--tlb-sets", "3"], "'3' is neither 0 nor a power of two up to 4,194,304"),
        (["--tlb-sets", "-1"], "'-1' is neither"),
        (["--tlb-sets", "8388608"], "'8388608' is neither"),
        (["--runs", "0"], "--runs: 1 at least"),
        (["--timeout", "0"], "--timeout: more than 0 seconds"),
        (["--timeout", "-3"], "--timeout: more than 0 seconds"),
        (["--timeout", "nan"], "--timeout: more than 0 seconds"),
        (["--workload", "nothing"], "invalid choice: 'nothing'"),
        (["--variant", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_what_cannot_be_is_refused(
    words: Sequence[str], reason: str, ran: Ran, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = ran()
    with pytest.raises(SystemExit) as ended:
        main(*words)
    assert (ended.value.code, plans) == (2, [])
    assert reason in capsys.readouterr().err


def test_the_script_runs_in_its_own_environment() -> None:
    words = [str(ROOT / "bench/abis"), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "instructions always has 1" in " ".join(done.stdout.split()).lower()
