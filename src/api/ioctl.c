/*
 * ioctl, by which a program handles page faults of its own blocks
 * (userfaultfd). The wrapper passes each call on to the next definition
 * (next.h), because other libraries wrap ioctl for their devices.
 */
#ifdef CALM_SHARED_LIBRARY

#include "api/next.h"
#include "api/range_calls.h"
#include "os/syscall.h"

#include <stdarg.h>

#define EXPORT __attribute__((visibility("default")))

typedef int ioctl_function(int descriptor, unsigned long request, ...);

static _Atomic(any_function) next_ioctl;

/* The function has another name here, because C libraries declare different
 * types of the request. */
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

/* A signal handler may call ioctl, so the function is looked up at the
 * start. */
__attribute__((constructor)) static void ioctl_look_up(void) {
    next_of(&next_ioctl, "ioctl");
}

#endif
