/*
 * setrlimit and prlimit. The kernel counts address space that is only reserved
 * towards the program's limit. Under a limit, malloc would succeed while all
 * other mappings fail. So the allocator releases what it has reserved once the
 * program sets a limit. The heap then grows by segments, to which the limit
 * applies.
 */
#include "api/limits.h"
#include "api/instance.h"
#include "api/registration.h"
#include "arena/arena.h"
#include "os/filters.h"
#include "os/syscall.h"
#include "os/vm.h"

#include <errno.h>
#include <sys/resource.h>
#include <unistd.h>

#ifndef CALM_WITHOUT_MALLOC

#define EXPORT __attribute__((visibility("default")))

static void limit_space(struct arenas *arenas, size_t bytes) {
    arena_limit_space(arenas, bytes);
    cpu_caches_limit(arenas->caches);
}

/* Reads the limit, because another process may have set it, or the program by a
 * direct system call. */
bool limits_make_room(size_t bytes) {
    if (!allocator_is_ready() || registration_is_suspended() || filters_now() == FILTERS_ADDED) {
        return false;
    }
    int saved_errno = errno;
    size_t limit = vm_limit_bytes();
    bool makes = limit != SIZE_MAX && !vm_can_map(bytes) && !arena_is_held(&calm_arenas);
    if (makes) {
        limit_space(&calm_arenas, limit);
        arena_trim(&calm_arenas, 0);
    }
    errno = saved_errno;
    return makes;
}

static int change_limit(pid_t process, unsigned resource, const struct rlimit *wanted,
                        struct rlimit *before) {
    long result = os_syscall(SYS_prlimit64, process, resource, wanted, before);
    if (result == 0 && wanted != NULL && resource == RLIMIT_AS && wanted->rlim_cur != RLIM_INFINITY &&
        (process == 0 || process == getpid()) && !registration_is_suspended() && allocator_ensure_started()) {
        limit_space(&calm_arenas, wanted->rlim_cur);
    }
    return (int)libc_result(result);
}

/* The functions have other names here, because the headers declare them with
 * types of their own. */
EXPORT int set_limit(unsigned resource, const struct rlimit *limit) __asm__("setrlimit");
EXPORT int set_limit(unsigned resource, const struct rlimit *limit) {
    return change_limit(0, resource, limit, NULL);
}

EXPORT int process_limit(pid_t process, unsigned resource, const struct rlimit *wanted,
                         struct rlimit *before) __asm__("prlimit");
EXPORT int process_limit(pid_t process, unsigned resource, const struct rlimit *wanted,
                         struct rlimit *before) {
    return change_limit(process, resource, wanted, before);
}

/* On 64-bit systems both kinds of limits are equal. */
EXPORT int set_limit_64(unsigned resource, const struct rlimit *limit) __asm__("setrlimit64")
    __attribute__((alias("setrlimit")));
EXPORT int process_limit_64(pid_t process, unsigned resource, const struct rlimit *wanted,
                            struct rlimit *before) __asm__("prlimit64") __attribute__((alias("prlimit")));

#endif
