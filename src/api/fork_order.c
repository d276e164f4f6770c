/*
 * The order of the fork handlers. What is registered last runs first before a
 * fork. A handler that runs after the allocator's finds the heaps locked: if it
 * waits for a lock whose holder allocates, the fork never ends. So the
 * allocator's are registered before all others, even those of .preinit_array.
 * Other C libraries than glibc allocate to register a handler, which starts the
 * allocator.
 */
#include <features.h>

#if defined(CALM_SHARED_LIBRARY) && defined(__GLIBC__)

#include "api/instance.h"
#include "api/next.h"

#include <errno.h>

typedef void handler(void);
typedef int register_handlers(handler *before, handler *parent, handler *child, void *object);

/* pthread_atfork, which is a part of each program and library, calls this. */
__attribute__((visibility("default"))) register_handlers __register_atfork;

int __register_atfork(handler *before, handler *parent, handler *child, void *object) {
    static _Atomic(any_function) next;
    allocator_ensure_started();
    register_handlers *registers = (register_handlers *)next_of(&next, "__register_atfork");
    return registers == NULL ? ENOMEM : registers(before, parent, child, object);
}

#endif
