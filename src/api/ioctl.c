/*
 * ioctl, by which a program has the page faults of its own blocks handled (userfaultfd). Passed on to the
 * next definition, since other libraries wrap it for their devices; not in static programs, where the C
 * library's own cannot be asked for.
 */
#ifdef CALM_SHARED_LIBRARY

#include "api/marks.h"
#include "api/next.h"
#include "os/syscall.h"

#include <stdarg.h>

#define EXPORT __attribute__((visibility("default")))

typedef int ioctl_function(int descriptor, unsigned long request, ...);

static _Atomic(any_function) next_ioctl;

/* Under another name here, as C libraries differ in the type of the request. */
EXPORT int control_device(int descriptor, unsigned long request, ...) __asm__("ioctl");
EXPORT int control_device(int descriptor, unsigned long request, ...) {
    va_list list;
    va_start(list, request);
    long argument = va_arg(list, long);
    va_end(list);
    ioctl_function *next = (ioctl_function *)next_of(&next_ioctl, "ioctl");
    int result = next != NULL ? next(descriptor, request, argument)
                              : (int)libc_result(os_syscall(SYS_ioctl, descriptor, request, argument));
    if (result >= 0) {
        marks_note_pointed(SYS_ioctl, (const long[6]){descriptor, (long)request, argument});
    }
    return result;
}

/* At the start: the C library does not look symbols up in a signal handler. */
__attribute__((constructor)) static void ioctl_look_up(void) {
    next_of(&next_ioctl, "ioctl");
}

#endif
