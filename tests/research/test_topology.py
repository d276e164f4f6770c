"""Which CPUs share a socket, and whether they are a hypervisor's."""

from pathlib import Path

from research import topology


def test_cores_come_before_their_second_threads(tmp_path: Path) -> None:
    for cpu, (package, core) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)] * 2):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert topology.sockets(range(8), tmp_path) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert topology.sockets([0, 4, 7], tmp_path) == [[0, 4], [7]]


def test_a_machine_that_does_not_tell_has_one_socket(tmp_path: Path) -> None:
    assert topology.sockets([0, 1, 2], tmp_path) == [[0, 1, 2]]


def test_a_hypervisors_cpu() -> None:
    assert topology.is_virtual("processor\t: 0\nflags\t\t: fpu hypervisor sse\n")
    assert topology.is_virtual("processor\t: 0\nflags\t\t: fpu sse\nname: hypervisor\n") is False
    assert topology.is_virtual("processor\t: 0\nFeatures\t: fp asimd\n") is None
