/*
 * The optional features that a build can leave out, each in a folder of src/
 * (CALM_PROFILE=OFF).
 *
 * The library includes this file instead of a feature's own. The functions of a
 * feature that is left out do nothing.
 */
#ifndef CALM_API_FEATURES_H
#define CALM_API_FEATURES_H

#include <stdbool.h>
#include <stddef.h>

#ifdef CALM_PROFILE
#include "profile/heap_profile.h"
#include "profile/unwind.h"
#define HEAP_PROFILE_LAYOUT  (&heap_profile_layout)
#define HEAP_PROFILE_REFUSED "no memory for a profile"
#else
#include "os/text.h"

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

#endif
