/* One event of a recorded trace, as it lies in a file or goes through a pipe: 16 bytes, in this machine's
 * order. Written by the plugin, read by calm-trace-replay. */
#ifndef CALM_TRACE_RECORD_H
#define CALM_TRACE_RECORD_H

#include <stdint.h>

/* A number that is no system call's: by it libcalm-trace-marks.so tells the plugin of an allocation call, and
 * a program of the part of it that counts. QEMU, like the kernel, answers it with ENOSYS. Arguments: a
 * mark_kind, a pointer, a size. */
enum { MARK_CALL = 0x63616c6d };

enum mark_kind {
    MARK_ENTER,  /* what follows is the allocator's own */
    MARK_MALLOC, /* it has returned this block */
    MARK_FREE,   /* this one has been given back */
    MARK_LEAVE,  /* it has done something else */
    MARK_BEGIN,  /* with the option marked: what follows counts */
    MARK_END,    /* and here it ends */
};

enum record_kind { RECORD_LOAD, RECORD_STORE, RECORD_MALLOC, RECORD_FREE };

struct record {
    uint64_t address;
    uint32_t bytes;        /* of the access or the block; 0 for a free */
    uint16_t instructions; /* that the thread has run since its last record, without the allocator's */
    uint8_t kind;
    uint8_t thread;
};

_Static_assert(sizeof(struct record) == 16, "a trace is an array of these");

#endif
