#include "os/stdio.h"

#include <stddef.h>

/* glibc's, since 2.2. */
extern void _IO_list_lock(void) __attribute__((weak));
extern void _IO_list_unlock(void) __attribute__((weak));
extern void _IO_list_resetlock(void) __attribute__((weak));

static void call(void (*function)(void)) {
    if (function != NULL) {
        function();
    }
}

void stdio_before_fork(void) {
    call(_IO_list_lock);
}

void stdio_after_fork(bool child) {
    call(child ? _IO_list_resetlock : _IO_list_unlock);
}
