/*
 * The start of the program's threads. If the creator of a thread has no
 * restartable sequences, the thread has none either (registration.h). Where
 * address space is limited, the threads' stacks find room (limits.h). The
 * wrappers pass the calls on to the next definition (next.h).
 */
#ifdef CALM_SHARED_LIBRARY

#include "api/allocator.h"
#include "api/limits.h"
#include "api/next.h"
#include "api/registration.h"

#include <errno.h>
#include <pthread.h>
#include <threads.h>

#define EXPORT __attribute__((visibility("default")))

typedef int start_posix(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                        void *argument);
typedef int start_c11(thrd_t *thread, thrd_start_t run, void *argument);

struct start {
    int creator;
    void *(*run)(void *);
    thrd_start_t run_c11;
    void *argument;
};

static _Atomic(any_function) next_pthread_create;
static _Atomic(any_function) next_thrd_create;

static struct start *new_start(int creator, void *argument) {
    struct start *start = allocate(sizeof *start);
    if (start != NULL) {
        *start = (struct start){.creator = creator, .argument = argument};
    }
    return start;
}

/* Runs in the new thread, which must not free before its registration is
 * known. */
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

/* A stack may need address space that the allocator's free memory takes. */
static int start_with_room(start_posix *next, pthread_t *thread, const pthread_attr_t *attributes,
                           void *(*run)(void *), void *argument) {
    int error = next(thread, attributes, run, argument);
    if ((error == EAGAIN || error == ENOMEM) && limits_make_room(LIMITS_FAILED)) {
        error = next(thread, attributes, run, argument);
    }
    return error;
}

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument) {
    start_posix *next = (start_posix *)next_of(&next_pthread_create, "pthread_create");
    int creator = registration_of_creator();
    if (creator == 0 && next != NULL) {
        return start_with_room(next, thread, attributes, run, argument);
    }
    struct start *start = next == NULL ? NULL : new_start(creator, argument);
    if (start == NULL) {
        return EAGAIN;
    }
    start->run = run;
    int error = start_with_room(next, thread, attributes, begin_posix, start);
    if (error != 0) {
        release(start);
    }
    return error;
}

EXPORT int thrd_create(thrd_t *thread, thrd_start_t run, void *argument) {
    start_c11 *next = (start_c11 *)next_of(&next_thrd_create, "thrd_create");
    int creator = registration_of_creator();
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

/* A signal handler may start a thread, so the functions are looked up at the
 * start. */
__attribute__((constructor)) static void thread_start_look_up(void) {
    next_of(&next_pthread_create, "pthread_create");
    next_of(&next_thrd_create, "thrd_create");
}

#endif
