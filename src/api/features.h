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
#define HEAP_PROFILE_LAYOUT  (&heap_profile_layout)
#define HEAP_PROFILE_REFUSED "no memory for a profile"
#else
#include <errno.h>
#include <stdint.h>

static inline void heap_profile_start(unsigned cpus, unsigned (*current_cpu)(void),
                                      void (*use_fast_path)(bool)) {
    (void)cpus, (void)current_cpu, (void)use_fast_path;
}
static inline void heap_profile_learn_modules(void) {
}
static inline bool heap_profile_configure(uint64_t mean_bytes, const char *file_prefix) {
    return (void)file_prefix, mean_bytes == 0;
}
static inline int heap_profile_request(uint64_t mean_bytes, uint32_t seconds, uint64_t *in_force) {
    return (void)mean_bytes, (void)seconds, (void)in_force, ENOSYS;
}
static inline bool heap_profile_should_switch(void) {
    return false;
}
static inline void heap_profile_apply(void) {
}
static inline bool heap_profile_is_locked(void) {
    return false;
}
static inline bool heap_profile_is_on(void) {
    return false;
}
static inline bool heap_profile_should_sample(size_t size) {
    return (void)size, false;
}
static inline void heap_profile_add(const void *block, size_t size) {
    (void)block, (void)size;
}
static inline void heap_profile_remove(const void *block) {
    (void)block;
}
static inline size_t heap_profile_bytes(void) {
    return 0;
}
static inline int heap_profile_write(const char *path, bool replace) {
    return (void)path, (void)replace, ENOSYS;
}
static inline void heap_profile_end(void) {
}
static inline void heap_profile_before_fork(void) {
}
static inline void heap_profile_after_fork(void) {
}
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
