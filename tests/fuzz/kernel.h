/*
 * A kernel that refuses: calls of os/vm.h, os/purge.h, os/memory.h and os/thread.h reach these functions
 * first
 * (--wrap, CMakeLists.txt), which fail where the input says so. What is not refused is done.
 *
 * Also knows what was mapped, so that a target starts each input without the mappings of the one before.
 */
#ifndef CALM_TESTS_FUZZ_KERNEL_H
#define CALM_TESTS_FUZZ_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Nothing is refused from now on, the machine has room, and all that was mapped since the last call is
 * unmapped.
 */
void kernel_reset(void);

/* The lowest bit is for the next call: 1 refuses it. After the last bit that is set, nothing is refused. */
void kernel_refuse(uint32_t pattern);

/* The limit on address space that the code under test sees; SIZE_MAX: none. It is not enforced. */
void kernel_limit(size_t bytes);

/* What the machine has left, of 1 GiB. */
void kernel_leave(size_t bytes);

/* Whether what is mapped from now on stays after kernel_reset: for state that outlives an input. */
void kernel_keep(bool keep);

/* Ranges that are mapped. */
size_t kernel_mapped(void);

/* Refusals since kernel_reset. */
size_t kernel_refusals(void);

/* Whether any pages could not be renewed since then, so that the heap has given them up. */
bool kernel_has_lost_pages(void);

#endif
