/* What start.S and cpu.c have in common: selectors, a CPU's own data, and where things lie. */
#ifndef LAYOUT_H
#define LAYOUT_H

#define SELECTOR_CODE      0x08
#define SELECTOR_DATA      0x10
#define SELECTOR_USER_DATA 0x1b
#define SELECTOR_USER_CODE 0x23
/* Of the first CPU; the second one's follows. */
#define SELECTOR_TSS    0x28
#define SELECTOR_CODE32 0x48

/* Offsets into struct cpu, which GS points to. */
#define CPU_SAVED_STACK 0
#define CPU_VALUE       8
#define CPU_VECTOR      16
#define CPU_ERROR       24
#define CPU_ADDRESS     32

/* Ends an operation with no fault: two bytes, that lie in pages to be executed too. */
#define VECTOR_DONE 0x80

/* Below 1 MiB, where a CPU that wakes up can begin. */
#define TRAMPOLINE 0x8000

#define STACK_BYTES 16384

#endif
