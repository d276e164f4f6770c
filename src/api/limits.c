/*
 * setrlimit and prlimit. The kernel counts address space that is only reserved: once a program limits its
 * own, all else that maps memory would fail while malloc went on. So what is reserved is let go then, and the
 * heap grows by segments, which the limit holds for.
 */
#include "api/limits.h"
#include "api/registration.h"
#include "api/state.h"
#include "governor/state.h"
#include "os/filters.h"
#include "os/syscall.h"
#include "os/vm.h"

#include <errno.h>
#include <sys/resource.h>
#include <unistd.h>

#ifndef CALM_WITHOUT_MALLOC

#define EXPORT __attribute__((visibility("default")))

static void limit_space(struct governor *governor, void *bytes) {
    heap_lock(governor);
    space_limit(&governor->heap.space, *(const size_t *)bytes);
    heap_unlock(governor);
    cpu_caches_limit(governor->caches);
}

/* Another process may have set the limit, or the program by a direct system call. */
bool limits_make_room(size_t bytes) {
    if (!allocator_is_ready() || registration_is_suspended() || filters_now() == FILTERS_ADDED) {
        return false;
    }
    int saved_errno = errno;
    struct backend *backend = calm_allocator.backend;
    size_t limit = vm_limit_bytes();
    bool makes = limit != SIZE_MAX && !vm_can_map(bytes) &&
                 backend->functions->interrupted(backend) == INTERRUPTED_NOTHING;
    if (makes) {
        backend->functions->run(backend, limit_space, &limit);
        backend->functions->trim(backend, 0);
    }
    errno = saved_errno;
    return makes;
}

static int change_limit(pid_t process, unsigned resource, const struct rlimit *wanted,
                        struct rlimit *before) {
    long result = os_syscall(SYS_prlimit64, process, resource, wanted, before);
    if (result == 0 && wanted != NULL && resource == RLIMIT_AS && wanted->rlim_cur != RLIM_INFINITY &&
        (process == 0 || process == getpid()) && !registration_is_suspended() && allocator_ready()) {
        size_t bytes = wanted->rlim_cur;
        calm_allocator.backend->functions->run(calm_allocator.backend, limit_space, &bytes);
    }
    return (int)libc_result(result);
}

/* Under other names here, as the headers' have types of their own. */
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

/* With 64 bits both kinds of limits are the same. */
EXPORT int set_limit_64(unsigned resource, const struct rlimit *limit) __asm__("setrlimit64")
    __attribute__((alias("setrlimit")));
EXPORT int process_limit_64(pid_t process, unsigned resource, const struct rlimit *wanted,
                            struct rlimit *before) __asm__("prlimit64") __attribute__((alias("prlimit")));

#endif
