#include "os/stdio.h"

#include <stddef.h>

/* glibc has had these since 2.2. */
extern void _IO_list_lock(void) __attribute__((weak));
extern void _IO_list_unlock(void) __attribute__((weak));
extern void _IO_list_resetlock(void) __attribute__((weak));

static void stdio_call(void (*function)(void)) {
    if (function != NULL) {
        function();
    }
}

void stdio_before_fork(void) {
    stdio_call(_IO_list_lock);
}

void stdio_after_fork(bool child) {
    stdio_call(child ? _IO_list_resetlock : _IO_list_unlock);
}
