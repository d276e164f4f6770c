"""Which calls are the program's own: those of allocators and of the languages' libraries are not."""

import pytest

from calm.core.proc import Mapping
from calm.core.symbols import Address
from research.colors.sites import Call, _is_between, _locate, name_of


@pytest.mark.parametrize(
    "library",
    [
        *(
            "libc.so.6",
            "libc-2.31.so",
            "libc.musl-x86_64.so.1",
            "libc_malloc_debug.so.0",
            "libstdc++.so.6.0.33",
        ),
        *("libc++.so.1", "libc++abi.so.1", "libcalmcolors.so", "libcalmalloc.so.0", "libptlbmalloc2.so"),
        *("libjemalloc.so.2", "libmimalloc-secure.so.2", "libsnmallocshim-checks.so", "librpmallocwrap.so"),
        *("libtcmalloc_minimal.so.4", "ld-linux-x86-64.so.2"),
    ],
)
def test_between_a_program_and_the_kernel(library: str) -> None:
    assert _is_between(Call("f", None, library), "")


@pytest.mark.parametrize(
    "library",
    [
        *("libcgns.so.4", "libcblas.so.3", "libcurl.so.4", "libcalmalloc2.so", "libc-client.so.2007e"),
        *("libc++stuff.so", "libmimallocate.so", "solver", "libc.py"),
    ],
)
def test_a_program_s_own_library(library: str) -> None:
    assert not _is_between(Call("f", None, library), "")
    assert _is_between(Call("f", None, library), library)


def test_a_call_is_before_the_place_that_it_returns_to() -> None:
    """Which is behind the end of a file whose last instruction it is."""
    mappings = [
        Mapping(0x1000, 0x3000, "r-xp", 0x800, "08:01", 1, "/lib/a.so (deleted)"),
        Mapping(0x3000, 0x4000, "r-xp", 0, "08:01", 2, "/lib/b.so"),
        Mapping(0x4000, 0x5000, "rwxp", 0, "00:00", 0, ""),
    ]
    found = [_locate(address, mappings) for address in (0x1001, 0x3000, 0x3001, 0x4001, 0x1000)]
    assert found == [Address("/lib/a.so", 0x800, ""), Address("/lib/a.so", 0x27FF, ""), *found[2:]]
    assert found[2:] == [Address("/lib/b.so", 0, ""), None, None]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("main", "main"),
        ("std::vector<int>::push_back(int&&)", "std::vector::push_back"),
        ("std::vector<int>::size() const", "std::vector::size"),
        (
            "void std::vector<double, std::allocator<double> >::_M_realloc_insert<double>(int, double&&)",
            "std::vector::_M_realloc_insert",
        ),
        ("void std::vector<int>::_M_fill_insert", "std::vector::_M_fill_insert"),
        ("std::vector<int> make<int>(int, long)", "make"),
        ("std::function<void (int)> make(long) &&", "make"),
        ("std::unique_ptr<A> (anonymous namespace)::make<A>(int)", "::make"),
        ("(anonymous namespace)::f(int, long)", "::f"),
        ("operator new(unsigned long)", "operator new"),
        ("A::operator bool() const", "A::operator bool"),
        ("bool operator< <int>(A<int> const&, long)", "operator<"),
        ("std::ostream& std::operator<< <char>(std::ostream&, char)", "std::operator<<"),
        ("decltype (f({parm#1}->g())) std::call<int>(int)", "std::call"),
        ("std::sort(int*, int*) [clone .cold]", "std::sort"),
        ("grow [clone .isra.0]", "grow"),
        ("<alloc::vec::Vec<T> as core::clone::Clone>::clone", "::clone"),
    ],
)
def test_a_template_s_name_follows_what_it_returns(function: str, name: str) -> None:
    assert name_of(function) == name
    is_library = name.startswith(("std::", "operator new"))
    assert _is_between(Call(function, None, "solver"), "") == is_library
