/*
 * What changes a process's users, groups, capabilities and namespaces: no thread of ours is there meanwhile,
 * as the C library, which has all of the program's threads change, does not know of ours. Nor is there one
 * while the process is copied in ways that call no fork handler, which a program of one thread may do and
 * allocate in the copy: a lock that a thread of ours held would be held there for ever. And what starts
 * threads: without restartable sequences if their creator has none. Each call is passed on to the next
 * definition. Not in static programs, where the C library's own cannot be asked for.
 */
#include "api/allocator.h"
#include "api/own_threads.h"
#include "api/registration.h"
#include "os/symbols.h"
#include "os/syscall.h"

#ifdef CALM_SHARED_LIBRARY

#include <dlfcn.h>
#include <errno.h>
#include <grp.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/types.h>
#include <threads.h>

#define EXPORT __attribute__((visibility("default")))

static any_function next_of(_Atomic(any_function) *known, const char *name) {
    any_function next = atomic_load_explicit(known, memory_order_relaxed);
    if (next == NULL) {
        next = (any_function)(uintptr_t)dlsym(RTLD_NEXT, name);
        atomic_store_explicit(known, next, memory_order_relaxed);
    }
    return next;
}

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

/* ---- threads, of a creator without restartable sequences ---- */

typedef int start_posix(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                        void *argument);
typedef int start_c11(thrd_t *thread, thrd_start_t run, void *argument);

struct start {
    unsigned creator;
    void *(*run)(void *);
    thrd_start_t run_c11;
    void *argument;
};

static _Atomic(any_function) next_pthread_create;
static _Atomic(any_function) next_thrd_create;

static struct start *new_start(unsigned creator, void *argument) {
    struct start *start = allocate(sizeof *start);
    if (start != NULL) {
        *start = (struct start){.creator = creator, .argument = argument};
    }
    return start;
}

/* In the new thread, which frees nothing before its registration is known. */
static struct start begin_thread(void *started) {
    struct start start = *(struct start *)started;
    registration_begin_thread(start.creator);
    release(started);
    return start;
}

static void *begin_posix(void *started) {
    struct start start = begin_thread(started);
    return start.run(start.argument);
}

static int begin_c11(void *started) {
    struct start start = begin_thread(started);
    return start.run_c11(start.argument);
}

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument) {
    start_posix *next = (start_posix *)next_of(&next_pthread_create, "pthread_create");
    unsigned creator = registration_of_creator();
    if (creator == 0 && next != NULL) {
        return next(thread, attributes, run, argument);
    }
    struct start *start = next == NULL ? NULL : new_start(creator, argument);
    if (start == NULL) {
        return EAGAIN;
    }
    start->run = run;
    int error = next(thread, attributes, begin_posix, start);
    if (error != 0) {
        release(start);
    }
    return error;
}

EXPORT int thrd_create(thrd_t *thread, thrd_start_t run, void *argument) {
    start_c11 *next = (start_c11 *)next_of(&next_thrd_create, "thrd_create");
    unsigned creator = registration_of_creator();
    if (creator == 0 && next != NULL) {
        return next(thread, run, argument);
    }
    struct start *start = next == NULL ? NULL : new_start(creator, argument);
    if (start == NULL) {
        return thrd_nomem;
    }
    start->run_c11 = run;
    int status = next(thread, begin_c11, start);
    if (status != thrd_success) {
        release(start);
    }
    return status;
}

/* At the start: the C library does not look symbols up in a signal handler, which may fork. */
__attribute__((constructor)) static void look_up(void) {
    next_of(&next_clone, "clone");
    next_of(&next_pthread_create, "pthread_create");
    if (next_of(&next__Fork, "_Fork") == NULL || next_of(&next_thrd_create, "thrd_create") == NULL) {
        dlerror(); /* before glibc 2.34 and 2.28; the program is to find no error that is not its own */
    }
}

#endif
