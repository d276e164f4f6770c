/*
 * Functions that change a process's users, groups, capabilities or namespaces.
 * The C library makes all of the program's threads change, but does not know
 * the allocator's own threads. The wrappers stop these threads around each
 * call.
 *
 * The wrappers also stop them while _Fork or clone copies the process, because
 * no fork handler runs then. A program of one thread may allocate in the copy.
 * There, a lock that a thread of the allocator held would never be released.
 *
 * Each wrapper passes the call on to the next definition (next.h).
 */
#include "api/next.h"
#include "api/own_threads.h"
#include "api/registration.h"
#include "os/syscall.h"

#ifdef CALM_SHARED_LIBRARY

#include <errno.h>
#include <grp.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

/* NOLINTBEGIN(bugprone-macro-parentheses): parameters and arguments have their own */
#define PASS_ON(name, parameters, arguments)                                     \
    static _Atomic(any_function) next_##name;                                    \
    EXPORT int name parameters {                                                 \
        int(*next) parameters = (int(*) parameters)next_of(&next_##name, #name); \
        if (next == NULL) {                                                      \
            return (int)libc_result(-ENOSYS);                                    \
        }                                                                        \
        bool stopped = own_threads_stop();                                       \
        int result = next arguments;                                             \
        own_threads_resume(stopped);                                             \
        return result;                                                           \
    }
/* NOLINTEND(bugprone-macro-parentheses) */

PASS_ON(setuid, (uid_t user), (user))
PASS_ON(seteuid, (uid_t user), (user))
PASS_ON(setreuid, (uid_t real, uid_t effective), (real, effective))
PASS_ON(setresuid, (uid_t real, uid_t effective, uid_t saved), (real, effective, saved))
PASS_ON(setgid, (gid_t group), (group))
PASS_ON(setegid, (gid_t group), (group))
PASS_ON(setregid, (gid_t real, gid_t effective), (real, effective))
PASS_ON(setresgid, (gid_t real, gid_t effective, gid_t saved), (real, effective, saved))
PASS_ON(setgroups, (size_t count, const gid_t *groups), (count, groups))
PASS_ON(initgroups, (const char *user, gid_t group), (user, group))
PASS_ON(capset, (void *header, const void *data), (header, data))
PASS_ON(unshare, (int flags), (flags))
PASS_ON(setns, (int descriptor, int kind), (descriptor, kind))
PASS_ON(_Fork, (void), ())

typedef int clone_function(int (*run)(void *), void *stack, int flags, void *argument, ...);

static _Atomic(any_function) next_clone;

/* Passes on all optional arguments. `flags` tells the next function which of
 * them the caller gave. */
EXPORT int clone(int (*run)(void *), void *stack, int flags, void *argument, ...) {
    clone_function *next = (clone_function *)next_of(&next_clone, "clone");
    if (next == NULL) {
        return (int)libc_result(-ENOSYS);
    }
    va_list list;
    va_start(list, argument);
    void *parent = va_arg(list, void *);
    void *storage = va_arg(list, void *);
    void *child = va_arg(list, void *);
    va_end(list);
    bool stopped = (flags & CLONE_VM) == 0 && own_threads_stop();
    bool unregistered = registration_before_child((unsigned)flags);
    int result = next(run, stack, flags, argument, parent, storage, child);
    if (unregistered) {
        registration_after_child(result);
    }
    own_threads_resume(stopped);
    return result;
}

/* A signal handler may fork, so the functions are looked up at the start. */
__attribute__((constructor)) static void credentials_look_up(void) {
    next_of(&next_clone, "clone");
    next_of(&next__Fork, "_Fork");
}

#endif
