#include "os/stdio.h"

#include <stdbool.h>
#include <stddef.h>

/* glibc's, since 2.2. */
extern void _IO_list_lock(void) __attribute__((weak));
extern void _IO_list_unlock(void) __attribute__((weak));
extern void _IO_list_resetlock(void) __attribute__((weak));

static bool can_lock(void) {
    return _IO_list_lock != NULL && _IO_list_unlock != NULL && _IO_list_resetlock != NULL;
}

void stdio_before_fork(void) {
    if (can_lock()) {
        _IO_list_lock();
    }
}

void stdio_after_fork_in_parent(void) {
    if (can_lock()) {
        _IO_list_unlock();
    }
}

void stdio_after_fork_in_child(void) {
    if (can_lock()) {
        _IO_list_resetlock();
    }
}
