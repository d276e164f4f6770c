/* A number that differs from process to process. */
#ifndef CALM_OS_SEED_H
#define CALM_OS_SEED_H

#include <stdint.h>

/* From what the kernel gave the program at its start, and the time, so that a child of fork has another one.
 * No secret. Thread-safe; preserves errno. */
uint64_t os_process_seed(void);

#endif
