/*
 * The optional features that a build can leave out, each in a folder of src/ (CALM_OFFLOAD=OFF,
 * CALM_PROFILE=OFF, CALM_COLORED=OFF).
 *
 * The library includes this file instead of a feature's own. What it calls of a feature that is left out does
 * nothing.
 */
#ifndef CALM_API_FEATURES_H
#define CALM_API_FEATURES_H

#include "api/options.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef CALM_OFFLOAD
#include "offload/backend_offload.h"

/* offload_start.c: whether there is to be a server, by the options and the machine; then its backend, NULL if
 * memory is short. */
bool offload_is_wanted(void);
struct backend *offload_start(struct governor *governor);
#else
struct backend;
struct governor;
static inline bool offload_is_wanted(void) {
    if (calm_options.offload != OPTION_OFFLOAD_OFF) {
        text_write_line(2, "calmalloc: option 'offload' ignored: built without that feature");
    }
    return false;
}
static inline struct backend *offload_start(struct governor *governor) {
    return (void)governor, NULL;
}
#endif

#ifdef CALM_PROFILE
#include "profile/heap_profile.h"
#include "profile/unwind.h"
#define HEAP_PROFILE_LAYOUT  (&heap_profile_layout)
#define HEAP_PROFILE_REFUSED "no memory for a profile"
#else
#include <errno.h>
#include <stdint.h>

#define LEFT_OUT(type, name, parameters, result) \
    static inline type name parameters {         \
        return result;                           \
    }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
/* NOLINTBEGIN(misc-unused-parameters) */
LEFT_OUT(void, heap_profile_start, (unsigned cpus, unsigned (*current)(void), void (*use)(bool)), )
LEFT_OUT(void, heap_profile_learn_modules, (void), )
LEFT_OUT(bool, heap_profile_configure, (uint64_t mean_bytes, const char *prefix), mean_bytes == 0)
LEFT_OUT(int, heap_profile_request, (uint64_t mean_bytes, uint32_t seconds, uint64_t *mean), ENOSYS)
LEFT_OUT(bool, heap_profile_should_switch, (void), false)
LEFT_OUT(void, heap_profile_apply, (void), )
LEFT_OUT(bool, heap_profile_is_locked, (void), false)
LEFT_OUT(bool, heap_profile_is_on, (void), false)
LEFT_OUT(bool, heap_profile_should_sample, (size_t size), false)
LEFT_OUT(void, heap_profile_add, (const void *block, size_t size), )
LEFT_OUT(void, heap_profile_remove, (const void *block), )
LEFT_OUT(size_t, heap_profile_bytes, (void), 0)
LEFT_OUT(int, heap_profile_write, (const char *path), ENOSYS)
LEFT_OUT(void, heap_profile_end, (void), )
LEFT_OUT(void, heap_profile_before_fork, (void), )
LEFT_OUT(void, heap_profile_after_fork, (void), )
LEFT_OUT(size_t, unwind_here, (uintptr_t * addresses, size_t max), 0)
LEFT_OUT(void, unwind_print_address, (uintptr_t address, struct text *text), )
/* NOLINTEND(misc-unused-parameters) */
#pragma GCC diagnostic pop
#define HEAP_PROFILE_LAYOUT  NULL
#define HEAP_PROFILE_REFUSED "built without that feature"
#endif

#ifdef CALM_COLORED
#include "colored/colored.h"
#else
static inline void colored_after_fork(void) {
}
#endif

#endif
