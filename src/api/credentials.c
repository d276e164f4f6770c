/*
 * What changes a process's users, groups, capabilities and namespaces: no thread of ours is there meanwhile,
 * as the C library, which has all of the program's threads change, does not know of ours. Nor is there one
 * while the process is copied in ways that call no fork handler, which a program of one thread may do and
 * allocate in the copy: a lock that a thread of ours held would be held there for ever. Each call is passed
 * on to the next definition. Not in static programs, where the C library's own cannot be asked for.
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

/* Of the arguments that are optional all are passed on: which of them are there the flags say. */
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

/* At the start: the C library does not look symbols up in a signal handler, which may fork. */
__attribute__((constructor)) static void credentials_look_up(void) {
    next_of(&next_clone, "clone");
    if (next_of(&next__Fork, "_Fork") == NULL) {
        dlerror(); /* before glibc 2.34; the program is to find no error that is not its own */
    }
}

#endif
