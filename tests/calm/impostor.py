"""A program with a table of counters that belongs to neither of our libraries: for what reads such tables."""

from calm_helpers import ROOT

FLAGS = f"-I{ROOT / 'src'}"
_SOURCE = r"""
    #include "os/counter_table.h"
    #include <stdio.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <unistd.h>
    static struct counter_term one[1];
    static struct counter_table table = COUNTER_TABLE("impostor", one);
    uint64_t word = 42;
    extern int64_t distance;
    __asm__(".pushsection .note.calmalloc,\"aw\",%note\n.balign 4\n.long 10, 8, 1\n.asciz \"calmalloc\"\n"
            ".balign 4\n.globl distance\ndistance: .quad 0\n.popsection\n");
    int main(void) {
        one[0] = (struct counter_term){.name = "counter", .at = &word, .bytes = 8};
        distance = (char *)&table - (char *)&distance;
        CHANGE
        puts("0 {}");
        fflush(stdout);
        char byte;
        while (read(0, &byte, 1) > 0) {}
        return 0;
    }
"""


def impostor(change: str) -> str:
    """Its source. The change is statements; without one, the table is good."""
    return _SOURCE.replace("CHANGE", change)
